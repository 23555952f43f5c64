"""From a configuration to cells: what runs, under which key, and what is skipped and why."""

from __future__ import annotations

from pydantic import Field

from kivi.measure.settings import MeasureSettings
from kivi.spec import CacheSpec
from tasks.config import (
    Config,
    ConfigError,
    ModelConfig,
    NightlyConfig,
    PromptSetConfig,
    Thresholds,
    load_config,
)

__all__ = [
    "Cell",
    "ConfigError",
    "ModelConfig",
    "NightlyConfig",
    "Plan",
    "PromptSetConfig",
    "Skipped",
    "Thresholds",
    "load_config",
]


class Cell(Config):
    """One model, one prompt set, one spec: all that it takes to measure it, and the key of its result."""

    key: str = Field(description="content hash of everything that changes the result")
    label: str = Field(description="what a person reads, e.g. kivi-k2v2-g32-r128-mlx on embedded × humaneval")
    model: ModelConfig
    prompt_set: str
    prompt_sha256: str
    spec: CacheSpec = Field(description="its backend resolved, never auto")
    settings: MeasureSettings


class Skipped(Config):
    """A cell that is left out, and why."""

    what: str
    why: str


class Plan(Config):
    """What a night will do."""

    cells: tuple[Cell, ...]
    skipped: tuple[Skipped, ...] = ()
