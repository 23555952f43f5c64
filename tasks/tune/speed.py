"""Decode speed of the recommended caches beside the full one, timed in turns, kept like every other result."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from kivi.measure.monitor import Monitor
from kivi.measure.settings import ThroughputSettings
from kivi.measure.speed.throughput import measure_throughput
from kivi.spec import CacheSpec
from tasks.run.cells import Reporter, found_or_measured
from tasks.run.plan import circumstances, content_hash
from tasks.run.result_files import ResultStore, ThroughputResult
from tasks.tune.config import TuneConfig
from tasks.tune.subject import Subject

LABEL = "decode speed"
TIMED = ThroughputSettings(rounds=3, contexts=(256,), steps=16)


@task(name=LABEL, cache_policy=NO_CACHE)
def decode_ratios(
    subject: Subject, config: TuneConfig, specs: Sequence[CacheSpec], store: ResultStore
) -> dict[str, float | None]:
    """Return by slug how fast each cache decodes, as a share of the full cache's speed; None where it could not be timed."""
    key = content_hash(
        {
            "what": "decode speed",
            "model": [subject.identity.digest, subject.identity.dtype],
            "specs": [spec.model_dump(mode="json") for spec in specs],
            "timed": [subject.texts, TIMED.model_dump(mode="json")],
            **circumstances().model_dump(mode="json"),
        }
    )

    def measure() -> ThroughputResult:
        monitor = Monitor(Reporter(LABEL, key), config.deadline_s)
        arms = measure_throughput(subject.model, subject.texts, specs, TIMED, monitor=monitor, seed=0)
        return ThroughputResult(cell_key=key, arms=arms)

    timed, _ = found_or_measured(store, key, ThroughputResult, LABEL, measure)
    figures = {spec.slug: timed.arms[spec.slug] for spec in specs}
    return {slug: None if isinstance(arm, str) else arm.decode_ratio for slug, arm in figures.items()}
