"""A comparison of backends for a person: Markdown, tables and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import matplotlib as mpl

from kivi.measure.backends.comparison import ComparisonResult, SpecComparison
from kivi.measure.backends.parity import ParityCheck
from kivi.measure.backends.speed import ArmTiming, SpeedCase
from kivi.measure.results import Timing
from tasks.report.figures import STYLE, line_style, name_axes, new_figure, svg
from tasks.report.provenance import provenance_section
from tasks.report.table import NOTHING, in_one_line, show_ratio
from tasks.sanitize import markdown

Table = list[list[str]]  # the first row names the columns
# A line break is where a terminal breaks the heading; elsewhere it is a space.
PARITY_HEADINGS = ["backend", "operation", "checks", "numbers that\ndiffer", "largest\ndifference", "of bound", "gate"]
SPEED_HEADINGS = ["operation", "tokens", "arm", "time a call", "speed over\nbaseline"]
MODEL_HEADINGS = [
    "arm",
    "prefill,\ntokens/s",
    "over\nfull",
    "decode,\ntokens/s",
    "over\nfull",
    "tokens\nas full",
    "tokens\nas mlx",
]


def headline(result: ComparisonResult) -> str:
    """Return the verdict in a sentence."""
    ran = ", ".join(backend.name for backend in result.backends if backend.available)
    checks = sum(not check.not_run for spec in result.specs for check in spec.parity)
    if result.passed:
        return f"passed: {checks} parity checks hold on {ran}"
    return f"failed: {len(result.problems)} problems in {checks} parity checks and the timings on {ran}"


def comparison_markdown(result: ComparisonResult) -> str:
    """Return the comparison as Markdown, verdict first."""
    lines = ["# Backends compared", "", f"**{markdown(headline(result))}**", "", f"{markdown(result.device)}", ""]
    if result.problems:
        lines += ["## Problems", "", *[f"- {markdown(problem)}" for problem in result.problems], ""]
    if result.not_run:
        lines += ["## Not run", "", *[f"- {markdown(line)}" for line in result.not_run], ""]
    for spec in result.specs:
        lines += [f"## {markdown(spec.spec.slug)}", "", *_section("Parity with the definition", parity_table(spec))]
        lines += _section("Speed (medians with extremes; arms interleaved, inputs of their own each round)", speed_table(spec))
        if spec.model is not None:
            lines += _section(f"The model {spec.model.model}, {spec.model.dtype}", model_table(spec))
    return "\n".join([*lines, *provenance_section(result)])


def parity_table(spec: SpecComparison) -> Table:
    """Return parity by backend and operation, the worst over dtypes and shapes."""
    groups: dict[tuple[str, str], list[ParityCheck]] = {}
    for check in spec.parity:
        groups.setdefault((check.backend, check.operation), []).append(check)
    rows = []
    for (backend, operation), checks in groups.items():
        ran = [check for check in checks if not check.not_run]
        elements, differing = sum(check.elements for check in ran), sum(check.differing for check in ran)
        exact = all(check.bound == 0 for check in checks)
        rows.append(
            [
                backend,
                operation,
                f"{len(ran)} of {len(checks)}",
                f"{differing:,} of {elements:,}",
                f"{max((check.max_abs for check in ran), default=0.0):.2g}"
                + (f", {max(check.max_ulps for check in ran):,} ULPs" if exact and differing else ""),
                "exact" if exact else f"{max((c.relative_error / c.bound for c in ran), default=0.0):.0%}",
                _verdict(checks, ran),
            ]
        )
    return [PARITY_HEADINGS, *rows]


def speed_table(spec: SpecComparison) -> Table:
    """Return every timing of an operation, a row an arm."""
    return [SPEED_HEADINGS, *[_speed_row(case, arm) for case in spec.speed for arm in case.arms]]


def model_table(spec: SpecComparison) -> Table:
    """Return prefill and decode of the model, and how many tokens agree."""
    model = spec.model
    if model is None:
        return [MODEL_HEADINGS]
    agreed = {(pair.arm, pair.reference): f"{pair.agreement:.1%}" for pair in model.agreement}
    decode = {arm.arm: arm for arm in model.decode.arms}
    rows = [
        [
            arm.arm,
            *_rate(model.prefill, arm),
            *(_rate(model.decode, decode[arm.arm]) if arm.arm in decode else (NOTHING, NOTHING)),
            agreed.get((arm.arm, "full"), NOTHING),
            agreed.get((arm.arm, "mlx"), NOTHING),
        ]
        for arm in model.prefill.arms
    ]
    return [MODEL_HEADINGS, *rows]


@mpl.rc_context(STYLE)
def speed_figure(spec: SpecComparison) -> str:
    """Return how many times faster than the baseline each arm is, by size; bars reach from the worst to the best round."""
    panels: dict[str, list[SpeedCase]] = {}
    for case in spec.speed:
        panels.setdefault(case.operation, []).append(case)
    figure, grid = new_figure(3.2, max(1, len(panels)))
    for axes, (operation, cases) in zip(grid, panels.items(), strict=False):
        for index, (arm, points) in enumerate(_ratios(cases).items()):
            sizes, ratios = [size for size, _ in points], [ratio for _, ratio in points]
            low = [ratio.median - ratio.minimum for ratio in ratios]
            high = [ratio.maximum - ratio.median for ratio in ratios]
            medians = [ratio.median for ratio in ratios]
            axes.errorbar(sizes, medians, yerr=[low, high], label=arm, **line_style(index), markersize=4, linewidth=1)
        axes.axhline(1.0, linewidth=0.8, linestyle=":", color="grey")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        name_axes(axes, f"{operation} against {cases[0].baseline}", "tokens", "")
        axes.legend(fontsize=7)
    return svg(figure)


def figures(result: ComparisonResult) -> dict[str, str]:
    """Return the figures by file name."""
    return {f"figures/speed_{spec.spec.slug}.svg": speed_figure(spec) for spec in result.specs if spec.speed}


def _ratios(cases: Sequence[SpeedCase]) -> dict[str, list[tuple[int, Timing]]]:
    lines: dict[str, list[tuple[int, Timing]]] = {}
    for case in cases:
        for arm in case.arms:
            if arm.ratio is not None and arm.arm != case.baseline:
                lines.setdefault(arm.arm, []).append((case.tokens, arm.ratio))
    return lines


def _speed_row(case: SpeedCase, arm: ArmTiming) -> list[str]:
    row = [case.operation, f"{case.tokens:,}", arm.arm]
    if arm.seconds is None:
        return [*row, f"failed: {arm.failed}" if arm.failed else f"not run: {arm.not_run}", NOTHING]
    return [*row, f"{arm.seconds.median * 1e3:.3g} ms", _ratio(case, arm)]


def _ratio(case: SpeedCase, arm: ArmTiming) -> str:
    """Return how many times as fast as the baseline an arm is, with its rounds' extremes; of the baseline its own spread."""
    if arm.arm == case.baseline:
        return f"baseline, spread {case.baseline_spread or 0:.0%}"
    if arm.ratio is None:
        return NOTHING
    return f"{show_ratio(arm.ratio, case.baseline_spread)} ({arm.ratio.minimum:.2f} to {arm.ratio.maximum:.2f})"


def _rate(case: SpeedCase, arm: ArmTiming) -> tuple[str, str]:
    if arm.seconds is None:
        return (f"failed: {arm.failed}" if arm.failed else f"not run: {arm.not_run}", NOTHING)
    speed = 1 / arm.seconds.median
    shown = f"{speed:,.0f}" if speed >= 1000 else f"{speed:.4g}"
    return shown, NOTHING if arm.arm == case.baseline or arm.ratio is None else show_ratio(arm.ratio, case.baseline_spread)


def _verdict(checks: Sequence[ParityCheck], ran: Sequence[ParityCheck]) -> str:
    if not all(check.passed for check in checks):
        return "fail"
    return "pass" if ran else "not run"


def _section(title: str, table: Table) -> Iterator[str]:
    header, *rows = table
    yield from (f"### {markdown(title)}", "")
    yield f"| {' | '.join(in_one_line(name) for name in header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(markdown(cell) for cell in row)} |"
    yield ""
