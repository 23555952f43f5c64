"""Rounds of arms in turns, and one timed run of one cache; :mod:`kivi.measure.speed.throughput` says what each clock holds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import mlx.core as mx

from kivi.measure.arms import Arm, batch, settle
from kivi.measure.records import Record
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

Item = TypeVar("Item")

WARM_UP_STEPS = 4  # enough for every kernel of a decode step; settling the prefill has run those of the quantiser


class Timed(Record):
    """Seconds of one run: to the first token, of the decode steps after it, and of building the graph of the median step.

    Peaks are of a process that did nothing else.
    """

    first_token: float
    decode: float
    host: float
    peak_bytes: int | None = None
    process_peak_bytes: int | None = None


def in_random_order(arms: Sequence[Item], number: int, seed: int = 0) -> list[Item]:
    """Return ``arms`` in the order of round ``number``, the same for the same seed."""
    return random.Random(f"{seed}, {number}").sample(arms, len(arms))  # noqa: S311  no secret


def in_turns(arms: Mapping[str, Callable[[int], Item]], rounds: int) -> dict[str, list[Item]]:
    """Call each arm once a round with the round's number, in random order; return what each returned, round by round."""
    results: dict[str, list[Item]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in in_random_order(list(arms), number):
            results[name].append(arms[name](number))
    return results


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
    host = []
    for _ in range(steps):
        begun = time.perf_counter()
        token = mx.argmax(arm.step(token), axis=-1)[:, None]
        host.append(time.perf_counter() - begun)
        mx.async_eval(token)  # type: ignore[no-untyped-call]
    mx.eval(token)
    settle(arm.caches)
    mx.synchronize()
    return Timed(first_token=middle - start, decode=time.perf_counter() - middle, host=statistics.median(host))
