"""How much is measured: validated settings of each measurement, with units and bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kivi.measure import MeasureError
from kivi.measure.answers.scorers import ScorerName


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ScoreSettings(Settings):
    """Teacher-forced scoring on fixed token positions."""

    sequences: int = Field(1, ge=1, le=4096, description="sequences to score")
    length: int = Field(1024, ge=64, le=1_048_576, description="tokens a sequence")
    step_tokens: int = Field(0, ge=0, le=4096, description="first decode steps also scored one token a call")


class GenerationSettings(Settings):
    """Greedy generation, and teacher-forced decode steps on the reference's tokens."""

    continuations: int = Field(4, ge=1, le=256, description="prompts that are continued")
    context: int = Field(512, ge=16, le=1_048_576, description="prompt tokens of each")
    steps: int = Field(24, ge=1, le=4096, description="tokens generated for each")


class AnswerSettings(Settings):
    """Questions with right answers, continued greedily with both caches."""

    scorer: ScorerName = Field(description="what makes an answer right")
    questions: int = Field(20, ge=1, le=100_000, description="questions asked, from the first after the examples")
    tokens: int = Field(32, ge=1, le=4096, description="most tokens of an answer")
    shots: int = Field(0, ge=0, le=64, description="rows, from the first, that are shown as examples before each question")
    chat: bool = Field(False, description="ask through the model's chat template")


class ThroughputSettings(Settings):
    """Interleaved timing of all caches of one model."""

    rounds: int = Field(3, ge=1, le=100, description="interleaved rounds, each with its own prompt")
    contexts: tuple[Annotated[int, Field(ge=1)], ...] = Field((512,), min_length=1, description="prompt tokens of each timing")
    steps: int = Field(16, ge=2, le=4096, description="decode steps that are timed")
    isolate: bool = Field(False, description="give each cache of each round a fresh process, which loads the model anew")


class MeasureSettings(Settings):
    """Everything that one cell measures."""

    score: ScoreSettings = ScoreSettings()
    generation: GenerationSettings = GenerationSettings()
    throughput: ThroughputSettings = ThroughputSettings()
    answers: AnswerSettings | None = Field(None, description="questions with right answers; none are asked by default")
    seed: int = Field(0, ge=0, description="seed of every resampling")
    deadline_s: float = Field(3600, gt=0, description="seconds after which a cell is stopped and fails")


Kind = TypeVar("Kind", bound=Settings)


def read_settings(path: Path | None, kind: type[Kind]) -> Kind:
    """Return the settings in a JSON file; fields that it leaves out, and all without a file, have their defaults.

    Raises:
        MeasureError: the file cannot be read, or holds something else.
    """
    if path is None:
        return kind()
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise MeasureError(f"settings {str(path)!r} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}." for part in first["loc"])[:-1]
        raise MeasureError(f"settings {str(path)!r}: {where and where + ': '}{first['msg']}") from None
