"""The store's long life, on real stores: retention, and the schema of an older and a newer MLflow."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from tasks.config import Tolerances
from tasks.tracking import upgrade as upgrade_module
from tasks.tracking.baseline import against_history, pin_baseline
from tasks.tracking.nights import find_cells, find_nights
from tasks.tracking.retention import prune
from tasks.tracking.schema import known_revisions, stored_revision
from tasks.tracking.store import TrackingError, writer
from tasks.tracking.upgrade import upgrade

sys.path.insert(0, str(Path(__file__).parents[1]))
from store_contents import FIRST, dump, files

OLD_STORE = Path(__file__).parent / "data" / "mlflow-3.4.0.db.gz"  # written by MLflow 3.4.0 itself
DOCUMENT = Path(__file__).parents[3] / "docs" / "store.md"


@pytest.fixture
def old_store(tmp_path):
    """A tracking folder of MLflow 3.4.0: a night and a cell with eleven points of two metrics."""
    directory = tmp_path / "old"
    directory.mkdir()
    (directory / "mlflow.db").write_bytes(gzip.decompress(OLD_STORE.read_bytes()))
    return directory


def test_pruning_removes_the_artefacts_of_old_nights_and_keeps_their_metrics(tracking, log):
    with writer(tracking) as store:
        for day in (1, 50, 80, 99):
            log(store, day)
        pin_baseline(store, "day 1")
        nights = {run.info.run_name.removeprefix("nightly "): run.info.run_id for run in find_nights(store)}
        cells = {day: find_cells(store, night)[0].info.run_id for day, night in nights.items()}
        now = FIRST + timedelta(days=100)
        before, whole = metrics(store), files(tracking / "artifacts")
        intended = prune(store, 30, dry_run=True, now=now)
        assert files(tracking / "artifacts") == whole
        pruned = prune(store, 30, now=now)
        assert set(pruned.runs) == set(intended.runs) == {nights["day 50"], cells["day 50"]}
        assert pruned.kept == ("nightly day 1 is pinned for some cell",)
        assert metrics(store) == before
        left = {name: text for name, text in whole.items() if name.partition("/")[0] not in pruned.runs}
        assert files(tracking / "artifacts") == left
        assert pruned.bytes == intended.bytes == sum(map(len, whole.values())) - sum(map(len, left.values()))
        tagged = {run.info.run_id for run in store.client.search_runs([store.experiment_id], "tags.`kivi.pruned` LIKE '%'")}
        assert tagged == set(pruned.runs)
        assert prune(store, 30, now=now).runs == ()


def metrics(store):
    return {run.info.run_id: run.data.metrics for run in store.client.search_runs([store.experiment_id])}


def test_the_baseline_is_never_pruned_however_old(tracking, log, make_result, make_night):
    with writer(tracking) as store:
        log(store, 1)
        log(store, 2)
        now = FIRST + timedelta(days=1000)
        pruned = prune(store, 30, now=now)
        assert pruned.kept == ("nightly day 2 is the baseline for some cell",)
        assert len(pruned.runs) == 2  # the parent and the cell of day 1
        night = log(store, 999)
        comparison = against_history(store, night, Tolerances())
        assert {change.against for change in comparison.changes} == {"the last good night day 2"}


def test_pruning_touches_nothing_outside_the_store(tracking, log, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("")
    with writer(tracking) as store:
        log(store, 1)
        log(store, 2)
        with closing(sqlite3.connect(tracking / "mlflow.db")) as database, database:
            database.execute("UPDATE runs SET artifact_uri = ?", (outside.as_uri(),))
        with pytest.raises(TrackingError, match=r"outside: artefacts of .* are not in "):
            prune(store, 1, now=FIRST + timedelta(days=1000))
    assert (outside / "precious").exists()


def test_the_documented_command_removes_for_good_what_a_person_deleted(tracking, log):
    with writer(tracking) as store:
        log(store, 1)
        (night,) = find_nights(store)
        store.client.delete_run(night.info.run_id)
    (command,) = re.findall(r"^    mlflow (gc .*)", DOCUMENT.read_text(), re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    subprocess.run(
        [sys.executable, "-m", "mlflow", *shlex.split(command)], cwd=tracking.parent, env=environment, check=True, timeout=120
    )
    with closing(sqlite3.connect(tracking / "mlflow.db")) as database:
        assert night.info.run_id not in {run for (run,) in database.execute("SELECT run_uuid FROM runs")}
    assert files(tracking / "artifacts" / night.info.run_id) == {}


def test_an_older_store_is_not_opened_but_upgraded_with_a_backup(old_store):
    before = dump(old_store / "mlflow.db")
    with (
        pytest.raises(TrackingError, match=r"its schema 71994744cf8e is older than MLflow .*: run `kivi store upgrade`"),
        writer(old_store),
    ):
        pass
    assert dump(old_store / "mlflow.db") == before  # MLflow itself would have migrated it unasked
    upgraded = upgrade(old_store)
    assert (upgraded.before, upgraded.after) == ("71994744cf8e", known_revisions()[0])
    assert dump(upgraded.backup / "mlflow.db") == before
    with writer(old_store) as store:
        (night,) = find_nights(store)
        (cell,) = find_cells(store, night.info.run_id)
        assert (night.info.run_name, night.info.status) == ("nightly 2025-10-02", "FINISHED")
        assert cell.data.metrics["quality.kl_mean"] == 0.198
        assert cell.data.params["spec"] == "kivi-k2v2-g32-r128-mlx"
        assert len(store.client.get_metric_history(cell.info.run_id, "quality.logit_cosine")) == 10
    again = upgrade(old_store)
    assert (again.backup, again.sentence.endswith("nothing to do")) == (None, True)


def test_an_upgrade_that_fails_half_way_leaves_the_store_as_it_was(old_store):
    with closing(sqlite3.connect(old_store / "mlflow.db")) as database, database:
        database.execute("DROP TABLE trace_info")  # a migration of this table is still to come
    before = dump(old_store / "mlflow.db")
    with pytest.raises(TrackingError, match=r"`mlflow db upgrade` failed, the store is as before: "):
        upgrade(old_store)
    assert dump(old_store / "mlflow.db") == before
    assert not (old_store / "mlflow.db.upgrading").exists()


def test_a_newer_store_is_refused_and_left_alone(tracking):
    with closing(sqlite3.connect(tracking / "mlflow.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    for act in (upgrade, lambda folder: writer(folder).__enter__()):
        with pytest.raises(
            TrackingError, match=r"its schema ffffffffffff is unknown to MLflow .*: install that one, or restore"
        ):
            act(tracking)
    assert stored_revision(tracking / "mlflow.db") == "ffffffffffff"


def test_a_store_that_a_server_has_open_is_not_replaced(old_store):
    script = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT 1 FROM runs'); print(flush=True); input()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", script, str(old_store / "mlflow.db")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        server.stdout.readline()
        with pytest.raises(TrackingError, match=rf"process {server.pid} \(python.*\) has it open: stop MLflow's server"):
            upgrade(old_store)
        assert stored_revision(old_store / "mlflow.db") == "71994744cf8e"
    finally:
        server.communicate(b"\n", timeout=10)


def test_an_upgraded_copy_appears_at_once(old_store, monkeypatch):
    """A process that dies in the migration leaves the old database under its name."""
    seen = []

    def look(database):
        seen.append((database.name, stored_revision(old_store / "mlflow.db")))
        raise KeyboardInterrupt

    monkeypatch.setattr(upgrade_module, "_migrate", look)
    with pytest.raises(KeyboardInterrupt):
        upgrade(old_store)
    assert seen == [("mlflow.db.upgrading", "71994744cf8e")]
    assert stored_revision(old_store / "mlflow.db") == "71994744cf8e"
