"""Interleaved timing of kernels: arms take turns, each repeat has its own inputs, medians with their spread."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import kivi  # noqa: F401  (it loads the BLAS)

import mlx.core as mx  # isort: skip  (after kivi)

Arm = Callable[[int, int], object]  # number of the first input set and calls -> the lazy results of all calls


def interleave(arms: dict[str, Arm], baseline: str, *, rounds: int = 15, calls: int = 8) -> dict[str, Any]:
    """Time ``arms`` in turn and return milliseconds a call and ratios to ``baseline``, round by round.

    A round builds the lazy graph of ``calls`` calls, then times its evaluation alone, as a decoding loop builds a step while
    the device runs the one before. ``host_us`` is the time to build the graph of one call.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    host: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        mx.eval(arm(0, calls))
    for number in range(rounds):
        order = list(arms)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            mx.synchronize()
            started = time.perf_counter()
            results = arms[name](number * calls, calls)
            built = time.perf_counter()
            mx.eval(results)
            mx.synchronize()
            times[name].append((time.perf_counter() - built) / calls * 1e3)
            host[name].append((built - started) / calls * 1e6)
            del results
    rows = {}
    for name, values in times.items():
        ratios = [base / value for base, value in zip(times[baseline], values, strict=True)]
        rows[name] = {
            "ms": spread(values),
            "speedup": spread(ratios),
            "host_us": statistics.median(host[name]),
        }
    base = times[baseline]
    return {"arms": rows, "baseline": baseline, "baseline_spread": (max(base) - min(base)) / statistics.median(base)}


def spread(values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write(path: Path, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Write ``rows`` with what produced them: versions, device kind, date."""
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": mx.device_info().get("device_name", platform.processor()),
        "versions": {"mlx": metadata.version("mlx"), "python": platform.python_version()},
        **facts,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def show(label: str, row: dict[str, Any]) -> None:
    """Print one line a row: milliseconds and speed-up of every arm."""
    arms = [f"{name} {arm['ms']['median']:.4f} ms x{arm['speedup']['median']:.2f}" for name, arm in row["arms"].items()]
    print(f"{label}: {', '.join(arms)} (spread {row['baseline_spread']:.0%})", flush=True)
