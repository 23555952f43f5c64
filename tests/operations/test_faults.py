"""What surrounds a night goes away: the disk is full, the team's server is down, a secret is in an error."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_URL

import tasks.run.cells
from flows.log_and_judge import log_and_judge, server_is_away
from flows.nightly import nightly
from flows.serve.background import end_tree, free_port
from kivi.measure.results import CellResult
from tasks.config import NightlyConfig
from tasks.run.night import Night
from tasks.run.result_files import ResultStore
from tasks.run.result_transfer import fetch, send
from tasks.sanitize import redact
from tasks.tracking.nights import find_cells, find_nights, log_night, open_night
from tasks.tracking.pending_nights import keep, left_over
from tasks.tracking.store import TRACKING_URI, TrackingError, writer

PLANTED = "hf_planted0123456789"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "cache"))


def test_a_full_disk_ends_the_night_at_once_with_one_sentence(
    prefect_server: None, own_cache: None, tmp_path: Path, tiny_matrix: dict[str, Any]
) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps(tiny_matrix))
    tracking_dir = tmp_path / "mlruns"
    command = [sys.executable, "-c", "from flows.__main__ import main; main()", "nightly"]
    command += ["--config", str(tmp_path / "tiny.yaml"), "--tracking-dir", str(tracking_dir)]
    environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        # The system refuses larger files as if the disk were full: there is room for the prompts and not for a result.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)),
    )
    assert done.returncode == 2, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("kivi: ")]
    assert "cannot be written to" in sentence
    assert "1/3" not in done.stderr, "the next cells were tried"
    assert "Traceback" not in done.stderr
    assert list((tracking_dir / "results").iterdir()) == []


def test_a_failed_cell_tells_no_secret(
    prefect_server: None, own_cache: None, tmp_path: Path, tiny_matrix: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(f"401 for https://hub/model?token={PLANTED}")

    monkeypatch.setenv("HF_TOKEN", PLANTED)
    monkeypatch.setattr(tasks.run.cells, "measure_cell", refused)
    config = NightlyConfig.model_validate({**tiny_matrix, "specs": ["full"]})
    state = nightly(config, tmp_path / "mlruns", return_state=True)
    result = state.result(raise_on_failure=False)
    assert "401 for https://hub/model?token=[HF_TOKEN]" in result.night.outcomes[0].error
    assert "401" in result.night.outcomes[0].details
    for path in (tmp_path / "mlruns").rglob("*"):
        assert not path.is_file() or PLANTED.encode() not in path.read_bytes(), path

    def shown() -> str:
        paths = ("logs", "task_runs", "flow_runs", "artifacts")
        return "".join(httpx.post(f"{PREFECT_API_URL.value()}/{path}/filter", json={}, timeout=30).text for path in paths)

    assert PLANTED not in shown()


def test_secrets_in_addresses_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "planted-password")
    assert redact("at planted-password") == "at [MLFLOW_TRACKING_PASSWORD]"
    assert redact("postgresql://me:word@db/kivi is away") == "postgresql://[user]@db/kivi is away"


class Server:
    """An MLflow server that can be ended and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port("127.0.0.1", 5300)
        self.address = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "MLFLOW_PORT": str(self.port)}
        environment.pop(TRACKING_URI, None)
        command = [sys.executable, "-m", "flows.servers", "run", "mlflow", str(self.folder)]
        with (self.folder.parent / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        while True:
            assert self._process.poll() is None, (self.folder.parent / "server.log").read_text()
            try:
                if httpx.get(f"{self.address}/health", timeout=5).is_success:
                    return
            except httpx.HTTPError:
                continue

    def end(self) -> None:
        if self._process is not None:
            end_tree(psutil.Process(self._process.pid))
            self._process.wait(60)
            self._process = None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A team's MLflow server, started, to which this process logs."""
    server = Server(tmp_path / "team")
    server.start()
    monkeypatch.setenv(TRACKING_URI, server.address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    yield server
    server.end()


def test_logging_waits_for_a_server_that_is_away_and_catches_up(
    prefect_server: None,
    own_cache: None,
    server: Server,
    tmp_path: Path,
    make_result: Callable[..., Any],
    make_night: Callable[..., Night],
) -> None:
    config = NightlyConfig.model_validate({"specs": ["kivi-roundtrip:bits=4"]})
    one = make_night(make_result(), scheduled="one")
    two = make_night(make_result(key="another"), scheduled="two")
    folder = tmp_path / "mlruns"
    server.end()
    away = log_and_judge.with_options(retries=0)(one, config, folder, False, return_state=True)
    with pytest.raises(TrackingError, match="the MLflow server does not take this night"):
        away.result()
    assert [kept.night.title for kept in left_over(folder, other_than=two)] == [one.title]

    attempts = []

    def back_again(*arguments: Any) -> bool:
        attempts.append(arguments)
        server.start()
        return server_is_away(*arguments)

    waiting = log_and_judge.with_options(retries=1, retry_delay_seconds=0, retry_condition_fn=back_again)
    assert waiting(two, config, folder, False).verdict.passed
    assert len(attempts) == 1
    assert left_over(folder, other_than=two) == []
    log_and_judge(one, config, folder, False)  # as its own run does when it is retried
    with writer(folder) as store:
        nights = find_nights(store)
        assert {night.data.tags["kivi.night"] for night in nights} == {"one", "two"}
        assert [len(find_cells(store, night.info.run_id)) for night in nights] == [1, 1]
        (cell,) = find_cells(store, nights[0].info.run_id)
        assert len(store.client.get_metric_history(cell.info.run_id, "quality.logit_cosine")) == 10


def test_a_machine_closes_only_runs_that_it_left_behind_itself(
    server: Server, tmp_path: Path, make_result: Callable[..., Any], make_night: Callable[..., Night]
) -> None:
    theirs, ours, next_night = (make_night(make_result(key=name), scheduled=name) for name in ("theirs", "ours", "next"))
    with writer(tmp_path / "their-mac") as store:
        their_run = log_night(store, theirs)  # still RUNNING, over there
    with writer(tmp_path / "our-mac") as store:
        our_run = log_night(store, ours)  # left behind
    with writer(tmp_path / "our-mac") as store:
        log_night(store, next_night)
        statuses = {run_id: store.client.get_run(run_id).info.status for run_id in (their_run, our_run)}
        assert statuses == {their_run: "RUNNING", our_run: "KILLED"}
        assert "ended before it was done" in store.client.get_run(our_run).data.tags["kivi.closed"]


def test_an_experiment_that_was_deleted_on_the_server_takes_nights_again(server: Server, tmp_path: Path) -> None:
    with writer(tmp_path / "mac") as store:
        store.client.delete_experiment(store.experiment_id)
    with writer(tmp_path / "mac") as again:
        assert again.experiment_id == store.experiment_id
        again.client.create_run(again.experiment_id)
        assert again.client.get_experiment(again.experiment_id).lifecycle_stage == "active"


def test_a_kept_night_of_another_version_is_left_alone(
    tmp_path: Path, make_result: Callable[..., Any], make_night: Callable[..., Night], caplog: pytest.LogCaptureFixture
) -> None:
    night = make_night(make_result())
    config = NightlyConfig.model_validate({"specs": ["full"]})
    keep(tmp_path, night, config)
    (tmp_path / "unlogged" / "other.json").write_text('{"night": 1}')
    other = make_night(make_result(key="other"))
    assert [kept.night for kept in left_over(tmp_path, other_than=other)] == [night]
    assert "other.json is no night of this version" in caplog.text


def test_results_come_from_another_machine_through_the_server(
    prefect_server: None,
    server: Server,
    tmp_path: Path,
    make_result: Callable[..., Any],
    make_night: Callable[..., Night],
) -> None:
    result, other = make_result(key="one"), make_result(key="two")
    night = make_night(result, other)
    planner, worker = ResultStore(tmp_path / "planner" / "results"), ResultStore(tmp_path / "worker" / "results")
    with writer(tmp_path / "planner") as store:
        run_id = open_night(store, night)
    worker.write(result)
    for _ in range(2):  # a worker that is tried again sends again
        send(tmp_path / "worker", run_id, worker, [result.cell_key])
    with writer(tmp_path / "planner") as store:
        fetch(store, run_id, planner, [result.cell_key, other.cell_key])
        assert planner.read(result.cell_key, CellResult) == result
        assert planner.read(other.cell_key, CellResult) is None
        assert [path.name for path in planner.folder.iterdir()] == ["one.json"]
        assert log_night(store, night) == run_id  # it all goes below the run that workers were told of
