"""Runs of a tracking store, all pages of them, newest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlflow.entities import Run, ViewType

from tasks.tracking.store import TrackingStore

BASELINE, PIN = (
    "kivi.baseline",
    "kivi.pin",
)  # marks of the nights that later ones are compared with; see tasks.tracking.baseline
GOOD = "good "  # how the mark of a night that passed its gate begins; one that a person set begins otherwise


def all_runs(
    store: TrackingStore,
    filter_string: str,
    *,
    most: int = 0,
    superseded: bool = False,
    experiments: Sequence[str] = (),
    where: Callable[[Run], bool] | None = None,
) -> list[Run]:
    """Return the runs that match, newest first.

    Args:
        store: The store.
        filter_string: In MLflow's language.
        most: The most runs to return; 0 for all.
        superseded: Return superseded ones, too.
        experiments: Ids of experiments to look in instead of the store's own.
        where: What the runs must be besides, which MLflow's language cannot say.
    """
    runs: list[Run] = []
    token = None
    while True:
        page = store.client.search_runs(
            list(experiments) or [store.experiment_id],
            filter_string=filter_string,
            run_view_type=ViewType.ACTIVE_ONLY,
            order_by=["attributes.start_time DESC"],
            page_token=token,
            **({"max_results": 2 * most} if most else {}),
        )
        standing = (run for run in page if superseded or "kivi.superseded" not in run.data.tags)
        runs.extend(run for run in standing if where is None or where(run))
        token = page.token
        if not token or (most and len(runs) >= most):
            return runs[:most] if most else runs


def search(store: TrackingStore, tags: Mapping[str, str], extra: str = "") -> list[Run]:
    """Return the runs with all of ``tags`` that were not superseded, newest first; ``extra`` is in MLflow's filter language."""
    clauses = [f"tags.`{name}` = '{value}'" for name, value in tags.items()]
    return all_runs(store, " AND ".join([*clauses, *([extra] if extra else [])]))
