"""A night over many machines: its parts go to workers, their results come back, and the night goes on as if measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from flows.cell import Part
from kivi.measure.results import CellResult
from tasks.config import NightlyConfig
from tasks.run.cells import throughput_key
from tasks.run.fan_out import Job, run_jobs
from tasks.run.night import Night, Outcome
from tasks.run.plan import Cell, Plan, circumstances, content_hash
from tasks.run.result_files import ResultStore, ThroughputResult
from tasks.run.result_transfer import between_machines, fetch
from tasks.tracking.nights import open_night
from tasks.tracking.store import writer


class FannedOut(NamedTuple):
    """What workers came to: keys of what they measured now, and a sentence for each key that failed."""

    measured: frozenset[str] = frozenset()
    failed: dict[str, str] = {}  # noqa: RUF012  the empty one is never changed


class Dispatch:
    """Sends the parts of one night to workers and brings back what they measured."""

    def __init__(
        self,
        config: NightlyConfig,
        night: Night,
        store: ResultStore,
        tracking_dir: Path,
        log: Callable[[str], None],
        refresh: bool,
    ) -> None:
        self._config = config
        self._night = night
        self._store = store
        self._tracking_dir = tracking_dir
        self._log = log
        self._refresh = refresh
        self._run_id = ""
        if between_machines():
            with writer(tracking_dir) as tracking:
                self._run_id = open_night(tracking, night, refresh)

    def run(self, plan: Plan) -> FannedOut:
        """Have all cells measured, then the caches of each model and prompt set timed, except what is in the store."""
        cells = self._missing(cell.key for cell in plan.cells)
        failed = self._do([self._job("measure", [cell]) for cell in plan.cells if cell.key in cells], cells)
        groups = {
            throughput_key(done): done
            for group in plan.groups
            if (done := [cell for cell in group if cell.key not in failed and self._has(cell.key)])
        }
        timings = self._missing(groups)
        failed |= self._do([self._job("time", group) for key, group in groups.items() if key in timings], timings)
        return FannedOut(frozenset(cells | timings) - failed.keys(), failed)

    def _missing(self, keys: Iterable[str]) -> set[str]:
        wanted = set(keys)
        if self._refresh:
            return wanted
        missing = {key for key in wanted if not self._has(key)}
        self._fetch(missing)
        return {key for key in missing if not self._has(key)}

    def _has(self, key: str) -> bool:
        if key.startswith("throughput-"):
            return self._store.read(key, ThroughputResult) is not None
        return self._store.read(key, CellResult) is not None

    def _do(self, jobs: Sequence[Job], keys: set[str]) -> dict[str, str]:
        old = {key: self._written(key) for key in keys} if self._refresh else {}
        failed = run_jobs(jobs, self._log, self._config.queue)
        self._fetch(keys - failed.keys())
        for key in keys - failed.keys():
            if self._written(key) in {None, old.get(key)}:
                failed[key] = (
                    f"its worker is done, but its result is not in {self._store.folder}: share that, or an MLflow server"
                )
        return failed

    def _written(self, key: str) -> tuple[int, int] | None:
        """Return what tells a result's file from one that takes its place; None where there is none."""
        try:
            status = self._store.path(key).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _fetch(self, keys: set[str]) -> None:
        if keys and between_machines():
            with writer(self._tracking_dir) as tracking:
                fetch(tracking, self._run_id, self._store, sorted(keys))

    def _job(self, what: str, cells: Sequence[Cell]) -> Job:
        first, keys = cells[0], tuple(cell.key for cell in cells)
        prompts = next(prompts for prompts in self._config.prompt_sets if prompts.name == first.prompt_set)
        specs = tuple(cell.spec for cell in cells)
        only = {"models": (first.model,), "prompt_sets": (prompts,), "specs": specs, "backends": ()}
        config = self._config.model_copy(update=only)
        part = Part.model_validate(
            {
                "what": what,
                "config": config.model_dump(),
                "keys": keys,
                "night": self._night.scheduled,
                "planned": circumstances(),
                "run_id": self._run_id,
                "refresh": self._refresh,
            }
        )
        key = keys[0] if what == "measure" else throughput_key(cells)
        label = first.label if what == "measure" else f"throughput of {first.model.name} × {first.prompt_set}"
        anew = self._night.flow_run_id if self._refresh else ""
        return Job(
            key=key,
            identity=content_hash([key, str(self._tracking_dir), self._run_id, anew]),
            label=label,
            parameters={"label": label, "part": part.model_dump(mode="json"), "tracking_dir": str(self._tracking_dir)},
        )


def fan_out(
    config: NightlyConfig,
    plan: Plan,
    night: Night,
    store: ResultStore,
    tracking_dir: Path,
    *,
    refresh: bool,
    log: Callable[[str], None],
) -> FannedOut:
    """Have workers measure a night.

    Args:
        config: Its matrix.
        plan: Its cells.
        night: Its name, without outcomes.
        store: Where results come to.
        tracking_dir: The tracking folder, which workers use under the same path.
        refresh: Measure anew what is in the store.
        log: Told of what goes wrong on the way.
    """
    expected = night.model_copy(update={"outcomes": tuple(Outcome(cell=cell) for cell in plan.cells)})
    return Dispatch(config, expected, store, tracking_dir, log, refresh).run(plan)
