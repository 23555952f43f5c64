"""What the benchmarks share: arms timed in turns, spreads and ratios, and a result that says what it was measured on."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from kivi import machine
from kivi.measure.results import Timing
from kivi.measure.speed.timing import in_turns

import mlx.core as mx  # isort: skip  (after kivi, which chooses the BLAS)

Arm = Callable[[int, int], object]  # number of the first input set and calls -> the lazy results of all calls


def interleave(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Run every arm once a round in random order, after one round to warm up; return seconds by arm, round by round."""

    def seconds(arm: Callable[[], object], _: int) -> float:
        start = time.perf_counter()
        arm()
        return time.perf_counter() - start

    for arm in arms.values():
        arm()
    return in_turns({name: partial(seconds, arm) for name, arm in arms.items()}, rounds)


def interleave_calls(arms: dict[str, Arm], baseline: str, *, rounds: int = 15, calls: int = 8) -> dict[str, Any]:
    """Time ``calls`` calls of every arm a round; return milliseconds a call and ratios to ``baseline``, round by round.

    A round builds the lazy graph of its calls, then times its evaluation alone, as a decoding loop builds a step while the
    device runs the one before. ``host_us`` is the time to build the graph of one call.
    """

    def run(arm: Arm, number: int) -> tuple[float, float]:
        mx.synchronize()
        started = time.perf_counter()
        results = arm(number * calls, calls)
        built = time.perf_counter()
        mx.eval(results)
        mx.synchronize()
        return (time.perf_counter() - built) / calls * 1e3, (built - started) / calls * 1e6

    for arm in arms.values():
        mx.eval(arm(0, calls))
    timed = in_turns({name: partial(run, arm) for name, arm in arms.items()}, rounds)
    times = {name: [ms for ms, _ in samples] for name, samples in timed.items()}
    speedup = ratios(times, baseline)
    rows = {
        name: {
            "ms": spread(times[name]),
            "speedup": speedup[name],
            "host_us": statistics.median(host for _, host in samples),
        }
        for name, samples in timed.items()
    }
    return {"arms": rows, "baseline": baseline, "baseline_spread": Timing.of(times[baseline]).spread}


def spread(samples: list[float]) -> dict[str, float]:
    """Return median, quartiles, minimum and maximum."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high, "min": min(samples), "max": max(samples)}


def ratios(times: dict[str, list[float]], reference: str) -> dict[str, dict[str, float]]:
    """Return by arm how many times faster than ``reference`` it is, paired within each round."""
    base = times[reference]
    return {name: spread([b / t for b, t in zip(base, samples, strict=True)]) for name, samples in times.items()}


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--out", type=Path, help="write the result here too")
    return options


def report(name: str, options: argparse.Namespace, results: Any) -> None:
    """Print the result as JSON, with date, device and versions, and write it to ``--out``."""
    document = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine.provenance(),
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "results": results,
    }
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
