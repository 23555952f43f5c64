"""Backup, restore and moves of real stores, and what killed processes leave of them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tasks.config import Tolerances
from tasks.tracking.backup import back_up, copy_database, restore
from tasks.tracking.baseline import against_history
from tasks.tracking.nights import find_nights
from tasks.tracking.store import TrackingError, writer

sys.path.insert(0, str(Path(__file__).parents[1]))
from store_contents import dump, files


def test_a_backup_is_the_store_and_restores_where_it_was_lost(tracking, log, tmp_path):
    with writer(tracking) as store:
        log(store, 1)
    before, artifacts = dump(tracking / "mlflow.db"), files(tracking / "artifacts")
    backup = back_up(tracking)
    assert backup.folder.parent == tracking / "backups"
    assert backup.runs == 2
    assert dump(backup.folder / "mlflow.db") == before
    assert files(backup.folder / "artifacts") == artifacts
    (tracking / "mlflow.db").unlink()
    shutil.rmtree(tracking / "artifacts")
    restore(backup.folder, tracking)
    assert dump(tracking / "mlflow.db") == before
    assert files(tracking / "artifacts") == artifacts


def test_a_backup_restored_elsewhere_finds_its_artefacts_there(tracking, log, tmp_path):
    with writer(tracking) as store:
        log(store, 1)
        night = log(store, 2)
    backup = back_up(tracking, tmp_path / "backup")
    shutil.rmtree(tracking)
    elsewhere = tmp_path / "el se" / "wo"
    restore(backup.folder, elsewhere)
    with writer(elsewhere) as store:
        comparison = against_history(store, night, Tolerances())
        assert {change.against for change in comparison.changes} == {"the last good night day 1"}
        log(store, 3)  # and is written to, there
        assert len(find_nights(store)) == 3
    assert not tracking.exists()


def test_a_backup_while_another_connection_writes_is_whole(tracking, tmp_path):
    """An MLflow server does not ask for the lock; what it has not committed is not in the backup."""
    with closing(sqlite3.connect(tracking / "mlflow.db")) as server:
        server.execute("INSERT INTO experiments (name, lifecycle_stage, workspace) VALUES ('half', 'active', 'default')")
        backup = back_up(tracking, tmp_path / "backup")
        server.rollback()
    with closing(sqlite3.connect(backup.folder / "mlflow.db")) as database:
        assert ("half",) not in database.execute("SELECT name FROM experiments").fetchall()
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_store_that_was_moved_keeps_its_artefacts_where_it_is_now(tracking, log, tmp_path):
    with writer(tracking) as store:
        log(store, 1)
    moved = tmp_path / "mo ved"
    tracking.rename(moved)
    with writer(moved) as store:
        night = log(store, 2)
        comparison = against_history(store, night, Tolerances())
        assert {change.against for change in comparison.changes} == {"the last good night day 1"}
        assert all(run.info.artifact_uri.startswith(f"{moved.as_uri()}/artifacts/") for run in find_nights(store))
    assert not tracking.exists()


def test_a_copy_of_a_store_writes_nothing_into_the_one_it_was_copied_from(tracking, log, tmp_path):
    with writer(tracking) as store:
        log(store, 1)
    shutil.copytree(tracking, tmp_path / "copy")
    before = files(tracking)
    with writer(tmp_path / "copy") as store:
        log(store, 2)
    assert files(tracking) == before


def test_artefacts_that_stayed_behind_when_a_store_was_moved_are_not_forgotten(tracking, log, tmp_path):
    with writer(tracking) as store:
        log(store, 1)
    moved = tmp_path / "moved"
    moved.mkdir()
    (tracking / "mlflow.db").rename(moved / "mlflow.db")
    before = dump(moved / "mlflow.db")
    for act in (lambda: writer(moved).__enter__(), lambda: back_up(moved)):
        with pytest.raises(TrackingError, match=r"mlruns/artifacts: artefacts of this store .*: move .* to .*/moved/artifacts"):
            act()
    assert dump(moved / "mlflow.db") == before
    (tracking / "artifacts").rename(moved / "artifacts")
    with writer(moved) as store:
        assert store.client.list_artifacts(find_nights(store)[0].info.run_id)


def test_artefacts_that_were_written_to_the_old_place_after_a_move_are_not_forgotten(tracking, log, tmp_path):
    """As nights did before a move was followed: the folder of before came back, with the newest nights alone in it."""
    with writer(tracking) as store:
        log(store, 1)
    shutil.copytree(tracking, tmp_path / "moved")
    shutil.rmtree(tracking)
    with closing(sqlite3.connect(tmp_path / "moved" / "mlflow.db")) as database:
        (uri,) = database.execute("SELECT artifact_uri FROM runs").fetchone()
    Path(uri.removeprefix("file://")).mkdir(parents=True)
    shutil.rmtree(tmp_path / "moved" / "artifacts" / Path(uri).parent.name)
    with pytest.raises(TrackingError, match="artefacts of this store are still there"):
        writer(tmp_path / "moved").__enter__()


def test_artefacts_that_a_person_sent_elsewhere_are_left_there_when_a_store_is_moved(tracking, tmp_path):
    with writer(tracking) as store:
        store.client.create_experiment("own", artifact_location="s3://bucket/own")
        store.client.create_experiment("other", artifact_location=(tmp_path / "other").as_uri())
    tracking.rename(tmp_path / "moved")
    with writer(tmp_path / "moved") as store:
        found = {name: store.client.get_experiment_by_name(name).artifact_location for name in ("own", "other")}
    assert found == {"own": "s3://bucket/own", "other": (tmp_path / "other").as_uri()}


def test_a_moved_store_that_cannot_be_written_is_one_sentence(tracking, tmp_path, monkeypatch):
    tracking.rename(tmp_path / "moved")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, **{**options, "timeout": 0.1}))
    with closing(connect(tmp_path / "moved" / "mlflow.db")) as server:
        server.execute("BEGIN IMMEDIATE")
        with pytest.raises(TrackingError, match=r"mlflow\.db: MLflow cannot open it: database is locked"):
            writer(tmp_path / "moved").__enter__()


def test_a_backup_leaves_a_folder_alone_that_has_the_name_of_a_part(tracking, tmp_path):
    own = tmp_path / "copy.partial"
    own.mkdir()
    (own / "precious").write_text("")
    backup = back_up(tracking, tmp_path / "copy")
    assert (own / "precious").exists()
    assert sorted(path.name for path in tmp_path.glob("copy*")) == ["copy", "copy.partial"]
    os.umask(umask := os.umask(0))
    assert backup.folder.stat().st_mode & 0o777 == 0o777 & ~umask  # and is not for its maker alone


@pytest.mark.parametrize("database", [None, b"", b"no database at all" * 300, "without tables"])
def test_a_restore_that_fails_leaves_nothing_and_succeeds_with_the_mended_backup(tracking, log, tmp_path, database):
    with writer(tracking) as store:
        log(store, 1)
    backup = back_up(tracking, tmp_path / "backup").folder
    (backup / "mlflow.db").rename(tmp_path / "whole.db")
    if isinstance(database, bytes):
        (backup / "mlflow.db").write_bytes(database)
    elif database:
        with closing(sqlite3.connect(backup / "mlflow.db")) as other:
            other.execute("CREATE TABLE other (x)")
    new = tmp_path / "new"
    with pytest.raises(TrackingError, match=r"backup(/mlflow\.db)?: "):
        restore(backup, new)
    assert not new.exists() or [path.name for path in new.iterdir()] == ["writer.lock"]
    (tmp_path / "whole.db").replace(backup / "mlflow.db")
    restore(backup, new)
    assert files(new / "artifacts") == files(tracking / "artifacts")
    assert {path.name for path in new.iterdir()} == {"writer.lock", "mlflow.db", "artifacts"}


def test_a_restore_that_fails_at_its_last_step_leaves_nothing(tracking, log, tmp_path, monkeypatch):
    with writer(tracking) as store:
        log(store, 1)
    backup = back_up(tracking, tmp_path / "backup").folder
    rename = Path.rename

    def full(path, target):
        if Path(target).name == "mlflow.db":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(TrackingError, match="the backup cannot be restored: No space left on device"):
        restore(backup, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["writer.lock"]


def killed_in_a_commit(path):
    """Let a process die when half of its transaction is in the database: only the journal knows what was there before."""
    script = (
        "import os, signal, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('PRAGMA cache_size = 1'); "
        "rows = [(n, 'x' * 500, 'none') for n in range(5000)]; "
        "c.executemany('INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)', rows); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == -signal.SIGKILL
    assert path.with_name("mlflow.db-journal").stat().st_size > 0


def test_a_store_whose_writer_was_killed_in_a_commit_is_opened_and_is_as_before(tracking):
    before = dump(tracking / "mlflow.db")
    killed_in_a_commit(tracking / "mlflow.db")
    with writer(tracking):
        pass
    assert not (tracking / "mlflow.db-journal").exists()
    assert dump(tracking / "mlflow.db") == before


def test_a_store_whose_writer_was_killed_in_a_commit_is_backed_up_as_it_was_before(tracking):
    before = dump(tracking / "mlflow.db")
    killed_in_a_commit(tracking / "mlflow.db")
    assert dump(back_up(tracking).folder / "mlflow.db") == before


def test_a_database_that_was_killed_in_a_commit_is_copied_as_it_was_before(tracking, tmp_path):
    before = dump(tracking / "mlflow.db")
    killed_in_a_commit(tracking / "mlflow.db")
    copy_database(tracking / "mlflow.db", tmp_path / "copy.db")
    assert dump(tmp_path / "copy.db") == before


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
def test_no_new_database_is_put_beside_the_journal_of_one_that_was_moved_away(tracking, suffix):
    """Sqlite would take it for the new one's, and roll the new one back into parts of the old one."""
    backup = back_up(tracking)
    (tracking / "mlflow.db").rename(tracking / "damaged.db")
    left = tracking / f"mlflow.db{suffix}"
    left.write_bytes(b"left")
    for act in (lambda: restore(backup.folder, tracking), lambda: writer(tracking).__enter__()):
        with pytest.raises(TrackingError, match=rf"mlflow\.db{suffix}: belongs to a database that is not here any more: move"):
            act()
    assert left.read_bytes() == b"left"
    assert not (tracking / "mlflow.db").exists()
    left.rename(tracking / f"damaged.db{suffix}")
    restore(backup.folder, tracking)


