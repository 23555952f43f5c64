"""The ad-hoc evaluation: a night of one model, one prompt set and one cache."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from pydantic import TypeAdapter

from flows.matrix import run_matrix
from flows.results import NightResult
from kivi.measure.settings import MeasureSettings
from tasks.config import Model, NightlyConfig, Prompts, Spec, Thresholds
from tasks.run.night import EVALUATE


def run_name() -> str:
    """Return what a person reads, e.g. ``kivi-k2v2-g32-r128-auto on embedded``."""
    given = runtime.flow_run.parameters  # as they were given, not as they were validated
    spec, model = TypeAdapter(Spec).validate_python(given["spec"]), TypeAdapter(Model).validate_python(given["model"])
    return f"{spec.slug} on {model.name}"


@flow(name=EVALUATE, flow_run_name=run_name, persist_result=False)
def evaluate(
    model: Model,
    prompts: Prompts,
    spec: Spec,
    measure: MeasureSettings = MeasureSettings(),  # noqa: B008  frozen
    thresholds: dict[str, Thresholds] | None = None,
    tracking_dir: Path = Path("mlruns"),
    refresh: bool = False,
) -> State[NightResult]:
    """Measure one cache of one model on one prompt set, as a night would.

    Args:
        model: embedded, a folder in mlx-lm's format, or a Hugging Face id.
        prompts: humaneval, retrieval, or a source with its column.
        spec: The cache, as KIND[:key=value,...].
        measure: How much is measured.
        thresholds: Limits beside the default ones.
        tracking_dir: Folder of the MLflow store, of finished results and of reports.
        refresh: Measure anew.
    """
    one = {"models": (model,), "prompt_sets": (prompts,), "specs": (spec,)}
    config = NightlyConfig(name=EVALUATE, **one, measure=measure, thresholds=thresholds or {})
    return run_matrix(config, tracking_dir, refresh)
