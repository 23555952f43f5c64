"""The figures, as SVG that takes the colour of the text around it, so that it reads in light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kivi.measure.pareto import pareto
from kivi.measure.results import CellResult
from tasks.report.table import NOISE
from tasks.sanitize import visible

INK = "#010203"  # a colour that nothing else has, replaced by currentColor
# Okabe and Ito's palette without black and yellow: told apart with colour blindness and on light and dark alike.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")
MARKERS = "osD^vP*X"
FAMILY_COLOURS = {"full": INK, "mlx-quantized": PALETTE[3], "kivi-roundtrip": PALETTE[5], "kivi": PALETTE[0]}
STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's own font
    "svg.hashsalt": "kivi",  # the same figure is the same bytes
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.use_mathtext": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@mpl.rc_context(STYLE)
def cell_figure(result: CellResult) -> str:
    """Return KL and logit cosine by decode step of one cell, teacher-forced and free-running."""
    generation = result.generation
    figure, (kl, cosine) = new_figure(2.8, 2)
    _curve(kl, generation.step_kl, "teacher-forced", 0)
    _curve(cosine, generation.logit_cosine, "teacher-forced", 0)
    _curve(cosine, generation.logit_cosine_free, "free-running", 1)
    name_axes(kl, "KL from the full cache", "decode step", "nats")
    name_axes(cosine, "cosine of the logits", "decode step", "")
    cosine.legend()
    return svg(figure)


@mpl.rc_context(STYLE)
def step_figure(results: Sequence[CellResult]) -> str:
    """Return teacher-forced KL and logit cosine by decode step, one line a cell."""
    figure, (kl, cosine) = new_figure(3.4, 2)
    for index, result in enumerate(results):
        _curve(kl, result.generation.step_kl, result.spec.text, index)
        _curve(cosine, result.generation.logit_cosine, result.spec.text, index)
    log_scale(kl, (value for result in results for value in result.generation.step_kl))
    name_axes(kl, "KL from the full cache", "decode step", "nats")
    name_axes(cosine, "cosine of the logits", "decode step", "")
    legend_below(figure, kl)
    return svg(figure)


@mpl.rc_context(STYLE)
def depth_figure(results: Sequence[CellResult]) -> str:
    """Return mean KL by position, one line a cell."""
    figure, (axes,) = new_figure(3.2)
    for index, result in enumerate(results):
        buckets = result.quality.by_depth
        middles = [(bucket.start + bucket.stop) / 2 for bucket in buckets]
        axes.plot(middles, [bucket.kl_mean for bucket in buckets], label=result.spec.text, **line_style(index), markersize=4)
    log_scale(axes, (bucket.kl_mean for result in results for bucket in result.quality.by_depth))
    name_axes(axes, "KL from the full cache by position", "position", "nats")
    legend_below(figure, axes)
    return svg(figure)


@mpl.rc_context(STYLE)
def pareto_figure(results: Sequence[CellResult]) -> str:
    """Return bytes a token against mean KL, one labelled point a cell, and each family's Pareto front.

    Bytes are those counted at 4,096 tokens, or of this run where a result has none. Down and left is better.
    """
    figure, (axes,) = new_figure(4.2)
    counted = all(result.memory.bytes_per_token_4096 for result in results)
    families: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        quality, interval, memory = result.quality, result.quality.kl_interval, result.memory
        colour = FAMILY_COLOURS[result.spec.kind]
        weight = memory.bytes_per_token_4096 if counted else None
        point = (weight or memory.bytes_per_token, quality.kl_mean)
        families.setdefault(result.spec.kind, []).append(point)
        axes.plot(*point, "o", color=colour, markersize=5)
        name = result.spec.model_copy(update={"backend": "auto"}).text
        axes.annotate(visible(name), point, xytext=(6, 3), textcoords="offset points", fontsize=7, color=INK)
        if interval is not None:
            axes.vlines(point[0], interval.low, interval.high, color=colour, linewidth=1)
    for kind, points in families.items():
        axes.plot(*zip(*pareto(points, lambda point: point), strict=True), color=FAMILY_COLOURS[kind], linewidth=1)
    axes.margins(x=0.15)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    log_scale(axes, (result.quality.kl_mean for result in results))
    where = "counted at 4,096 tokens" if counted else "resident"
    name_axes(axes, "memory against quality (down and left is better)", f"bytes a token, all layers, {where}", "mean KL, nats")
    return svg(figure)


def new_figure(height: float, columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure ``height`` inches high, as wide as the page, and its panels from left to right."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def line_style(index: int) -> dict[str, Any]:
    """Return colour and marker of the line with this number."""
    return {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)]}


def _curve(axes: Axes, values: Sequence[float], label: str, index: int) -> None:
    axes.plot(range(len(values)), values, label=label, **line_style(index), markersize=3, linewidth=1)


def log_scale(axes: Axes, values: Iterable[float]) -> None:
    """Scale y logarithmically above the noise of float32, linearly below: a cache without error has KL 0."""
    largest = max(values, default=0.0)
    if largest > NOISE:
        axes.set_yscale("symlog", linthresh=NOISE, linscale=0.5)
        axes.set_ylim(bottom=-NOISE / 4, top=3 * largest)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def name_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Give a panel its title, the names of its axes and a faint grid."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)


def legend_below(figure: Figure, axes: Axes) -> None:
    """Put one legend under all panels, with what ``axes`` shows."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)


def svg(figure: Figure, ink: str = "currentColor") -> str:
    """Return the figure as one ``<svg>`` element, without the XML prologue and without a date.

    Text and axes are in the colour ``ink``: that of the text around it, or one of its own where a page shows it as an image.
    """
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL).replace(INK, ink)


def panel_title(result: CellResult) -> str:
    """Return what distinguishes one set of figures from another: the model and the prompt set."""
    return visible(f"{result.provenance.model} on {result.provenance.prompt_set}")