def test_what_cannot_be_backed_up_or_restored_is_one_sentence(tracking, tmp_path):
    with pytest.raises(TrackingError, match=r"nowhere: no mlflow\.db in it"):
        back_up(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(TrackingError, match=r"is there already"):
        back_up(tracking, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match=r"the backup cannot be written"):
        back_up(tracking, tmp_path / "file" / "backup")
    with pytest.raises(TrackingError, match=r"no backup\.json in it"):
        restore(tmp_path, tmp_path / "new")
    backup = back_up(tracking)
    with pytest.raises(TrackingError, match=r"mlflow\.db: is there; move it away first"):
        restore(backup.folder, tracking)
    with (tracking / "mlflow.db").open("r+b") as database:
        database.seek(8192)
        database.write(b"\xff" * 16384)
    with pytest.raises(TrackingError, match=r"mlflow\.db: (is damaged|cannot be copied)"):
        back_up(tracking, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("content", [b"", b"no database at all" * 300])
def test_what_is_no_store_of_mlflow_leaves_no_part_of_a_backup(tmp_path, content):
    (tmp_path / "mlflow.db").write_bytes(content)
    with pytest.raises(TrackingError, match="MLflow cannot open it"):
        back_up(tmp_path, tmp_path / "copies" / "one")
    assert not (tmp_path / "copies").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_backup_whose_description_is_damaged_is_not_restored(tmp_path, content):
    (tmp_path / "backup.json").write_text(content)
    (tmp_path / "mlflow.db").write_text("")
    with pytest.raises(TrackingError, match="describes no backup"):
        restore(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()
