"""One cell: one model, one prompt set, one spec, against the full cache of the same model on the same tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import mlx.core as mx

from kivi import backends, machine
from kivi.measure import MeasureError, generation, quality
from kivi.measure.answers.questions import Question, measure_answers
from kivi.measure.arms import FULL, Arm, unpin_states
from kivi.measure.audit.cell import audit_cell
from kivi.measure.memory import accounting, full_token, memory, settled_memory
from kivi.measure.monitor import Monitor
from kivi.measure.reference import ReferenceStore
from kivi.measure.results import CellResult, Provenance, Quality
from kivi.measure.sequences import TokenStream
from kivi.measure.settings import MeasureSettings
from kivi.models import LoadedModel
from kivi.spec import CacheSpec


def measure_cell(
    model: LoadedModel,
    texts: Sequence[str],
    spec: CacheSpec,
    settings: MeasureSettings,
    *,
    cell_key: str,
    prompt_set: str,
    prompt_sha256: str,
    references: ReferenceStore,
    monitor: Monitor,
    questions: Sequence[Question] = (),
) -> CellResult:
    """Measure quality, generation, memory and accounting of one spec; throughput is measured apart, all caches in turns.

    Args:
        model: The model.
        texts: What it reads, a text a row of the prompt set.
        spec: The cache. ``full`` is measured like any other: its KL is the noise of float arithmetic.
        settings: How much is measured.
        cell_key: Content hash that the result is found by.
        prompt_set: Name of the prompt set.
        prompt_sha256: Digest of its rows.
        references: Where the full cache's logits are kept from cell to cell.
        monitor: Progress and deadline.
        questions: What is asked where ``settings.answers`` says so.

    Raises:
        MeasureError: the texts are too short, nothing would be tested, or something is not finite.
        NonFiniteError: a KIVI cache holds NaN or infinity.
        DeadlineError: the deadline has passed.
        SpecError, BackendError: the caches cannot be made.
    """
    clock = _Clock()
    stream = TokenStream(model.tokenizer, texts)
    sequences = stream.pack(settings.score.sequences, settings.score.length + 1)
    prompts = stream.windows(settings.generation.continuations, settings.generation.context)
    _require_context(model, settings)
    with clock.part("quality"):
        scores = quality.score(model, sequences, spec, references=references, monitor=monitor)
        checked = None
        if settings.score.step_tokens:
            checked = quality.check_steps(
                model, sequences[0], spec, scores, settings.score.step_tokens, references=references, monitor=monitor
            )
        figures = quality.summarise(scores, settings.seed, checked)
    steps = settings.generation.steps
    with clock.part("reference"):
        trajectory = generation.reference_trajectory(model, prompts, steps, references=references, monitor=monitor)
    with clock.part("generation"):
        before = settled_memory()
        arm = Arm(model, spec)
        decoded = generation.decode(arm, prompts, trajectory, monitor)
        growth = settled_memory() - before
        unpin_states(arm.caches)
        unpinned = settled_memory() - before
        arm.check_finite()
    answers = None
    if settings.answers is not None:
        with clock.part("answers"):
            answers = measure_answers(
                model, questions, spec, settings.answers, references=references, monitor=monitor, seed=settings.seed
            )
    with clock.part("audit"):
        share, itemsize = _full_token(model)
        audit = audit_cell(arm, scores, unpinned, compared=settings.generation.context + steps - 1)
    return CellResult(
        cell_key=cell_key,
        quality=figures,
        generation=generation.summarise(model, prompts, trajectory, decoded),
        memory=memory(
            arm.caches,
            tokens=decoded.fed * len(prompts),
            peak_prefill=decoded.peak_prefill,
            peak_decode=decoded.peak_decode,
            growth=growth,
        ),
        accounting=accounting(arm.caches, key_share=share, itemsize=itemsize),
        audit=audit,
        answers=answers,
        provenance=_provenance(model, spec, settings, arm, clock, figures, prompt_set, prompt_sha256),
    )


class _Clock:
    """When the cell started, and the seconds of its parts."""

    def __init__(self) -> None:
        self.started = datetime.now(UTC)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


def _require_context(model: LoadedModel, settings: MeasureSettings) -> None:
    limit = model.text_config.get("max_position_embeddings")
    longest = max(settings.score.length, settings.generation.context + settings.generation.steps)
    if limit is not None and longest > limit:
        raise MeasureError(f"{longest} tokens are to be measured, and {model.name!r} was made for {limit}: measure fewer")


def _full_token(model: LoadedModel) -> tuple[float, float]:
    """Return the keys' share of a full-precision token, and the bytes of one of its numbers."""
    arm = Arm(model, FULL)
    arm.decode(mx.array([[0]]))
    return full_token(arm.caches)


def _provenance(
    model: LoadedModel,
    spec: CacheSpec,
    settings: MeasureSettings,
    arm: Arm,
    clock: _Clock,
    figures: Quality,
    prompt_set: str,
    prompt_sha256: str,
) -> Provenance:
    backend, reason = _backend(spec)
    generated = settings.generation
    return Provenance(
        started=clock.started,
        seconds=clock.seconds,
        model=model.name,
        model_revision=model.revision,
        weights_digest=model.weights_digest,
        model_dtype=model.dtype,
        prompt_set=prompt_set,
        prompt_sha256=prompt_sha256,
        settings=settings,
        spec=spec,
        backend=backend,
        backend_reason=reason,
        **machine.provenance(),
        layers_quantized=len(arm.layers),
        layers_kept=arm.kept,
        coverage_note=(
            f"{_covered(arm, figures, settings)}, in {figures.sequences} sequences of {settings.score.length} tokens; "
            f"{generated.continuations} continuations of {generated.steps} tokens at a context of {generated.context}"
        ),
    )


def _covered(arm: Arm, figures: Quality, settings: MeasureSettings) -> str:
    if not arm.layers:
        return f"all {figures.positions} scored positions, none of which sees a quantised key"
    scored = settings.score.sequences * settings.score.length
    return f"{figures.positions} of {scored} scored positions see a quantised key ({figures.coverage:.0%})"


def _backend(spec: CacheSpec) -> tuple[str, str]:
    if not spec.kind.startswith("kivi"):
        return "mlx-lm", "mlx-lm's own cache and attention"
    name = backends.resolve(spec.backend).name
    return name, f"asked for {spec.backend}: {backends.available(name).reason}"
