"""The comparison of backends: parity with the definition, speed, and the tokens that a model generates, as one typed result."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from pydantic import AwareDatetime, Field, field_validator

from kivi import machine
from kivi.backends import NAMES, Backend, Name, available, resolve
from kivi.measure.backends.parity import DTYPES, Case, ParityCheck, check_parity
from kivi.measure.backends.skip_reason import not_run
from kivi.measure.backends.speed import (
    CPU_SETTINGS,
    FULL_ARM,
    SpeedCase,
    SpeedSettings,
    Tokens,
    time_model,
    time_operations,
)
from kivi.measure.monitor import Monitor
from kivi.measure.records import Record
from kivi.measure.sequences import TokenStream
from kivi.measure.settings import Settings
from kivi.models import LoadedModel
from kivi.spec import CacheSpec, SpecError

# Whole groups, a ragged end, and head dimensions that no group size divides.
PARITY_SHAPES = ((2, 256, 64), (1, 45, 80), (3, 160, 128), (2, 131, 72))


def _speed_here() -> SpeedSettings:
    return SpeedSettings() if mx.default_device() == mx.gpu else CPU_SETTINGS


class ComparisonSettings(Settings):
    """How much is compared."""

    speed: SpeedSettings = Field(default_factory=_speed_here, description="what is not given is what suits the device")
    parity_shapes: tuple[tuple[int, int, int], ...] = Field(
        PARITY_SHAPES, min_length=1, description="KV heads, tokens and channels of each parity check; every dtype is checked"
    )
    seed: int = Field(0, ge=0, description="seed of the parity inputs")

    @field_validator("speed", mode="before")
    @classmethod
    def _suit_the_device(cls, given: Any) -> Any:
        return {**_speed_here().model_dump(), **given} if isinstance(given, dict) else given


class BackendState(Record):
    """Whether a backend ran here."""

    name: Name
    available: bool
    reason: str = Field(description="on what it runs, or why it was not run")


class Agreement(Record):
    """Greedy tokens of one arm beside those of another, on the same prompts."""

    arm: str
    reference: str
    agreement: float = Field(description="share of equal tokens")
    first_divergence: float = Field(description="mean step of the first different token; the number of steps where none is")
    prompts: int
    steps: int


class ModelComparison(Record):
    """A model with its full cache and with the spec's on every backend."""

    model: str
    weights_digest: str
    dtype: str
    prompts: str = Field(description="where the prompts come from, and their SHA-256")
    prefill: SpeedCase
    decode: SpeedCase
    agreement: list[Agreement]


class SpecComparison(Record):
    """Everything that was measured of one spec."""

    spec: CacheSpec
    parity: list[ParityCheck]
    speed: list[SpeedCase]
    model: ModelComparison | None = Field(None, description="None when no model was asked for")

    @property
    def timings(self) -> list[SpeedCase]:
        """Every timing, of operations and of the model."""
        return [*self.speed, *([self.model.prefill, self.model.decode] if self.model else [])]


class ComparisonResult(Record):
    """The comparison of every available backend on one machine."""

    schema_version: Literal[1] = 1
    kind: Literal["kivi-comparison"] = "kivi-comparison"
    started: AwareDatetime
    seconds: float
    device: str = Field(description="hardware by kind, never by host name")
    blas: str
    packages: dict[str, str]
    git_sha: str
    git_dirty: bool
    settings: ComparisonSettings
    backends: list[BackendState]
    specs: list[SpecComparison]
    ended: bool = Field(True, description="False in what is written between stages, before the last one is through")

    @property
    def problems(self) -> list[str]:
        """One sentence for each parity check that does not hold and each kernel that failed; what was not run is none."""
        stopped = [] if self.ended else ["the comparison was stopped before its last stage was through"]
        return [*stopped, *(problem for spec in self.specs for problem in _problems(spec))]

    @property
    def passed(self) -> bool:
        """Whether parity was checked and held everywhere, and no kernel failed."""
        checked = all(any(not check.not_run for check in spec.parity) for spec in self.specs)
        return bool(self.specs) and checked and not self.problems

    @property
    def not_run(self) -> list[str]:
        """One line for everything that was not run, with the reason."""
        lines = [f"{backend.name}: {not_run(backend.reason)}" for backend in self.backends if not backend.available]
        for spec in self.specs:
            lines += [f"{check.backend}, {check.label}: not run: {check.not_run}" for check in spec.parity if check.not_run]
            lines += [
                f"{arm.arm}, {case.operation}, {case.tokens} tokens: not run: {arm.not_run}"
                for case in spec.timings
                for arm in case.arms
                if arm.not_run
            ]
        return lines


