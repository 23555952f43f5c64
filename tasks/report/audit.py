"""An audit for a person: one Markdown page, and figures."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter

from kivi.measure.audit import AuditReport, Check, Curve
from tasks.report.figures import STYLE, legend_below, line_style, name_axes, new_figure, svg
from tasks.report.provenance import provenance_section
from tasks.report.table import show_seconds
from tasks.sanitize import markdown

QUALITY_CURVES = {
    "audit.step_kl": "KL, teacher-forced",
    "audit.logit_cosine": "cosine, teacher-forced",
    "audit.logit_cosine_free": "cosine, free-running",
}
CROWDED = 40  # points of a line beyond which markers hide it
BYTES_LABELS = {
    "audit.live_bytes": "live arrays",
    "audit.accounted_bytes": "accounted",
    "audit.full_precision_bytes": "full precision",
    "audit.active_bytes": "MLX's active memory",
}


def audit_markdown(report: AuditReport) -> str:
    """Return the audit as Markdown: verdict, what is wrong, then every check with its evidence and its command."""
    lines = [f"# Audit of {markdown(report.spec.slug)}", "", f"**{markdown(report.headline)}**", ""]
    lines += [f"{markdown(report.cache)} on backend {markdown(report.backend)}; {markdown(report.device)}", ""]
    for severity, title in (("error", "Errors"), ("warning", "Warnings")):
        found = report.findings(severity)
        if found:
            lines += [f"## {title}", ""]
            lines += [f"- {check}, {markdown(one.name)}: {markdown(one.evidence)}" for check, one in found]
            lines += [""]
    lines += ["## Checks", "", "| check | question | outcome | took |", "|---|---|---|---|"]
    lines += [
        f"| {check.name} | {markdown(check.question)} | {check.outcome} | {show_seconds(check.seconds)} |"
        for check in report.checks
    ]
    for check in report.checks:
        lines += ["", f"## {check.name}", "", *_evidence(check)]
    return "\n".join([*lines, "", *provenance_section(report, model=report.model or "none")])


def audit_figures(report: AuditReport) -> dict[str, str]:
    """Return the figures by file name."""
    checks = {check.name: check for check in report.checks}
    drawn = {}
    counted = [curve for name in ("bytes", "memory") if name in checks for curve in checks[name].curves]
    if counted:
        drawn["figures/bytes.svg"] = bytes_figure(counted)
    if "append" in checks and checks["append"].curves:
        drawn["figures/oldest_error.svg"] = drift_figure(checks["append"].curves[0])
    if "quality" in checks and checks["quality"].curves:
        drawn["figures/quality.svg"] = quality_figure(checks["quality"].curves)
    return drawn


@mpl.rc_context(STYLE)
def bytes_figure(curves: Sequence[Curve]) -> str:
    """Return bytes by decode step: live, accounted, in full precision, and MLX's own count."""
    figure, (axes,) = new_figure(3.2)
    for index, curve in enumerate(curves):
        _draw(axes, curve, BYTES_LABELS.get(curve.name, curve.name), index)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f}")
    name_axes(axes, "bytes of one layer's cache", "decode step", "kB")
    legend_below(figure, axes)
    return svg(figure)


@mpl.rc_context(STYLE)
def drift_figure(curve: Curve) -> str:
    """Return the error of the oldest group of keys as tokens come: a straight line where old codes never change."""
    figure, (axes,) = new_figure(2.4)
    _draw(axes, curve, "oldest group", 0)
    axes.set_ylim(0, 2 * max(curve.values) or 1)
    name_axes(axes, "mean error of the oldest group of keys", curve.axis, "")
    return svg(figure)


@mpl.rc_context(STYLE)
def quality_figure(curves: Sequence[Curve]) -> str:
    """Return KL and cosines by decode step, a line a cache: what is the cache's error, and what is divergence."""
    figure, panels = new_figure(3.4, len(QUALITY_CURVES))
    for axes, (prefix, title) in zip(panels, QUALITY_CURVES.items(), strict=True):
        shown = [curve for curve in curves if curve.name.partition("/")[0] == prefix]
        for index, curve in enumerate(shown):
            _draw(axes, curve, curve.name.partition("/")[2], index)
        name_axes(axes, title, "decode step", "nats" if prefix.endswith("kl") else "")
    top = max(1.0, *[value for curve in curves if "cosine" in curve.name for value in curve.values])
    low = min([value for curve in curves if "cosine" in curve.name for value in curve.values])
    for axes in panels[1:]:
        axes.set_ylim(low - 0.05 * (top - low), top + 0.05 * (top - low))
    if max(value for curve in curves if "kl" in curve.name for value in curve.values) > 0:
        panels[0].set_yscale("log")
        for set_formatter in (panels[0].yaxis.set_major_formatter, panels[0].yaxis.set_minor_formatter):
            set_formatter(LogFormatter())  # the default one needs mathematics in text
    legend_below(figure, panels[0])
    return svg(figure)


def _evidence(check: Check) -> list[str]:
    lines = [f"{markdown(check.question)}", ""]
    if check.not_run:
        lines += [markdown(check.not_run)]
    lines += [f"- {found.severity}: {markdown(found.name)}: {markdown(found.evidence)}" for found in check.findings]
    if check.findings:
        lines += ["", f"Again: `{check.findings[0].command}`"]
    return lines


def _draw(axes: Axes, curve: Curve, label: str, index: int) -> None:
    style = {**line_style(index), "marker": None} if len(curve.steps) > CROWDED else line_style(index)
    axes.plot(curve.steps, curve.values, label=label, **style, markersize=3, linewidth=1)
