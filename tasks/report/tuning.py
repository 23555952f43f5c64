"""A tuning for a person: the table, the figure, and one Markdown page."""

from __future__ import annotations

import matplotlib as mpl

from kivi.measure.records import Interval
from tasks.report.figures import STYLE, legend_below, line_style, log_scale, name_axes, new_figure, svg
from tasks.report.provenance import provenance_section
from tasks.report.table import NOTHING
from tasks.sanitize import markdown
from tasks.tune.answer import Tuning, front, promised_tier

HEADINGS = ("cache", "family", "bits", "bytes a token", "KL, nats (95 %)", "flips", "tier", "decode", "choice")
TIERS_SAID = "Tiers hold at the upper ends of the 95 % intervals."
FAMILIES = ("uniform", "by layer", "mlx-lm")


def rows(result: Tuning) -> list[list[str]]:
    """Return a row a candidate, by bytes; the last column says which are on the Pareto front and which are recommended."""
    best = {one.spec.slug for one in front(result.candidates)}
    aims = {one.slug: one.word for one in result.recommendations}
    return [
        [
            one.spec.text,
            one.family,
            f"{one.bits:.2f}",
            f"{one.bytes_per_token:,.0f}",
            _kl(one.quality.kl_mean, one.quality.kl_interval),
            f"{one.quality.flip_rate:.1%}",
            promised_tier(one.quality),
            NOTHING if (ratio := result.decode_ratio.get(one.spec.slug)) is None else f"{ratio:.2f}×",
            f"recommended: {aims[one.spec.slug]}" if one.spec.slug in aims else "front" if one.spec.slug in best else "",
        ]
        for one in sorted(result.candidates, key=lambda one: one.bytes_per_token)
    ]


def tuning_markdown(result: Tuning) -> str:
    """Return the tuning as Markdown: the answer first, then every candidate."""
    lines = [f"# Which cache for {markdown(result.model)}", ""]
    lines += [f"- {markdown(one.sentence)}" for one in result.recommendations]
    lines += ["", f"Sensitivities from {result.calibration}, judged on {markdown(result.judged)}.", ""]
    lines += [f"Bits are those of a number in the codes, scales and zeros included; bytes are of live arrays. {TIERS_SAID}", ""]
    lines += [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    lines += [f"| {' | '.join(markdown(cell) for cell in row)} |" for row in rows(result)]
    if result.failed:
        lines += ["", "## Not judged", "", *[f"- {markdown(slug)}: {markdown(why)}" for slug, why in result.failed.items()]]
    return "\n".join([*lines, "", *provenance_section(result)])


@mpl.rc_context(STYLE)
def tuning_figure(result: Tuning) -> str:
    """Return bytes a token against KL by family, with intervals; recommended caches are ringed. Down and left is better."""
    figure, (axes,) = new_figure(4.2)
    for index, family in enumerate(FAMILIES):
        members = [one for one in result.candidates if one.family == family]
        if not members:
            continue
        style = line_style(index)
        axes.plot(
            [one.bytes_per_token for one in members],
            [one.quality.kl_mean for one in members],
            label=family,
            **{**style, "linestyle": "none"},
            markersize=6,
        )
        for one in members:
            if (interval := one.quality.kl_interval) is not None:
                axes.vlines(one.bytes_per_token, interval.low, interval.high, color=style["color"], linewidth=1)
    chosen = [result.candidate(one.slug) for one in result.recommendations]
    axes.plot(
        [one.bytes_per_token for one in chosen],
        [one.quality.kl_mean for one in chosen],
        label="recommended",
        marker="o",
        markersize=13,
        linestyle="none",
        markerfacecolor="none",
        markeredgecolor=mpl.rcParams["text.color"],
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    log_scale(axes, (one.quality.kl_mean for one in result.candidates))
    name_axes(
        axes,
        "which cache (down and left is better)",
        f"bytes a token at {result.config.context:,} tokens, all layers",
        "mean KL, nats",
    )
    legend_below(figure, axes)
    return svg(figure)


def _kl(mean: float, interval: Interval | None) -> str:
    return f"{mean:.2g}" if interval is None else f"{mean:.2g} ({interval.low:.2g} to {interval.high:.2g})"
