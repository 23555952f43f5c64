"""The base of results: frozen records of JSON, whose numbers carry unit and direction and say what they can be at all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kivi.files import write_whole

Share = Annotated[float, Field(ge=0, le=1)]
Divergence = Annotated[float, Field(ge=-1e-3)]  # a KL, which is never below 0 but for the noise of floats
Cosine = Annotated[float, Field(ge=-1.001, le=1.001)]  # with the same noise
Count = Annotated[int, Field(ge=0, lt=2**63)]  # tokens, bytes and the like, at most what fits into 64 bits
Several = Annotated[int, Field(ge=1, lt=2**63)]
Text = Annotated[str, Field(min_length=1)]


def metric(description: str, unit: str, *, higher_is_better: bool | None) -> Any:
    """Declare a measured number; ``higher_is_better`` is None where neither direction is good."""
    return Field(
        description=description,
        json_schema_extra={"unit": unit, "higher_is_better": higher_is_better},
    )


def optional_metric(description: str, unit: str, *, higher_is_better: bool | None) -> Any:
    """Declare a measured number that not every spec has; None is never logged."""
    return Field(
        None,
        description=description,
        json_schema_extra={"unit": unit, "higher_is_better": higher_is_better},
    )


class Record(BaseModel):
    """Base of all results: frozen, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def write(self, path: Path) -> None:
        """Write it as JSON: a process that ends meanwhile leaves what was at ``path``."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")


class Interval(Record):
    """A 95 % confidence interval and how it was made."""

    low: float
    high: float
    method: str
