from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kivi.measure import MeasureError
from kivi.measure.arms import FULL
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.measure.settings import ThroughputSettings
from kivi.measure.speed import isolated
from kivi.measure.speed.isolated import AloneError, Request, answer, time_alone
from kivi.measure.speed.throughput import measure_throughput
from kivi.models import LoadedModel, load_model
from kivi.spec import CacheSpec

PACKED = CacheSpec.parse("kivi:bits=2,residual=32,backend=mlx")
SETTINGS = ThroughputSettings(rounds=2, contexts=(48, 64), steps=3, isolate=True)
PAIRS = [(list(range(40)), list(range(40, 80)))]


@pytest.fixture
def on_disk(tiny_models: Callable[[int], Any]) -> LoadedModel:
    """A tiny llama that another process can load."""
    return load_model(tiny_models(0).name)


def test_each_cache_of_each_round_has_a_process_of_its_own_that_times_every_context(
    on_disk: LoadedModel, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    requests: list[Request] = []

    def spy(command: list[str], monitor: Monitor) -> tuple[int, str]:
        commands.append(command)
        requests.append(Request.model_validate_json(Path(command[3]).read_text(encoding="utf-8")))
        return run(command, monitor)

    run = isolated._run
    monkeypatch.setattr(isolated, "_run", spy)
    timed = measure_throughput(on_disk, texts, [PACKED], SETTINGS, monitor=Monitor(), seed=0)
    assert len(commands) == 2 * 2
    assert {command[0] for command in commands} == {sys.executable}
    assert (
        {request.spec.kind for request in requests[:2]} == {request.spec.kind for request in requests[2:]} == {"full", "kivi"}
    )
    warm_ups, timed_prompts = ({tuple(request.prompts[0][part]) for request in requests} for part in (0, 1))
    assert (len(warm_ups), len(timed_prompts), len(warm_ups | timed_prompts)) == (1, 2, 3)
    for figures in timed.values():
        assert not isinstance(figures, str)
        assert [(one.context, len(one.decode_tps.rounds)) for one in figures.contexts] == [(48, 2), (64, 2)]
        assert figures.peak_bytes is not None and figures.process_peak_bytes is not None
        assert 0 < figures.peak_bytes < figures.process_peak_bytes  # a Python with MLX weighs more than a tiny model


def test_without_isolation_no_peak_is_claimed(on_disk: LoadedModel, texts: list[str]) -> None:
    settings = SETTINGS.model_copy(update={"isolate": False, "rounds": 1})
    (figures, _) = measure_throughput(on_disk, texts, [PACKED], settings, monitor=Monitor(), seed=0).values()
    assert not isinstance(figures, str)
    assert figures.peak_bytes is figures.process_peak_bytes is None


def test_an_error_there_is_named_here(on_disk: LoadedModel) -> None:
    missing = CacheSpec.parse("kivi:bits=2,backend=metal")
    with pytest.raises(AloneError, match=r"^BackendError: .*metal"):
        time_alone(on_disk, missing, PAIRS, 2, Monitor())


def test_weights_that_have_changed_meanwhile_are_refused(on_disk: LoadedModel) -> None:
    assert on_disk.origin is not None
    request = Request(model=on_disk.origin, weights_digest="other", spec=FULL, prompts=PAIRS, steps=2)
    assert re.match("MeasureError: the weights of .* have changed since the measurement began", answer(request).error)


def test_a_model_of_no_origin_cannot_be_isolated(tiny: Callable[..., LoadedModel]) -> None:
    with pytest.raises(MeasureError, match="isolate=true: 'llama' was made in memory"):
        time_alone(tiny(), FULL, PAIRS, 2, Monitor())


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})", "its process was killed by SIGKILL: it said nothing"),
        ("import sys; print('no room', file=sys.stderr); sys.exit(3)", "its process ended with status 3: no room"),
        ("pass", "its process ended with status 0: it said nothing"),
    ],
)
def test_a_process_that_dies_is_an_error_that_says_how(
    on_disk: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, message: str
) -> None:
    monkeypatch.setattr(isolated.sys, "executable", str(interpreter(tmp_path, code)))
    with pytest.raises(AloneError, match=f"^{message}$"):
        time_alone(on_disk, FULL, PAIRS, 2, Monitor())


def test_the_deadline_ends_the_process(on_disk: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(isolated.sys, "executable", str(interpreter(tmp_path, code)))
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="throughput: a process was stopped after"):
        time_alone(on_disk, FULL, PAIRS, 2, Monitor(deadline_s=2.0))
    assert time.monotonic() - started < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def interpreter(folder: Path, code: str) -> Path:
    """Return a Python that does ``code`` whatever it is asked to do."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\n{code}\n")
    script.chmod(0o755)
    return script
