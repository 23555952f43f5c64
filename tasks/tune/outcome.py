"""What a tuning leaves behind: its record, the recommended caches as files, and its runs in MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from kivi import machine
from kivi.files import write_whole
from kivi.measure.candidate import Candidate
from tasks.paths import REPORTS
from tasks.report.provenance import origin_tags
from tasks.report.tuning import HEADINGS, rows, tuning_figure, tuning_markdown
from tasks.run.night import digest
from tasks.run.result_files import StoreError
from tasks.tracking.runs import Entry, Logged, Point, cache_params, log_entry, shortened
from tasks.tracking.store import TrackingStore
from tasks.tune.answer import RECOMMENDED, Tuning, promised_tier, recommend
from tasks.tune.config import TuneConfig
from tasks.tune.sensitivity import Sensitivities
from tasks.tune.subject import Subject, weights_bytes

EXPERIMENT = "kivi-tune"


def conclude(
    subject: Subject,
    config: TuneConfig,
    sensitivities: Sensitivities,
    candidates: list[Candidate],
    failed: Mapping[str, str],
    chosen: Mapping[str, Candidate],
    ratios: Mapping[str, float | None],
    *,
    started: datetime,
    seconds: float,
) -> Tuning:
    """Return the record of a tuning. Its digest is that of what it was asked and of its results, not of the clock."""
    keys = [*(one.cell_key for one in sensitivities.measured), *(one.cell_key for one in candidates)]
    return Tuning(
        digest=digest((config.model_dump_json(), *keys, *failed)),
        started=started,
        seconds=seconds,
        model=subject.model.name,
        model_dtype=subject.identity.dtype,
        weights_bytes=weights_bytes(subject.model),
        calibration=f"{len(subject.calibration):,} tokens of {config.calibration.name}",
        judged=f"{len(subject.judged)} × {len(subject.judged[0]) - 1:,} tokens of {config.judged.name}",
        config=config,
        sensitivities=sensitivities.measured,
        candidates=candidates,
        failed=dict(failed),
        recommendations=[recommend(aim, one, candidates, ratios.get(one.spec.slug)) for aim, one in chosen.items()],
        decode_ratio=dict(ratios),
        **machine.provenance(),
    )


def recommended_files(result: Tuning) -> dict[str, str]:
    """Return the recommended caches as YAML by file name; the first is ``recommended.yaml``, too."""
    named = {f"recommended-{one.word}.yaml": result.candidate(one.slug).spec.dump() for one in result.recommendations}
    return {RECOMMENDED: next(iter(named.values())), **(named if len(named) > 1 else {})}


def write_tuning(result: Tuning, tracking_dir: Path) -> Path:
    """Write recommended caches, record, table and figure into a folder of the tracking folder's reports; return it.

    Raises:
        StoreError: the folder cannot be written.
    """
    folder = tracking_dir / REPORTS / f"tune-{result.digest[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in _files(result).items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_whole(folder / name, text)
    except OSError as error:
        raise StoreError(f"{str(folder)!r} cannot be written: {error.strerror or error}; free space or mend it") from error
    return folder


def log_tuning(store: TrackingStore, result: Tuning, flow_run_id: str = "") -> Logged:
    """Log a tuning: a parent run, and a child for each candidate; the same result is logged once.

    Args:
        store: The store of experiment ``kivi-tune``, held by this process.
        result: The tuning.
        flow_run_id: The flow run that made it, if one did.
    """
    text = tuning_markdown(result)
    parent = Entry(
        name=f"tune {result.model} {result.started:%Y-%m-%d %H:%M} UTC",
        kind="tune",
        digest=result.digest,
        started=result.started,
        passed=result.passed,
        params={
            "model": result.model,
            "dtype": result.model_dtype,
            "device": result.device,
            "calibration": result.calibration,
            "judged": result.judged,
            "effort": result.config.effort,
            **{f"recommended.{one.word}": one.slug for one in result.recommendations},
        },
        tags=origin_tags(result, flow_run_id),
        points=tuple(_parent_points(result)),
        files=_files(result),
        note=shortened(text, "Markdown file"),
    )
    parent_id = log_entry(store, parent)
    children = [log_entry(store, _child(result, one), parent_id) for one in result.candidates]
    return Logged(experiment_id=store.experiment_id, run_id=parent_id, child_ids=tuple(children))


def publish_tuning(result: Tuning) -> None:
    """Make Prefect's artifacts: the page, and the candidates as a table. Only within a run."""
    create_markdown_artifact(tuning_markdown(result), key="tuning", description=result.headline)
    table = [dict(zip(HEADINGS, row, strict=True)) for row in rows(result)]
    create_table_artifact(table, key="tuning-candidates", description=result.headline)


def _files(result: Tuning) -> dict[str, str]:
    return {
        **recommended_files(result),
        "tuning.json": result.model_dump_json(indent=1),
        "tuning.md": tuning_markdown(result),
        "figures/tuning.svg": tuning_figure(result),
    }


def _child(result: Tuning, one: Candidate) -> Entry:
    return Entry(
        name=one.spec.slug,
        kind="candidate",
        digest=digest((result.digest, one.cell_key)),
        started=result.started,
        passed=True,
        params={"spec": one.spec.slug, "family": one.family, **cache_params(one.spec)},
        tags={"kivi.cell_key": one.cell_key, "kivi.tier": promised_tier(one.quality)},
        points=tuple(_points(one, result.decode_ratio.get(one.spec.slug))),
    )


def _points(one: Candidate, decode: float | None) -> Iterator[Point]:
    for name in ("kl_mean", "kl_p99", "kl_max", "flip_rate", "perplexity", "perplexity_full"):
        yield Point(name=f"quality.{name}", value=getattr(one.quality, name))
    yield Point(name="memory.bytes_per_token", value=one.bytes_per_token)
    yield Point(name="accounting.average_bits", value=one.bits)
    if decode is not None:
        yield Point(name="throughput.decode_ratio", value=decode)


def _parent_points(result: Tuning) -> Iterator[Point]:
    """Yield what each recommended cache has, and each sensitivity by layer, which is the step of its curve."""
    for recommended in result.recommendations:
        one = result.candidate(recommended.slug)
        for point in _points(one, result.decode_ratio.get(one.spec.slug)):
            yield Point(name=f"{point.name}/{recommended.word}", value=point.value)
    for measured in result.sensitivities:
        rotated = "_rotated" if measured.rotated else ""
        yield Point(name=f"sensitivity.{measured.side}_{measured.bits}{rotated}", value=measured.kl_mean, step=measured.layer)