def compare_backends(
    specs: Sequence[CacheSpec],
    *,
    settings: ComparisonSettings | None = None,
    model: LoadedModel | None = None,
    monitor: Monitor | None = None,
    save: Callable[[ComparisonResult], None] = lambda _: None,
) -> ComparisonResult:
    """Compare every backend that is available here on each of ``specs``; their own ``backend`` is not looked at.

    Args:
        specs: Caches of kind ``kivi`` or ``kivi-roundtrip``, without settings by layer.
        settings: How much is compared; by default what suits the device.
        model: What end-to-end speed and tokens are measured with; none by default.
        monitor: Told of progress.
        save: Given what there is after every stage.

    Raises:
        SpecError: a spec has nothing that a backend runs.
    """
    for spec in specs:
        check_comparable(spec)
    settings, monitor = settings or ComparisonSettings(), monitor or Monitor()
    clock = time.monotonic()
    states = [BackendState(name=name, available=state.ok, reason=state.reason) for name in NAMES for state in [available(name)]]
    backends = [resolve(state.name) for state in states if state.available]
    result = ComparisonResult(
        started=datetime.now(UTC),
        seconds=0,
        **machine.provenance(),
        settings=settings,
        backends=states,
        specs=[],
        ended=False,
    )
    for spec in specs:
        before = result.specs
        for compared in _compare(spec, backends, settings, model, monitor):
            result = result.model_copy(update={"specs": [*before, compared], "seconds": time.monotonic() - clock})
            save(result)
    return result.model_copy(update={"ended": True})


def check_comparable(spec: CacheSpec) -> None:
    """Check that a spec has a part that backends run.

    Raises:
        SpecError: its kind is neither ``kivi`` nor ``kivi-roundtrip``, or layers differ.
    """
    if not spec.kind.startswith("kivi") or spec.layers:
        raise SpecError(f"{spec.slug}: backends are compared on one layer's cache of kind kivi or kivi-roundtrip")


def agreement(arm: str, tokens: Tokens, reference: str, expected: Tokens) -> Agreement:
    """Compare the tokens ``[prompts, steps]`` of two arms."""
    prompts, steps = tokens.shape
    different = tokens != expected
    first = np.where(different.any(axis=1), different.argmax(axis=1), steps)
    return Agreement(
        arm=arm,
        reference=reference,
        agreement=1 - float(different.mean()),
        first_divergence=float(first.mean()),
        prompts=prompts,
        steps=steps,
    )


def _compare(
    spec: CacheSpec,
    backends: Sequence[Backend],
    settings: ComparisonSettings,
    model: LoadedModel | None,
    monitor: Monitor,
) -> Iterator[SpecComparison]:
    """Yield what there is after each stage: parity, then speed too, then the model too."""
    spec = spec.model_copy(update={"backend": "auto"})
    cases = [Case(dtype, *shape) for dtype in DTYPES for shape in settings.parity_shapes]
    parity: list[ParityCheck] = []
    for index, backend in enumerate(backends):
        monitor.step(f"parity of {spec.slug}", index, len(backends))
        parity += check_parity(backend, spec, cases, seed=settings.seed)
    yield SpecComparison(spec=spec, parity=parity, speed=[])
    speed = list(time_operations(backends, spec, settings.speed, monitor))
    yield SpecComparison(spec=spec, parity=parity, speed=speed)
    if model is not None:
        end_to_end = _compare_model(model, backends, spec, settings.speed, monitor)
        yield SpecComparison(spec=spec, parity=parity, speed=speed, model=end_to_end)


def _compare_model(
    model: LoadedModel, backends: Sequence[Backend], spec: CacheSpec, settings: SpeedSettings, monitor: Monitor
) -> ModelComparison:
    text = inspect.getsource(argparse)  # a text that every Python carries
    prompts = TokenStream(model.tokenizer, text.split("\n\n")).windows(settings.rounds + 1, settings.model_context)
    timed = time_model(model, backends, spec, prompts, settings, monitor)
    pairs = [(arm, FULL_ARM) for arm in timed.tokens] + [(arm, "mlx") for arm in timed.tokens if arm != FULL_ARM]
    return ModelComparison(
        model=model.name,
        weights_digest=model.weights_digest,
        dtype=model.dtype,
        prompts=f"source of Python's argparse, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}",
        prefill=timed.prefill,
        decode=timed.decode,
        agreement=[
            agreement(arm, timed.tokens[arm], reference, timed.tokens[reference])
            for arm, reference in pairs
            if arm != reference and reference in timed.tokens
        ],
    )


def _problems(spec: SpecComparison) -> list[str]:
    slug = spec.spec.slug
    problems = [f"{slug} on {check.backend}: {check.problem}" for check in spec.parity if not check.passed]
    for case in spec.timings:
        problems += [
            f"{slug} on {arm.arm}: {case.operation} of {case.tokens} tokens: {arm.failed}" for arm in case.arms if arm.failed
        ]
    return problems
