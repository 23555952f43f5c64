"""A night over many machines: its parts go to workers, their results come back, and the night goes on as if measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flows.cell import Part, What
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


@dataclass
class Dispatch:
    """Sends the parts of one night to workers and brings back what they measured.

    Attributes:
        config: The night's matrix.
        night: Its name, without outcomes.
        store: Where results come to.
        tracking_dir: The tracking folder, which workers use under the same path.
        log: Told of what goes wrong on the way.
        refresh: Measure anew what is in the store.
        run_id: The night's run on the team's MLflow server, when there is one.
    """

    config: NightlyConfig
    night: Night
    store: ResultStore
    tracking_dir: Path
    log: Callable[[str], None]
    refresh: bool
    run_id: str = ""

    def run(self, plan: Plan) -> FannedOut:
        """Have all cells measured, then the caches of each model and prompt set timed, except what is in the store."""
        if between_machines():
            expected = self.night.model_copy(update={"outcomes": tuple(Outcome(cell=cell) for cell in plan.cells)})
            with writer(self.tracking_dir) as tracking:
                self.run_id = open_night(tracking, expected, self.refresh)
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
        if self.refresh:
            return wanted
        missing = {key for key in wanted if not self._has(key)}
        self._fetch(missing)
        return {key for key in missing if not self._has(key)}

    def _has(self, key: str) -> bool:
        if key.startswith("throughput-"):
            return self.store.read(key, ThroughputResult) is not None
        return self.store.read(key, CellResult) is not None

    def _do(self, jobs: Sequence[Job], keys: set[str]) -> dict[str, str]:
        old = {key: self._written(key) for key in keys} if self.refresh else {}
        failed = run_jobs(jobs, self.log, self.config.queue)
        self._fetch(keys - failed.keys())
        lost = f"its worker is done, but its result is not in {self.store.folder}: share that, or an MLflow server"
        return failed | {key: lost for key in keys - failed.keys() if self._written(key) in {None, old.get(key)}}

    def _written(self, key: str) -> tuple[int, int] | None:
        """Return what tells a result's file from one that takes its place; None where there is none."""
        try:
            status = self.store.path(key).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _fetch(self, keys: set[str]) -> None:
        if keys and between_machines():
            with writer(self.tracking_dir) as tracking:
                fetch(tracking, self.run_id, self.store, sorted(keys))

    def _job(self, what: What, cells: Sequence[Cell]) -> Job:
        first, keys = cells[0], tuple(cell.key for cell in cells)
        prompts = next(prompts for prompts in self.config.prompt_sets if prompts.name == first.prompt_set)
        specs = tuple(cell.spec for cell in cells)
        only = {"models": (first.model,), "prompt_sets": (prompts,), "specs": specs, "backends": ()}
        part = Part(
            what=what,
            config=self.config.model_copy(update=only),
            keys=keys,
            night=self.night.scheduled,
            planned=circumstances(),
            run_id=self.run_id,
            refresh=self.refresh,
        )
        key, label = keys[0], first.label
        if what == "time":
            key, label = throughput_key(cells), f"throughput of {first.model.name} × {first.prompt_set}"
        anew = self.night.flow_run_id if self.refresh else ""
        return Job(
            key=key,
            identity=content_hash([key, str(self.tracking_dir), self.run_id, anew]),
            label=label,
            parameters={"label": label, "part": part.model_dump(mode="json"), "tracking_dir": str(self.tracking_dir)},
        )
