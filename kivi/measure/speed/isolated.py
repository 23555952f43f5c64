"""One timed run of one cache in a process of its own: its memory and allocator have seen nothing else.

    python -m kivi.measure.speed.isolated REQUEST.json REPLY.json

The process loads the model, warms up, times, and writes typed JSON. The model's weights are in memory twice meanwhile, here
and there. What goes wrong there is raised here as :class:`AloneError`, by name.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from pydantic import Field

from kivi.measure import MeasureError
from kivi.measure.memory import process_peak
from kivi.measure.monitor import Monitor
from kivi.measure.records import Record
from kivi.measure.speed.timing import WARM_UP_STEPS, Timed, time_run
from kivi.models import LoadedModel, Origin, load_model
from kivi.spec import CacheSpec

POLL_S = 0.5  # between two looks at the deadline


class AloneError(MeasureError):
    """What went wrong in the other process; the message begins with the name of its error."""


class Request(Record):
    """What is to be timed: for each context a prompt to warm up with, and the one that counts."""

    model: Origin
    weights_digest: str
    spec: CacheSpec
    prompts: list[tuple[list[int], list[int]]]
    steps: int


class Reply(Record):
    """What was timed, one run a context, or the error that there was."""

    timed: list[Timed] = Field(default_factory=list)
    error: str = ""


def time_alone(
    model: LoadedModel, spec: CacheSpec, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], steps: int, monitor: Monitor
) -> list[Timed]:
    """Time one cache in a new process; return its runs, one a context.

    Args:
        model: The model, which the process loads from where it came from.
        spec: The cache.
        pairs: For each context a prompt to warm up with, and the one that is timed.
        steps: Decode steps that are timed.
        monitor: Its deadline ends the process.

    Raises:
        MeasureError: the model came from nowhere that another process could load it from.
        AloneError: the process failed, or was killed.
        DeadlineError: the deadline has passed.
    """
    if model.origin is None:
        raise MeasureError(f"isolate=true: {model.name!r} was made in memory, so that no other process can load it")
    prompts = [(list(warm_up), list(prompt)) for warm_up, prompt in pairs]
    request = Request(model=model.origin, weights_digest=model.weights_digest, spec=spec, prompts=prompts, steps=steps)
    with tempfile.TemporaryDirectory(prefix="kivi-") as folder:
        asked, replied = Path(folder) / "request.json", Path(folder) / "reply.json"
        asked.write_text(request.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "kivi.measure.speed.isolated", str(asked), str(replied)]
        status, said = _run(command, monitor)
        if status or not replied.exists():
            raise AloneError(f"{_ending(status)}: {said or 'it said nothing'}")
        reply = Reply.model_validate_json(replied.read_text(encoding="utf-8"))
    if reply.error:
        raise AloneError(reply.error)
    return reply.timed


def answer(request: Request) -> Reply:
    """Do what is asked, in this process."""
    try:
        model = load_model(request.model.name, revision=request.model.revision, dtype=request.model.dtype)
        if model.weights_digest != request.weights_digest:
            raise MeasureError(f"the weights of {model.name!r} have changed since the measurement began: start it again")
        return Reply(timed=[_time(model, request, *pair) for pair in request.prompts])
    except Exception as error:  # whatever it is, the process that asked must name it
        return Reply(error=f"{type(error).__name__}: {error}")


def _time(model: LoadedModel, request: Request, warm_up: list[int], prompt: list[int]) -> Timed:
    time_run(model, request.spec, warm_up, WARM_UP_STEPS)
    mx.reset_peak_memory()
    timed = time_run(model, request.spec, prompt, request.steps)
    return timed.model_copy(update={"peak_bytes": mx.get_peak_memory(), "process_peak_bytes": process_peak()})


def _run(command: Sequence[str], monitor: Monitor) -> tuple[int, str]:
    """Run ``command``; return its exit status and the last line that it wrote to its standard error."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            while True:
                try:
                    _, said = process.communicate(timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    monitor.check("throughput: a process was stopped")
        except BaseException:
            process.kill()
            raise
    lines = said.strip().splitlines()
    return process.returncode, lines[-1] if lines else ""


def _ending(status: int) -> str:
    if status < 0:
        return f"its process was killed by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


if __name__ == "__main__":
    given = Request.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(answer(given).model_dump_json(), encoding="utf-8")
