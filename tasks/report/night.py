"""The report of a night: one page for a browser, its Markdown twin, and Prefect's artifacts of the same content.

Whatever models and data sets contain is escaped: HTML by jinja2's autoescape, Markdown by the filter ``md``, control
characters in both by :mod:`tasks.sanitize`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from kivi.backends import NAMES
from kivi.files import write_whole
from kivi.measure.results import CellResult
from tasks.config import Config
from tasks.judge.gate import Verdict
from tasks.paths import UI_ADDRESS, compare_path, run_path
from tasks.report.figures import depth_figure, panel_title, pareto_figure, step_figure
from tasks.report.provenance import facts, kept_layers
from tasks.report.table import (
    ANSWERS_LEGEND,
    HEADINGS,
    LAYERS_LEGEND,
    LEGEND,
    Row,
    columns,
    heading,
    rows,
    show_seconds,
    tier_bounds,
)
from tasks.run.night import Night
from tasks.run.result_files import StoreError
from tasks.sanitize import markdown, visible

SAMPLES = 2  # continuations shown a cell
LONGEST_SAMPLE = 600  # characters
PARITY_LEGEND = (
    "Each packed cache is scored twice on the same codes: dequantised for standard attention, which shows the quantiser's "
    "error, and attended on its codes, whose distance from that is the kernels'. `kivi compare` compares backends bit for bit."
)


class Figure(Config):
    """A titled ``<svg>`` element."""

    title: str
    svg: str


class Report(Config):
    """A night's report, as texts."""

    name: str = Field(description="file name without its ending")
    html: str
    markdown: str
    note: str = Field(description="the Markdown with links as MLflow itself needs them: the run's description")
    figures: dict[str, str] = Field(description="SVG by file name")

    def write(self, folder: Path) -> Path:
        """Write page and Markdown into ``folder``, each whole or not at all; return the page's path.

        Raises:
            StoreError: the folder cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for ending, text in (("md", self.markdown), ("html", self.html)):
                path = folder / f"{self.name}.{ending}"
                write_whole(path, text)
        except OSError as error:
            raise StoreError(f"{folder}: reports cannot be written: {error.strerror}; mend it and run again") from None
        return path


def build_report(
    night: Night, verdict: Verdict, experiment_id: str = "", parent_id: str = "", cell_ids: Sequence[str] = ()
) -> Report:
    """Return the report of a night.

    Args:
        night: The night.
        verdict: The gate's verdict on it.
        experiment_id: MLflow's experiment, for links; without it there are none.
        parent_id: The night's run.
        cell_ids: The cells' runs, for the compare link.
    """
    figures, lines = _figures(night.results), rows(night, verdict)
    shown = columns(lines)
    linked = {}
    if experiment_id:
        linked = {
            "this night's run": run_path(experiment_id, parent_id),
            "its cells side by side": compare_path(experiment_id, cell_ids),
        }
    content: dict[str, Any] = {
        "night": night,
        "verdict": verdict,
        "broken": HEADINGS._asdict(),
        "headings": {name: heading(name) for name in Row._fields},
        "columns": shown,
        "rows": [line._asdict() for line in lines],
        "legend": LEGEND + (ANSWERS_LEGEND if "answers" in shown else "") + (LAYERS_LEGEND if "layers" in shown else ""),
        "tiers": tier_bounds(night, verdict),
        "figures": [figure.model_copy(update={"svg": Markup(figure.svg)}) for figure in figures.values()],  # noqa: S704  ours
        "links": linked,
        "address": f"{UI_ADDRESS}/",
        "parity": list(_parity_lines(night)),
        "parity_legend": PARITY_LEGEND,
        "facts": _facts(night),
        "total": sum(night.seconds.values()),
        "samples": SAMPLES,
        "longest": LONGEST_SAMPLE,
    }
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", night.title).strip("-.")
    text = _environment(html=False).get_template("report.md")
    return Report(
        name=f"{name}-{night.key[:8]}",
        html=_environment(html=True).get_template("report.html").render(content),
        markdown=text.render(content),
        note=text.render({**content, "address": ""}),
        figures={f"figures/{file}": figure.svg for file, figure in figures.items()},
    )


def publish_artifacts(report: Report, night: Night, verdict: Verdict, page: Path) -> None:
    """Make Prefect's artifacts of a report: its Markdown, its table and a link to its page. Only within a run."""
    key = re.sub(r"[^a-z0-9]+", "-", night.name.lower()).strip("-") or "night"
    description = f"{visible(night.title)}: {verdict.headline}"
    create_markdown_artifact(report.markdown, key=f"{key}-report", description=description)
    create_table_artifact(
        [{heading(name): text for name, text in line._asdict().items()} for line in rows(night, verdict)],
        key=f"{key}-table",
        description=description,
    )
    create_link_artifact(page.resolve().as_uri(), link_text=page.name, key=f"{key}-page", description=description)


