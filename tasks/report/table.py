"""One table of a night, for the terminal, Markdown, HTML and Prefect alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kivi.measure.results import Throughput, Timing
from kivi.spec import CacheSpec
from tasks.judge.gate import Standing, Verdict
from tasks.run.night import Night, Outcome
from tasks.sanitize import visible

NOTHING = "–"
NOISE = 1e-6  # nats; below is the noise of float32, whose digits say nothing


class Row(NamedTuple):
    """One cell as texts, safe to show; ``–`` where nothing was measured."""

    cache: str
    layers: str
    bytes_4096: str
    bytes_32768: str
    smaller: str
    kl: str
    interval: str
    flips: str
    perplexity: str
    tier: str
    answers: str
    decode: str
    speed: str
    gate: str
    on: str


# A line break is where a terminal breaks the heading; elsewhere it is a space.
HEADINGS = Row(
    cache="cache",
    layers="layers\nquantised",
    bytes_4096="bytes a\ntoken at\n4,096",
    bytes_32768="bytes a\ntoken at\n32,768",
    smaller="smaller",
    kl="KL, nats",
    interval="95 %",
    flips="flips",
    perplexity="perplexity",
    tier="tier",
    answers="answers",
    decode="decode",
    speed="tokens/s",
    gate="gate",
    on="model and prompts",
)
LEGEND = (
    "cache: a spec, k4v3: bits of keys and values, g: group, r: newest tokens exact, s: first tokens exact, h: keys and values "
    "rotated. bytes a token: counted, all layers, one sequence of that length. smaller: full precision over bytes at 4,096. "
    "KL: mean divergence from the full cache, teacher-forced on the same tokens. flips: positions whose top token changes. "
    "tier: by fixed bounds, and the figure that decided; it fails nothing. gate: limits and earlier nights. decode: tokens a "
    "second over the full cache's, same rounds; ≈ 1 where that is within the full cache's own spread."
)
LAYERS_LEGEND = " layers quantised: the others keep a cache of their own, which is in the bytes; the report's end lists them."
ANSWERS_LEGEND = " answers: how right they are, with this cache and with the full one, on the same questions."
DECIDED = {"kl_mean": "KL", "kl_p99": "KL p99", "flip_rate": "flips"}
FAMILIES = ("full", "mlx-quantized", "kivi-roundtrip", "kivi")  # in the order of a table


def rows(night: Night, verdict: Verdict) -> list[Row]:
    """Return a row a cell: by model and prompts, by family, then from most bytes to least, so that one sees the trade."""
    shared = shared_backend(outcome.cell.spec for outcome in night.outcomes)
    return [_row(outcome, verdict, shared) for outcome in sorted(night.outcomes, key=_place)]


def columns(lines: Sequence[Row]) -> list[str]:
    """Return the columns that tell something: not the model and prompts or a gate that all share, nor what nobody measured."""
    silent = {name for name, values in zip(Row._fields, zip(*lines, strict=True), strict=True) if {*values} <= {NOTHING}}
    silent |= {name for name, passed in (("on", None), ("gate", "pass")) if _all_share(lines, name, passed)}
    return [name for name in Row._fields if name not in silent]


def heading(name: str) -> str:
    """Return a column's heading in one line."""
    return in_one_line(getattr(HEADINGS, name))


def in_one_line(text: str) -> str:
    """Return a heading without the breaks that are for a terminal."""
    return text.replace("\n", " ")


def shared_backend(specs: Iterable[CacheSpec]) -> str:
    """Return the backend of all KIVI caches, and nothing where there are none or several."""
    backends = {spec.backend for spec in specs if spec.kind.startswith("kivi")}
    return backends.pop() if len(backends) == 1 else ""


def _all_share(lines: Sequence[Row], name: str, value: str | None) -> bool:
    values = {getattr(line, name) for line in lines}
    return len(values) <= 1 and value in {None, *values}


def _place(outcome: Outcome) -> tuple[object, ...]:
    cell, result = outcome.cell, outcome.result
    weight = (result.memory.bytes_per_token_4096 or result.memory.bytes_per_token) if result else 0
    return cell.model.name, cell.prompt_set, FAMILIES.index(cell.spec.kind), -weight


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


def show_seconds(seconds: float) -> str:
    """Return e.g. ``2 min 05 s`` or ``8.3 s``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _row(outcome: Outcome, verdict: Verdict, backend: str) -> Row:
    cell, result = outcome.cell, outcome.result
    spec = cell.spec if result is None else result.spec
    name = (spec.model_copy(update={"backend": "auto"}) if spec.backend == backend else spec).text
    where = visible(f"{cell.model.name} × {cell.prompt_set}")
    if result is None:
        return Row(**{**dict.fromkeys(Row._fields, NOTHING), "cache": name, "gate": "failed", "on": where})
    memory, quality, throughput, made = result.memory, result.quality, result.throughput, result.provenance
    counted, interval = memory.bytes_per_token_4096, quality.kl_interval
    return Row(
        cache=name,
        layers=f"{made.layers_quantized} of {made.layers_quantized + len(made.layers_kept)}" if made.layers_kept else NOTHING,
        bytes_4096=f"{counted:,.0f}" if counted else NOTHING,
        bytes_32768=f"{memory.bytes_per_token_32768:,.0f}" if memory.bytes_per_token_32768 else NOTHING,
        smaller=f"{memory.full_bytes / memory.tokens / counted:.2f}×" if counted else NOTHING,
        kl=_show_kl(quality.kl_mean),
        interval=f"{interval.low:.2g} to {interval.high:.2g}" if interval and quality.kl_mean >= NOISE else NOTHING,
        flips=f"{quality.flip_rate:.1%}",
        perplexity=f"{quality.perplexity:.4g}",
        tier=_show_tier(verdict.standings[cell.key]),
        answers=f"{answers.accuracy:.0%}, full {answers.accuracy_full:.0%}" if (answers := result.answers) else NOTHING,
        decode=_show_decode(throughput) if throughput else NOTHING,
        speed=f"{throughput.decode_tps:.3g}" if throughput else NOTHING,
        gate=verdict.of(cell.key),
        on=where,
    )


def show_ratio(ratio: Timing, baseline_spread: float | None) -> str:
    """Return e.g. ``0.86×``, or about 1: the baseline differs from itself by as much, and the rounds fall on both sides."""
    both_sides = ratio.minimum <= 1 <= ratio.maximum
    return "≈ 1" if both_sides and abs(ratio.median - 1) <= (baseline_spread or 0) else f"{ratio.median:.2f}×"


def _show_decode(throughput: Throughput) -> str:
    longest = max(throughput.contexts, key=lambda one: one.context, default=None)
    ratio = longest.decode_ratio if longest else Timing.of([throughput.decode_ratio])
    return show_ratio(ratio, throughput.baseline_spread)


def _show_tier(standing: Standing) -> str:
    return standing.tier + (f": {DECIDED[standing.decided_by]}" if standing.decided_by else "")


def _show_kl(mean: float) -> str:
    return f"<{NOISE:g}" if 0 < mean < NOISE else f"{mean:.2g}"
