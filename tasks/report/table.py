"""One table of a night, for the terminal, Markdown, HTML and Prefect alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kivi.measure.results import CellResult
from tasks.judge.gate import Verdict
from tasks.run.night import Night, Outcome
from tasks.sanitize import visible

NOTHING = "–"
NOISE = 1e-6  # nats; below is the noise of float32, whose digits say nothing


class Row(NamedTuple):
    """One cell as texts, safe to show; ``–`` where nothing was measured."""

    cache: str
    verdict: str
    resident: str
    compression: str
    kl: str
    tier: str
    flips: str
    answers: str
    decode: str
    on: str


HEADINGS = Row(
    cache="cache",
    verdict="verdict",
    resident="resident",
    compression="smaller",
    kl="KL, nats (95 %)",
    tier="tier",
    flips="flips",
    answers="answers",
    decode="decode",
    on="model and prompts",
)
LEGEND = (
    "resident: bytes of the live cache arrays after the generation context. smaller: full precision over resident. "
    "KL: mean divergence from the full-precision cache, teacher-forced on the same tokens. flips: positions whose top token "
    "changes. decode: tokens a second over the full cache's, same rounds."
)
ANSWERS_LEGEND = " answers: how right they are, with this cache and with the full one, on the same questions."


def rows(night: Night, verdict: Verdict) -> list[Row]:
    """Return a row a cell, in the order of the plan."""
    return [_row(outcome, verdict) for outcome in night.outcomes]


def columns(lines: Sequence[Row]) -> list[str]:
    """Return the columns that tell something: all but the model and prompts when all cells share them, and unasked answers."""
    silent = {"on"} if len({line.on for line in lines}) <= 1 else set()
    if {line.answers for line in lines} <= {NOTHING}:
        silent.add("answers")
    return [name for name in Row._fields if name not in silent]


def tier_bounds(night: Night, verdict: Verdict) -> str:
    """Return what good and marginal mean in this night, caches with bounds of their own by name."""
    caches: dict[str, list[str]] = {}
    for outcome in night.outcomes:
        standing = verdict.standings.get(outcome.cell.key)
        if standing is not None:
            shown = "; ".join(f"{name} {good:g} and {marginal:g}" for name, (good, marginal) in standing.bounds.items())
            caches.setdefault(shown, []).append(outcome.cell.spec.slug)
    if len(caches) <= 1:
        return "".join(caches)
    return "; ".join(f"for {', '.join(dict.fromkeys(slugs))}: {shown}" for shown, slugs in caches.items())


def show_bytes(count: float) -> str:
    """Return three digits and a unit, e.g. ``1.23 MB``, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def show_seconds(seconds: float) -> str:
    """Return e.g. ``2 min 05 s`` or ``8.3 s``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _row(outcome: Outcome, verdict: Verdict) -> Row:
    cell, result = outcome.cell, outcome.result
    where = visible(f"{cell.model.name} × {cell.prompt_set}")
    if result is None:
        nothing = dict.fromkeys(Row._fields, NOTHING)
        return Row(**{**nothing, "cache": cell.spec.slug, "verdict": "failed", "on": where})
    speed = f"{result.throughput.decode_ratio:.2f}×" if result.throughput else NOTHING
    return Row(
        cache=result.spec.slug,
        on=where,
        resident=show_bytes(result.memory.resident_bytes),
        compression=f"{result.memory.compression:.2f}×",
        kl=_show_kl(result),
        tier=verdict.standings[cell.key].tier,
        flips=f"{result.quality.flip_rate:.1%}",
        answers=f"{answers.accuracy:.0%}, full {answers.accuracy_full:.0%}" if (answers := result.answers) else NOTHING,
        decode=speed,
        verdict=verdict.of(cell.key),
    )


def _show_kl(result: CellResult) -> str:
    quality = result.quality
    if 0 < quality.kl_mean < NOISE:
        return f"<{NOISE:g}"
    mean, interval = f"{quality.kl_mean:.3g}", quality.kl_interval
    return mean if interval is None else f"{mean} [{interval.low:.2g}, {interval.high:.2g}]"
