"""Where a result comes from: as facts for a reader, as a section of Markdown, and as tags of MLflow's runs."""

from __future__ import annotations

from kivi.measure.audit import AuditReport
from kivi.measure.backends.comparison import ComparisonResult
from kivi.measure.results import Provenance
from tasks.report.table import show_seconds
from tasks.sanitize import markdown
from tasks.tune.answer import Tuning


def facts(made: Provenance | ComparisonResult | AuditReport | Tuning) -> dict[str, str]:
    """Return which BLAS, packages and code made a result."""
    return {
        "BLAS": made.blas,
        "packages": ", ".join(f"{name} {version}" for name, version in made.packages.items()),
        "code": made.git_sha + (" with uncommitted changes" if made.git_dirty else ""),
    }


def kept_layers(made: Provenance) -> str:
    """Return which layers keep their own cache, by its class, e.g. ``RotatingKVCache: 0, 2``; ``none`` if no layer does."""
    layers: dict[str, list[str]] = {}
    for layer, why in made.layers_kept.items():
        layers.setdefault(why, []).append(layer)
    return "; ".join(f"{why}: {', '.join(indices)}" for why, indices in layers.items()) or "none"


def provenance_section(made: ComparisonResult | AuditReport | Tuning, **further: str) -> list[str]:
    """Return the lines of Markdown, with what else is to be said by name."""
    measured = f"{made.started:%Y-%m-%d %H:%M} UTC in {show_seconds(made.seconds)}"
    every = {"measured": measured, **further, **facts(made)}
    return ["## Provenance", "", *[f"- {name}: {markdown(value)}" for name, value in every.items()], ""]


def origin_tags(made: Provenance | ComparisonResult | AuditReport | Tuning, flow_run_id: str = "") -> dict[str, str]:
    """Return the tags that say which code a result comes from, with which packages and BLAS it ran, and in which flow run."""
    return {
        "kivi.git_sha": made.git_sha + ("-dirty" if made.git_dirty else ""),
        "kivi.blas": made.blas,
        **{f"kivi.package.{name}": version for name, version in made.packages.items()},
        **({"prefect.flow_run_id": flow_run_id} if flow_run_id else {}),
    }
