"""What the cache benchmarks share: timing in pairs, and a result that says what it was measured on."""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kivi.machine import device, packages


def interleave(arms: dict[str, Callable[[], object]], rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Run every arm once a round in random order, after one round to warm up; return seconds by arm, round by round."""
    order, draw = list(arms), random.Random(seed)  # noqa: S311
    times: dict[str, list[float]] = {name: [] for name in arms}
    for round_index in range(rounds + 1):
        draw.shuffle(order)
        for name in order:
            start = time.perf_counter()
            arms[name]()
            if round_index:
                times[name].append(time.perf_counter() - start)
    return times


def spread(samples: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


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
    """Print the result as JSON, with versions, device and date, and write it to ``--out``."""
    document = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device(),
        "versions": packages(),
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "results": results,
    }
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
