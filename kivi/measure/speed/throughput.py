"""Throughput: prefill and decode apart, every cache beside the full one, interleaved.

Arms take turns, each once a round, in an order that is drawn for the round, so that no arm always follows the same one. What
changes on the machine meets all of them, and a round's ratio pairs an arm with the full cache's run of the same minute. Every
round has its own prompt. A warm-up, with a prompt of its own, takes compilation and first allocations; it is never timed.

The clock of the prefill starts when prompt, weights and caches are evaluated and stops when the first token is there and
nothing that the caches hold is left to evaluate: deferred work counts where it arose. Decoding is fed greedily, one token
ahead as mlx-lm does, and its clock stops likewise. Whether a group leaves the window during the timed steps depends on
context and steps; with at least ``group_size`` steps it happens once in each.

With ``isolate`` each cache of each round has a process of its own (:mod:`kivi.measure.speed.isolated`), in the same turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kivi.measure import MeasureError
from kivi.measure.arms import FULL
from kivi.measure.intervals import ratio_interval
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.measure.results import ContextThroughput, Throughput, Timing
from kivi.measure.sequences import TokenStream
from kivi.measure.settings import ThroughputSettings
from kivi.measure.speed.isolated import AloneError, time_alone
from kivi.measure.speed.timing import WARM_UP_STEPS, Timed, in_random_order, time_run
from kivi.models import LoadedModel
from kivi.spec import CacheSpec


@dataclass(frozen=True)
class _Turn:
    """One cache's turn; running it gives what was timed, by the number of the context, and nothing for a warm-up."""

    spec: CacheSpec
    stage: str
    run: Callable[[], dict[int, Timed]]


def measure_throughput(
    model: LoadedModel,
    texts: Sequence[str],
    specs: Sequence[CacheSpec],
    settings: ThroughputSettings,
    *,
    monitor: Monitor,
    seed: int,
) -> dict[str, Throughput | str]:
    """Time all caches of one model; the full cache is always among them.

    Args:
        model: The model.
        texts: Where prompts are cut from.
        specs: The caches.
        settings: Rounds, contexts and steps.
        monitor: Progress and deadline.
        seed: The order of the arms in each round is drawn from it.

    Returns:
        By slug, the figures, or one sentence saying why that arm failed; the others go on without it.

    Raises:
        MeasureError: the texts are too short, or the full cache itself fails, without which there is no ratio.
        DeadlineError: the deadline has passed.
    """
    stream = TokenStream(model.tokenizer, texts)
    arms = {spec.slug: spec for spec in [FULL, *specs]}
    prompts = [stream.windows(settings.rounds + 1, context) for context in settings.contexts]
    if settings.isolate:
        turns = list(_turns_alone(model, arms, prompts, settings, seed, monitor))
    else:
        turns = list(_turns_here(model, arms, prompts, settings, seed))
    failed: dict[str, str] = {}
    timings: dict[str, list[list[Timed]]] = {slug: [[] for _ in prompts] for slug in arms}
    for done, turn in enumerate(turns):
        slug = turn.spec.slug
        monitor.step(turn.stage, done, len(turns))
        if slug in failed:
            continue
        try:
            timed = turn.run()
        except DeadlineError:
            raise
        except Exception as error:  # one cache's failure must not cost the others their figures
            if turn.spec.kind == "full":
                raise MeasureError(f"the full cache cannot be timed: {error}") from error
            failed[slug] = str(error) if isinstance(error, AloneError) else f"{type(error).__name__}: {error}"
            continue
        for index, one in timed.items():
            timings[slug][index].append(one)
    return {slug: failed.get(slug) or _summarise(timings[slug], timings[FULL.slug], settings) for slug in arms}


