"""Compare backends as a task, and log what came of it: one parent run, a child for each spec and backend."""

from __future__ import annotations

from collections.abc import Iterator

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from kivi.measure.backends.comparison import (
    BackendState,
    ComparisonResult,
    ComparisonSettings,
    SpecComparison,
    compare_backends,
)
from kivi.measure.monitor import Monitor
from tasks.config import Config, Model, ModelConfig, Spec
from tasks.report.comparison import comparison_markdown, figures, headline, parity_table
from tasks.report.provenance import origin_tags
from tasks.report.table import in_one_line
from tasks.run.cells import Reporter, holding, loaded_model
from tasks.run.night import digest
from tasks.tracking.runs import Entry, Logged, Point, cache_params, log_entry, shortened
from tasks.tracking.store import TrackingStore

EXPERIMENT = "kivi-compare"
LABEL = "comparison of backends"


class CompareConfig(Config):
    """What is compared. A spec's own backend is not looked at: every one that is available runs it."""

    specs: tuple[Spec, ...] = Field(min_length=1, description="caches of kind kivi or kivi-roundtrip")
    model: Model | None = Field(ModelConfig(), description="what end-to-end speed and tokens are measured with; null: none")
    settings: ComparisonSettings = Field(
        default_factory=ComparisonSettings, description="how much is compared; by default what suits the device"
    )
    deadline_s: float = Field(3600, gt=0, description="seconds after which the comparison is stopped and fails")


@task(name=LABEL, cache_policy=NO_CACHE)
def measure_comparison(config: CompareConfig) -> ComparisonResult:
    """Compare the backends, with the host's accelerator held."""
    with holding(LABEL, config.deadline_s):
        model = None if config.model is None else loaded_model(config.model)
        monitor = Monitor(Reporter(LABEL, "comparison"), config.deadline_s)
        return compare_backends(config.specs, settings=config.settings, model=model, monitor=monitor)


def log_comparison(store: TrackingStore, result: ComparisonResult, flow_run_id: str = "") -> Logged:
    """Log a comparison, measured here or elsewhere; the same result is logged once.

    Args:
        store: The store of experiment ``kivi-compare``, held by this process.
        result: The comparison.
        flow_run_id: The flow run that measured it, if one did.
    """
    content = digest((result.model_dump_json(),))
    parent_id = log_entry(store, _parent(result, content, flow_run_id))
    children = [
        log_entry(store, _child(result, spec, backend, content), parent_id)
        for spec in result.specs
        for backend in result.backends
        if backend.available
    ]
    return Logged(experiment_id=store.experiment_id, run_id=parent_id, child_ids=tuple(children))


def publish_comparison(result: ComparisonResult) -> None:
    """Make Prefect's artifacts: the Markdown, and parity as a table. Only within a run."""
    create_markdown_artifact(comparison_markdown(result), key="comparison", description=headline(result))
    rows = []
    for spec in result.specs:
        header, *lines = parity_table(spec)
        rows += [{"spec": spec.spec.slug, **dict(zip(map(in_one_line, header), line, strict=True))} for line in lines]
    create_table_artifact(rows, key="comparison-parity", description=headline(result))


def _parent(result: ComparisonResult, content: str, flow_run_id: str) -> Entry:
    text = comparison_markdown(result)
    points = [
        Point(name="compare.passed", value=float(result.passed)),
        Point(name="compare.problems", value=float(len(result.problems))),
        Point(name="compare.not_run", value=float(len(result.not_run))),
    ]
    for spec in result.specs:
        for backend in result.backends:
            # What MLflow's charts show of the parent: of each curve the last point, the largest size.
            last = {point.name: point for point in _points(spec, backend.name)}
            points += [Point(name=f"{name}/{spec.spec.slug}/{backend.name}", value=point.value) for name, point in last.items()]
    return Entry(
        name=f"comparison {result.started:%Y-%m-%d %H:%M} UTC",
        kind="comparison",
        digest=content,
        started=result.started,
        passed=result.passed,
        params={
            "specs": ", ".join(spec.spec.slug for spec in result.specs),
            "backends": ", ".join(backend.name for backend in result.backends if backend.available),
            "device": result.device,
        },
        tags=origin_tags(result, flow_run_id),
        points=tuple(points),
        files={"comparison.json": result.model_dump_json(indent=1), "comparison.md": text, **figures(result)},
        note=shortened(text, "Markdown file"),
    )


def _child(result: ComparisonResult, spec: SpecComparison, backend: BackendState, content: str) -> Entry:
    own = [check for check in spec.parity if check.backend == backend.name]
    return Entry(
        name=f"{spec.spec.slug.removesuffix('-auto')} on {backend.name}",
        kind="backend",
        digest=digest((content, spec.spec.slug, backend.name)),
        started=result.started,
        passed=all(check.passed for check in own) and not _failed(spec, backend.name),
        params={
            "spec": spec.spec.slug,
            "backend": backend.name,
            "device": result.device,
            "dtype": result.settings.speed.dtype,
            **cache_params(spec.spec),
        },
        tags={"kivi.backend_reason": backend.reason},
        points=tuple(_points(spec, backend.name)),
    )


def _failed(spec: SpecComparison, backend: str) -> bool:
    return any(arm.failed for case in spec.timings for arm in case.arms if arm.arm == backend)


def _points(spec: SpecComparison, backend: str) -> Iterator[Point]:
    """Yield what one backend measured of one spec; curves have the size as their step."""
    checks = [check for check in spec.parity if check.backend == backend and not check.not_run]
    exact = [check for check in checks if check.bound == 0]
    close = [check for check in checks if check.bound > 0]
    if exact:
        yield Point(name="parity.differing", value=float(sum(check.differing for check in exact)))
        yield Point(name="parity.max_abs", value=max(check.max_abs for check in exact))
        yield Point(name="parity.max_ulps", value=float(max(check.max_ulps for check in exact)))
    if close:
        yield Point(name="parity.attention_share_of_bound", value=max(check.relative_error / check.bound for check in close))
    for case in spec.timings:
        name = case.operation.replace(" ", "_")
        step = case.tokens if case in spec.speed else 0
        for arm in case.arms:
            if arm.arm != backend or arm.seconds is None:
                continue
            yield Point(name=f"speed.{name}_seconds", value=arm.seconds.median, step=step)
            if arm.ratio is not None:
                yield Point(name=f"speed.{name}_ratio", value=arm.ratio.median, step=step)
    for pair in spec.model.agreement if spec.model else ():
        if pair.arm == backend:
            yield Point(name=f"generation.agreement_with_{pair.reference}", value=pair.agreement)
