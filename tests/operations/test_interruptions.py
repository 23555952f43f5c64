"""A night that is killed again and again ends as one that never was: kill -9, at chosen moments and at random ones."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.settings import PREFECT_API_URL

from kivi.measure.results import CellResult
from tasks.run.result_files import checked

KILLS_BY_CHANCE = 5
# Imports once, which takes most of a run's time, and forks for each run of the night: a process of its own to be killed.
STARTER = """
import os, sys
from pathlib import Path
from flows.nightly import nightly
from tasks.config import NightlyConfig

config = NightlyConfig.model_validate_json(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    process = os.fork()
    if process == 0:
        state = nightly(config, Path(line.strip()), return_state=True)
        print(state.message, file=sys.stderr)
        os._exit(0 if state.is_completed() else 1)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


class Starter:
    """Starts nights, one at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._read() == "ready"

    def run(self, tracking_dir: Path, until: Callable[[], bool] | None = None) -> int:
        """Run a night, killed as soon as ``until`` says so; return the exit code, -9 when it was killed."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{tracking_dir}\n")
        self._process.stdin.flush()
        night = int(self._read())
        while until is not None and not until() and not ended(night):
            time.sleep(0.01)
        if until is not None and not ended(night):
            os.kill(night, signal.SIGKILL)
        return int(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def ended(process: int) -> bool:
    """Return whether a process is gone, or waits for its parent to take notice."""
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def starter(prefect_server: None, tiny_matrix: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    folder = tmp_path_factory.mktemp("starter")
    log = folder / "log"
    environment = {
        **os.environ,
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "KIVI_CACHE_DIR": str(folder / "cache"),  # an accelerator lock of its own
    }
    command = [sys.executable, "-c", STARTER, json.dumps(tiny_matrix)]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        yield Starter(process)
        process.communicate(timeout=60)
    assert process.returncode == 0, log.read_text()


def finished(tracking_dir: Path) -> dict[str, str]:
    """Return when each cell that has a result was measured."""
    files = (path for path in (tracking_dir / "results").glob("*.json") if not path.stem.startswith("throughput-"))
    results = [CellResult.model_validate_json(checked(path.read_bytes())) for path in files]
    return {result.cell_key: str(result.provenance.started) for result in results}


def count(folder: Path) -> int:
    return len(list(folder.glob("*.json")))


def test_a_night_killed_at_random_moments_ends_equal_to_one_that_was_not(
    starter: Starter, tmp_path: Path, store_contents: Callable[[Path], dict[str, Any]]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    started = time.monotonic()
    assert starter.run(whole) == 0
    duration = time.monotonic() - started

    def after(seconds: float) -> Callable[[], bool]:
        due = time.monotonic() + seconds
        return lambda: time.monotonic() > due

    def logging() -> bool:
        return count(broken / "unlogged") > 0

    chance = random.Random(6)  # noqa: S311  which moments is of no consequence
    moments: list[Callable[[], Callable[[], bool]]] = [
        lambda: lambda: count(broken / "results") == 1,  # in the middle of the second cell
        lambda: logging,  # all is measured, nothing is logged
        *[lambda: after(chance.uniform(0, 1.2 * duration))] * KILLS_BY_CHANCE,
    ]
    codes = []
    measured: dict[str, str] = {}
    for moment in moments:
        codes.append(starter.run(broken, until=moment()))
        measured = {**finished(broken), **measured}  # the time at which a result was seen first stays
    assert codes.count(-9) >= 2, "no run was killed"
    assert set(codes) <= {0, -9}
    assert starter.run(broken) == 0
    assert finished(broken) == measured, "a finished cell was measured again"
    assert store_contents(broken) == store_contents(whole)

    started = time.monotonic()
    assert starter.run(broken) == 0
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_a_night_with_a_sentence_and_the_next_goes_on(
    sent: signal.Signals,
    kivi_command: tuple[str, ...],
    prefect_server: None,
    tiny_matrix: dict[str, Any],
    tmp_path: Path,
) -> None:
    matrix, mlruns = tmp_path / "tiny.yaml", tmp_path / "mlruns"
    matrix.write_text(json.dumps(tiny_matrix))
    environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value()), "KIVI_CACHE_DIR": str(tmp_path / "cache")}
    command = [*kivi_command, "nightly", "--config", str(matrix), "--tracking-dir", str(mlruns)]
    night = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not count(mlruns / "results") and night.poll() is None:
        time.sleep(0.01)
    night.send_signal(sent)
    _, said = night.communicate(timeout=60)
    assert night.returncode == 128 + sent, said
    assert said.splitlines()[-1] == "kivi: interrupted; what is finished is kept, and the same command goes on from there"
    assert "Traceback" not in said
    before = finished(mlruns)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert before.items() <= finished(mlruns).items(), "a finished cell was measured again"