def _turns_here(
    model: LoadedModel,
    arms: dict[str, CacheSpec],
    prompts: Sequence[Sequence[Sequence[int]]],
    settings: ThroughputSettings,
    seed: int,
) -> Iterator[_Turn]:
    """Yield the turns of one process: each context has its rounds, the first of which warms up."""
    for index, windows in enumerate(prompts):
        for number, prompt in enumerate(windows):
            for spec in in_random_order(list(arms.values()), number, seed):
                if number == 0:
                    yield _Turn(spec, "warm-up", partial(_warm_up, model, spec, prompt))
                else:
                    yield _Turn(spec, "throughput", partial(_time, index, model, spec, prompt, settings.steps))


def _turns_alone(
    model: LoadedModel,
    arms: dict[str, CacheSpec],
    prompts: Sequence[Sequence[Sequence[int]]],
    settings: ThroughputSettings,
    seed: int,
    monitor: Monitor,
) -> Iterator[_Turn]:
    """Yield the turns of processes of their own: each round has one a cache, which warms up and times every context."""
    for number in range(1, settings.rounds + 1):
        for spec in in_random_order(list(arms.values()), number, seed):
            pairs = [(windows[0], windows[number]) for windows in prompts]
            yield _Turn(spec, "throughput", partial(_time_alone, model, spec, pairs, settings.steps, monitor))


def _warm_up(model: LoadedModel, spec: CacheSpec, prompt: Sequence[int]) -> dict[int, Timed]:
    time_run(model, spec, prompt, WARM_UP_STEPS)
    return {}


def _time(index: int, model: LoadedModel, spec: CacheSpec, prompt: Sequence[int], steps: int) -> dict[int, Timed]:
    return {index: time_run(model, spec, prompt, steps)}


def _time_alone(
    model: LoadedModel, spec: CacheSpec, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], steps: int, monitor: Monitor
) -> dict[int, Timed]:
    return dict(enumerate(time_alone(model, spec, pairs, steps, monitor)))


def _summarise(
    timed: Sequence[Sequence[Timed]], baseline: Sequence[Sequence[Timed]], settings: ThroughputSettings
) -> Throughput:
    contexts = [
        _summarise_context(context, runs, paired, settings.steps)
        for context, runs, paired in zip(settings.contexts, timed, baseline, strict=True)
    ]
    longest = max(contexts, key=lambda figures: figures.context)
    runs, paired = (of_arm[contexts.index(longest)] for of_arm in (timed, baseline))
    rates = Timing.of([settings.steps / run.decode for run in paired])
    return Throughput(
        prefill_tps=longest.prefill_tps.median,
        decode_tps=longest.decode_tps.median,
        prefill_ratio=longest.prefill_ratio.median,
        decode_ratio=longest.decode_ratio.median,
        host_ms=_host_ms(runs),
        host_ms_full=_host_ms(paired),
        peak_bytes=_largest(run.peak_bytes for runs in timed for run in runs),
        process_peak_bytes=_largest(run.process_peak_bytes for runs in timed for run in runs),
        baseline_spread=rates.spread,
        contexts=contexts,
    )


def _host_ms(runs: Sequence[Timed]) -> float:
    return statistics.median(run.host for run in runs) * 1e3


def _largest(peaks: Iterable[int | None]) -> int | None:
    return max((peak for peak in peaks if peak is not None), default=None)


def _summarise_context(context: int, runs: Sequence[Timed], baseline: Sequence[Timed], steps: int) -> ContextThroughput:
    pairs = list(zip(runs, baseline, strict=True))
    prefill_ratios = [full.first_token / run.first_token for run, full in pairs]
    decode_ratios = [full.decode / run.decode for run, full in pairs]
    is_baseline = runs is baseline
    return ContextThroughput(
        context=context,
        prefill_tps=Timing.of([context / run.first_token for run in runs]),
        decode_tps=Timing.of([steps / run.decode for run in runs]),
        time_to_first_token_s=Timing.of([run.first_token for run in runs]),
        prefill_ratio=Timing.of(prefill_ratios),
        decode_ratio=Timing.of(decode_ratios),
        prefill_ratio_interval=None if is_baseline else ratio_interval(prefill_ratios),
        decode_ratio_interval=None if is_baseline else ratio_interval(decode_ratios),
    )
