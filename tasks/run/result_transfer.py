"""Results that are measured on one machine and wanted on another: files of the night's run on the team's MLflow server.

With a store of one machine (no ``KIVI_TRACKING_URI``) workers share the folder of results, and there is nothing to send.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.tasks import exponential_backoff

from tasks.run.result_files import ResultStore
from tasks.tracking.store import TRACKING_URI, TrackingStore, writer

FOLDER = "results"


def between_machines() -> bool:
    """Return whether results are exchanged through a server."""
    return bool(os.environ.get(TRACKING_URI))


@task(
    name="send results",
    cache_policy=NO_CACHE,
    retries=6,
    retry_delay_seconds=exponential_backoff(backoff_factor=5),
)
def send(tracking_dir: Path, run_id: str, store: ResultStore, keys: list[str]) -> None:
    """Put results beside the night's run; a server that is away is tried again for some minutes.

    Raises:
        TrackingError: the server does not answer.
    """
    if not between_machines():
        return
    with writer(tracking_dir) as tracking:
        for key in keys:
            tracking.client.log_artifact(run_id, str(store.path(key)), FOLDER)


def fetch(tracking: TrackingStore, run_id: str, store: ResultStore, keys: list[str]) -> None:
    """Take the results that are beside the night's run into ``store``; what is not there is left out."""
    there = {Path(file.path).name for file in tracking.client.list_artifacts(run_id, FOLDER)}
    with tempfile.TemporaryDirectory(dir=store.folder, prefix=".fetched-") as draft:
        for key in keys:
            path = store.path(key)
            if path.name in there:
                fetched = tracking.client.download_artifacts(run_id, f"{FOLDER}/{path.name}", draft)
                Path(fetched).replace(path)