def _figures(results: Sequence[CellResult]) -> dict[str, Figure]:
    """Return the figures of each model and prompt set: cells that share no tokens share no figure."""
    panels: dict[str, list[CellResult]] = {}
    for result in results:
        panels.setdefault(panel_title(result), []).append(result)
    figures = {}
    for number, (title, members) in enumerate(panels.items()):
        for kind, what, draw in (
            ("pareto", "bytes a token against KL", pareto_figure),
            ("by_step", "by decode step", step_figure),
            ("by_depth", "by position", depth_figure),
        ):
            figures[f"{kind}_{number}.svg"] = Figure(title=f"{title}: {what}", svg=draw(members))
    return figures


def _parity_lines(night: Night) -> Iterator[str]:
    """Yield what attention on codes adds to the quantiser's own error, by cell, then each backend that no cell ran on."""
    measured = [(outcome.cell.label, outcome.result) for outcome in night.outcomes if outcome.result is not None]
    for label, result in measured:
        quality = result.quality
        if quality.control_kl_mean is not None and quality.kernel_kl_mean is not None:
            yield (
                f"{label}, backend {result.provenance.backend}: the quantiser's KL is {quality.control_kl_mean:.3g} nats, "
                f"attention on codes is {quality.kernel_kl_mean:.2g} nats from it"
            )
    ran = {result.provenance.backend for _, result in measured}
    yield from (f"{name}: not run in this night" for name in NAMES if name not in ran)


def _facts(night: Night) -> dict[str, list[str]]:
    """Return what produced the results: each fact with its distinct values."""
    made = [result.provenance for result in night.results]
    origin = {name: [facts(one)[name] for one in made] for name in ("BLAS", "packages", "code")}
    shown = {
        "model": [f"{one.model}, revision {one.model_revision}, weights {one.weights_digest[:16]}" for one in made],
        "dtype": [one.model_dtype for one in made],
        "prompts": [
            f"{prompts.name}: {prompts.source}"
            + (f", {prompts.rows} rows" if prompts.rows else "")
            + f", SHA-256 {prompts.sha256}"
            for prompts in night.prompt_sets
        ],
        "layers with a cache of their own": [
            f"{one.spec.text}: {kept_layers(one)}; {one.layers_quantized} are quantised" for one in made if one.layers_kept
        ],
        "device": [one.device for one in made],
        "BLAS": origin["BLAS"],
        "backend": [f"{one.backend}: {one.backend_reason}" for one in made],
        "packages": origin["packages"],
        "code": origin["code"],
        "night key": [night.key],
        "Prefect flow run": [night.flow_run_id] if night.flow_run_id else [],
    }
    return {name: list(dict.fromkeys(values)) for name, values in shown.items() if values}


def _environment(*, html: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("tasks.report"),
        autoescape=html,  # noqa: S701  Markdown has its own filter
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"md": markdown, "visible": visible, "seconds": show_seconds, "lines": _visible_lines}
    return environment


def _visible_lines(text: str, longest: int) -> str:
    """Return ``text`` with its line breaks kept, all else that hides made visible, cut to ``longest`` characters."""
    cut = text if len(text) <= longest else text[:longest] + " …"
    return "\n".join(visible(line) for line in cut.split("\n"))


report = task(name="report", cache_policy=NO_CACHE)(build_report)
publish = task(name="publish", cache_policy=NO_CACHE)(publish_artifacts)

__all__ = ["Report", "build_report", "publish", "publish_artifacts", "report"]
