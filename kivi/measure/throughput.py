"""Throughput: prefill and decode apart, every cache beside the full one, interleaved.

Arms run A B C, A B C: what changes on the machine meets all of them, and each round's ratio pairs an arm with the full cache's
run of the same minute. Every round has its own prompt. A warm-up, with a prompt of its own, takes compilation and first
allocations; it is never timed.

The clock of the prefill starts when prompt, weights and caches are evaluated and stops when the first token is there and
nothing that the caches hold is left to evaluate: deferred work counts where it arose. Decoding is fed greedily, one token
ahead as mlx-lm does, and its clock stops likewise. Whether a group leaves the window during the timed steps depends on
context and steps; with at least ``group_size`` steps it happens once in each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kivi.measure import MeasureError
from kivi.measure.arms import FULL, Arm, batch, settle
from kivi.measure.intervals import ratio_interval
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.measure.results import ContextThroughput, Throughput, Timing
from kivi.measure.sequences import TokenStream
from kivi.measure.settings import ThroughputSettings
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

WARM_UP_STEPS = 4  # enough for every kernel of a decode step; settling the prefill has run those of the quantiser


@dataclass(frozen=True)
class Timed:
    """Seconds of one run: to the first token, and of the decode steps after it."""

    first_token: float
    decode: float


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
        seed: Which arm each round begins with is drawn from it, so that no arm always follows the same one.

    Returns:
        By slug, the figures, or one sentence saying why that arm failed; the others go on without it.

    Raises:
        MeasureError: the texts are too short, or the full cache itself fails, without which there is no ratio.
        DeadlineError: the deadline has passed.
    """
    stream = TokenStream(model.tokenizer, texts)
    arms = {spec.slug: spec for spec in [FULL, *specs]}
    failed: dict[str, str] = {}
    timings: dict[str, list[list[Timed]]] = {slug: [] for slug in arms}
    total = len(settings.contexts) * (settings.rounds + 1) * len(arms)
    done = 0
    for context in settings.contexts:
        prompts = stream.windows(settings.rounds + 1, context)
        for slug in arms:
            timings[slug].append([])
        for number, prompt in enumerate(prompts):
            for slug, spec in _in_turn(arms, number, seed):
                monitor.step("warm-up" if number == 0 else "throughput", done, total)
                done += 1
                if slug in failed:
                    continue
                try:
                    timed = time_run(model, spec, prompt, WARM_UP_STEPS if number == 0 else settings.steps)
                except DeadlineError:
                    raise
                except Exception as error:  # one cache's failure must not cost the others their figures
                    if spec.kind == "full":
                        raise MeasureError(f"the full cache cannot be timed: {error}") from error
                    failed[slug] = f"{type(error).__name__}: {error}"
                    continue
                if number:
                    timings[slug][-1].append(timed)
    return {slug: failed.get(slug) or _summarise(timings[slug], timings[FULL.slug], settings) for slug in arms}


def time_run(model: LoadedModel, spec: CacheSpec, prompt: Sequence[int], steps: int) -> Timed:
    """Time one prefill and ``steps`` greedy decode steps after it, with caches of their own.

    The caches are made outside the clocks, and nothing is left in MLX's memory pool by the arm before.
    """
    mx.eval(model.model)
    tokens = batch([prompt])
    arm = Arm(model, spec)
    mx.eval(tokens)
    settle(arm.caches)
    mx.synchronize()
    mx.clear_cache()
    return time_arm(arm, tokens, steps)


def time_arm(arm: Arm, tokens: mx.array, steps: int) -> Timed:
    """Time an arm whose caches are empty on a prompt ``[1, context]``; see the module for what each clock holds."""
    start = time.perf_counter()
    token = mx.argmax(arm.prefill(tokens), axis=-1)[:, None]
    mx.eval(token)
    mx.synchronize()
    middle = time.perf_counter()
    for _ in range(steps):
        token = mx.argmax(arm.step(token), axis=-1)[:, None]
        mx.async_eval(token)  # type: ignore[no-untyped-call]
    mx.eval(token)
    settle(arm.caches)
    mx.synchronize()
    return Timed(first_token=middle - start, decode=time.perf_counter() - middle)


def _in_turn(arms: dict[str, CacheSpec], number: int, seed: int) -> list[tuple[str, CacheSpec]]:
    """Return the arms of a round, begun one arm further each round: the order is kept, nobody is always first."""
    order = list(arms.items())
    first = (seed + number) % len(order)
    return order[first:] + order[:first]


def _summarise(
    timed: Sequence[Sequence[Timed]], baseline: Sequence[Sequence[Timed]], settings: ThroughputSettings
) -> Throughput:
    contexts = [
        _summarise_context(context, runs, paired, settings.steps)
        for context, runs, paired in zip(settings.contexts, timed, baseline, strict=True)
    ]
    longest = max(contexts, key=lambda figures: figures.context)
    rates = [settings.steps / run.decode for run in baseline[contexts.index(longest)]]
    return Throughput(
        prefill_tps=longest.prefill_tps.median,
        decode_tps=longest.decode_tps.median,
        prefill_ratio=longest.prefill_ratio.median,
        decode_ratio=longest.decode_ratio.median,
        baseline_spread=(max(rates) - min(rates)) / statistics.median(rates),
        contexts=contexts,
    )


def _summarise_context(context: int, runs: Sequence[Timed], baseline: Sequence[Timed], steps: int) -> ContextThroughput:
    pairs = list(zip(runs, baseline, strict=True))
    prefill_ratios = [full.first_token / run.first_token for run, full in pairs]
    decode_ratios = [full.decode / run.decode for run, full in pairs]
    is_baseline = runs is baseline
    return ContextThroughput(
        context=context,
        prefill_tps=_timing([context / run.first_token for run in runs]),
        decode_tps=_timing([steps / run.decode for run in runs]),
        time_to_first_token_s=_timing([run.first_token for run in runs]),
        prefill_ratio=_timing(prefill_ratios),
        decode_ratio=_timing(decode_ratios),
        prefill_ratio_interval=None if is_baseline else ratio_interval(prefill_ratios),
        decode_ratio_interval=None if is_baseline else ratio_interval(decode_ratios),
    )


def _timing(rounds: list[Any]) -> Timing:
    return Timing(median=statistics.median(rounds), minimum=min(rounds), maximum=max(rounds), rounds=rounds)
