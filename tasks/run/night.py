"""What came of a night: each planned cell with its result or its error, and what belongs to all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from pydantic import Field

from kivi.measure.results import CellResult
from tasks.config import Config, ModelConfig
from tasks.run.plan import Cell, Skipped

EVALUATE, IMPORT = "evaluate", "import"  # what nights of one cell are called that nobody planned
AD_HOC = (EVALUATE, IMPORT)


class Outcome(Config):
    """One cell: a result, or why there is none; both when it was measured and could not be timed."""

    cell: Cell
    result: CellResult | None = None
    error: str = Field("", description="one sentence that says what went wrong")
    details: str = Field("", description="the traceback behind the error")
    reused: bool = Field(False, description="whether the result was found, measured by an earlier run of the same night")


class PromptSource(Config):
    """Where a prompt set came from, as a person and MLflow's dataset record need it."""

    name: str
    sha256: str
    source: str
    rows: int | None = None


class Night(Config):
    """One run of a matrix. Its key is that of its cells, which hold the scheduled start, so running it again finds it."""

    name: str
    scheduled: str = Field(description="what the night is called: its scheduled start, or the day for a run by hand")
    outcomes: tuple[Outcome, ...]
    skipped: tuple[Skipped, ...] = ()
    prompt_sets: tuple[PromptSource, ...] = ()
    seconds: dict[str, float] = Field(default_factory=dict, description="how long each part took")
    flow_run_id: str = ""

    @property
    def key(self) -> str:
        """Content hash of the matrix: its name, its start and its cells."""
        return digest((self.name, self.scheduled, *sorted(outcome.cell.key for outcome in self.outcomes)))

    @property
    def title(self) -> str:
        return f"{self.name} {self.scheduled}"

    @property
    def results(self) -> list[CellResult]:
        """The results that there are, in the order of the plan."""
        return [outcome.result for outcome in self.outcomes if outcome.result is not None]


def digest(parts: Iterable[str]) -> str:
    """Return 32 hexadecimal digits that change when any part does."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cell_of(result: CellResult) -> Cell:
    """Return the cell that a result was measured for, from its own provenance."""
    made = result.provenance
    return Cell(
        key=result.cell_key,
        label=f"{made.spec.slug} on {made.model} × {made.prompt_set}",
        model=ModelConfig(name=made.model, revision=made.model_revision or None),
        prompt_set=made.prompt_set,
        prompt_sha256=made.prompt_sha256,
        spec=made.spec,
        settings=made.settings,
    )
