"""``kivi baseline`` and ``kivi store`` on real stores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from tasks.tracking.nights import find_cells, find_nights
from tasks.tracking.store import writer


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tracking(tmp_path_factory):
    """A store with one imported night, made once a module."""
    return tmp_path_factory.mktemp("cli") / "mlruns"


@pytest.fixture
def imported(tracking, tmp_path, make_result):
    path = tmp_path / "result.json"
    path.write_text(make_result().model_dump_json())
    done = call("import", path, "--tracking-dir", tracking)
    assert done.exit_code == 0, done.output
    return tracking


def test_a_night_is_set_pinned_shown_and_unpinned(imported):
    night = "2026-11-29 02:00 UTC"
    done = call("baseline", "set", night, "--tracking-dir", imported, "--json")
    assert done.exit_code == 0, done.output
    (marked,) = json.loads(done.stdout)
    assert (marked["night"], marked["cells"], marked["mark"].split()[:2]) == (f"import {night}", 1, ["kivi.baseline", "set"])
    assert call("baseline", "pin", night, "--tracking-dir", imported).exit_code == 0
    shown = call("baseline", "show", "--tracking-dir", imported).stdout
    assert shown.count(f"import {night}: kivi.") == 2
    removed = call("baseline", "pin", "--remove", "--tracking-dir", imported)
    assert (removed.exit_code, removed.stdout) == (0, "1 pin removed\n")
    left = json.loads(call("baseline", "show", "--tracking-dir", imported, "--json").stdout)
    assert [one["mark"].split()[0] for one in left] == ["kivi.baseline"]
    assert call("baseline", "pin", "--remove", "--tracking-dir", imported).stdout == "0 pins removed\n"
    assert json.loads(call("baseline", "pin", "--remove", "--tracking-dir", imported, "--json").stdout) == []


def test_no_such_night_is_one_sentence_and_exit_code_2(imported):
    done = call("baseline", "set", "1999-01-01", "--tracking-dir", imported)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("kivi: '1999-01-01': no such night; the newest are import 2026-11-29 02:00 UTC")


def test_an_import_is_not_taken_for_the_last_night(imported):
    done = call("baseline", "set", "--tracking-dir", imported)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("kivi: 'last': no night was planned here; the newest are import 2026-11-29 02:00 UTC")


@pytest.mark.parametrize("command", [("baseline", "show"), ("baseline", "pin"), ("store", "prune")])
def test_a_folder_without_a_store_is_one_sentence_and_stays_as_it_is(tmp_path, command):
    done = call(*command, "--tracking-dir", tmp_path / "mistyped")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith("no mlflow.db in it: give a store's --tracking-dir; `kivi nightly` makes one\n")
    assert not (tmp_path / "mistyped").exists()


def test_a_backup_is_restored_and_goes_on_being_used(imported, tmp_path):
    done = call("store", "backup", "--tracking-dir", imported, "--to", tmp_path / "kept", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"] == 2
    elsewhere = tmp_path / "elsewhere"
    assert call("store", "restore", tmp_path / "kept", "--tracking-dir", elsewhere).exit_code == 0
    with writer(elsewhere) as store:
        (night,) = find_nights(store)
        (cell,) = find_cells(store, night.info.run_id)
        assert cell.info.artifact_uri.startswith(elsewhere.resolve().as_uri())
        assert Path(store.client.download_artifacts(cell.info.run_id, "result.json", str(tmp_path))).is_file()
    refused = call("store", "restore", tmp_path / "kept", "--tracking-dir", elsewhere)
    assert (refused.exit_code, "move it away first" in refused.stderr) == (2, True)
    shutil.rmtree(elsewhere)


def test_a_backup_among_the_artefacts_would_hold_itself_and_is_refused(imported, tmp_path):
    (tmp_path / "link").symlink_to(imported / "artifacts")
    for folder in (imported / "artifacts" / "kept", imported / "artifacts" / "new" / "kept", tmp_path / "link" / "kept"):
        done = call("store", "backup", "--tracking-dir", imported, "--to", folder)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert (
            done.stderr
            == f"kivi: {folder}: is among the artefacts, so it would have to hold itself; choose a folder elsewhere\n"
        )
    assert not list((imported / "artifacts").rglob("*kept*"))
    assert call("store", "backup", "--tracking-dir", imported, "--to", imported / "artifacts of today").exit_code == 0


def test_a_backup_whose_name_is_too_long_is_one_sentence(imported, tmp_path):
    for length in (250, 256):  # while it is written the name has more bytes
        done = call("store", "backup", "--tracking-dir", imported, "--to", tmp_path / ("x" * length))
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert "File name too long" in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("x")]


def test_pruning_and_upgrading_say_what_they_did(imported):
    pruned = call("store", "prune", "--keep-days", 36500, "--dry-run", "--tracking-dir", imported)
    assert (pruned.exit_code, pruned.stdout.splitlines()[0]) == (0, "artefacts of 0 runs would go, 0.0 MB")
    upgraded = call("store", "upgrade", "--tracking-dir", imported)
    assert (upgraded.exit_code, upgraded.stdout.strip().endswith("nothing to do")) == (0, True)


def test_a_folder_without_a_store_is_refused_and_not_made(tmp_path):
    for command in ("backup", "prune", "upgrade"):
        done = call("store", command, "--tracking-dir", tmp_path / "nothing")
        assert (done.exit_code, done.stdout) == (2, "")
        assert "no mlflow.db in it" in done.stderr
    assert not (tmp_path / "nothing").exists()


def test_a_good_night_becomes_the_baseline_and_keeps_its_comparison(smoke_night):
    tracking_dir, state = smoke_night
    result = state.result()
    with writer(tracking_dir) as store:
        tags = store.client.get_run(result.logged.run_id).data.tags
        files = {file.path for file in store.client.list_artifacts(result.logged.run_id)}
    assert tags["kivi.baseline"].startswith("good ")
    assert "comparison.json" in files
    assert "no baseline yet for any cell: thresholds alone judge" in result.verdict.comparison.notes
