"""What a tuning is asked: the model, the texts, how much care, and what the cache must not exceed."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import ByteSize, Field, model_validator

from kivi.measure.settings import ScoreSettings
from tasks.config import Config, Model, ModelConfig, Prompts, PromptSetConfig

EffortName = Literal["low", "default", "high"]
Budget = Literal["kl", "bytes_per_token", "memory"]
BUDGETS: tuple[Budget, ...] = ("kl", "bytes_per_token", "memory")


class Effort(NamedTuple):
    """How much is measured."""

    tokens: int  # of the calibration text
    bits: tuple[int, ...]  # each measured in every layer and side; the error of others follows from the nearest of these
    every_rotation: bool  # at all bits; else at the fewest, and at others what was better there
    score: ScoreSettings  # of a candidate


EFFORTS: dict[EffortName, Effort] = {
    "low": Effort(320, (2,), True, ScoreSettings(length=640)),
    "default": Effort(384, (2, 3), False, ScoreSettings(length=1024)),
    "high": Effort(1024, (2, 3, 4), True, ScoreSettings(sequences=2, length=2048)),
}


class TuneConfig(Config):
    """What a tuning measures, and what it looks for; without a budget, the smallest cache of each tier."""

    model: Model = Field(ModelConfig(), description="embedded, a folder in mlx-lm's format, or a Hugging Face id")
    prompts: Prompts | None = Field(
        None, description="what caches are judged on; by default humaneval, and topics to calibrate on"
    )
    calibrate: Prompts | None = Field(
        None, description="what sensitivities are measured on; by default the first rows of prompts, which are not judged on"
    )
    effort: EffortName = Field("default", description="low, default or high: how much is measured")
    kl: float | None = Field(None, gt=0, description="largest mean KL from the full cache, nats: the smallest cache within it")
    bytes_per_token: float | None = Field(None, gt=0, description="most bytes a token: the best cache within them")
    memory: ByteSize | None = Field(None, gt=0, description="most bytes of weights and cache, e.g. 16GB: the best cache within")
    context: int = Field(4096, ge=512, le=1 << 24, description="tokens at which bytes a token are counted")
    batch: int = Field(1, ge=1, le=4096, description="sequences that the memory is for")
    seed: int = Field(0, ge=0, description="seed of the order of calibration rows")
    reference_gb: float = Field(4, ge=0, le=10_000, description="disk for the full cache's logits")
    deadline_s: float = Field(14_400, gt=0, description="seconds after which it is stopped; what was measured is kept")

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given: look for one of them at a time")
        if self.prompts is None and self.calibrate is not None:
            raise ValueError("calibrate is given without prompts: say what is judged on, too, e.g. humaneval")
        return self

    @property
    def budget(self) -> Budget | None:
        """Which budget is given, if one is."""
        return next((name for name in BUDGETS if getattr(self, name) is not None), None)

    @property
    def judged(self) -> PromptSetConfig:
        """What candidates are judged on."""
        return self.prompts or PromptSetConfig(source="humaneval")

    @property
    def calibration(self) -> PromptSetConfig:
        """What sensitivities are measured on."""
        return self.calibrate or self.prompts or PromptSetConfig(source="topics")
