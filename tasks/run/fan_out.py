"""Cells as runs of a deployment, so that the workers of many machines share a night. Prefect queues, starts and records them.

A job's runs are keyed by its content: who asks for the same job again, after the death of the one who asked first, finds the
run that is waiting or running already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, Worker, WorkerStatus
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed
from pydantic import JsonValue

from tasks.config import Config

DEPLOYMENT = "cell/cell"
POOL = "kivi-cells"
WORKER = "kivi.worker"  # the label by which a run says who runs it
ATTEMPTS = 3  # a job whose machine dies three times is taken for the cause
POLL_S = 2.0


class Job(Config):
    """One run of the deployment: the key of what it makes, what tells it from others, its name, and what it is given."""

    key: str
    identity: str
    label: str
    parameters: dict[str, JsonValue]


class _Given(NamedTuple):
    """A job on its way: its attempt, and the run that does it, None until the server has one."""

    job: Job
    attempt: int = 1
    run_id: UUID | None = None


def run_jobs(jobs: Sequence[Job], log: Callable[[str], None], queue: str | None = None) -> dict[str, str]:
    """Have workers do ``jobs``; return a sentence for each job that failed, by its key.

    A run that was lost with its worker is given to another, at most three times; one that a person cancelled or deleted is not
    given again. While the server is away this waits. What it refuses of one job fails that job alone.

    Args:
        jobs: What to do.
        log: Told of runs that are lost.
        queue: The work queue whose workers are to do it, e.g. of one chip class; the pool's default queue otherwise.
    """
    failed: dict[str, str] = {}
    if not jobs:
        return failed
    with get_client(sync_client=True) as client:
        if not any(_online(worker) for worker in client.read_workers_for_work_pool(POOL)):
            log(f"no worker of the pool {POOL} reports: {len(jobs)} jobs wait until one is started")
        waiting = {job.key: _Given(job) for job in jobs}
        while waiting:
            for key, given in list(waiting.items()):
                after = _step_or_refusal(client, given, queue, log)
                if isinstance(after, _Given):
                    waiting[key] = after
                    continue
                del waiting[key]
                if after:
                    failed[key] = after
            if waiting:
                time.sleep(POLL_S)
    return failed


def _step_or_refusal(client: SyncPrefectClient, given: _Given, queue: str | None, log: Callable[[str], None]) -> _Given | str:
    """Return what :func:`_step` does: the same job while the server is away, a sentence for what it refuses."""
    label = given.job.label
    try:
        return _step(client, given, queue, log)
    except ObjectNotFound as error:
        return f"{label}: {f'there is no {DEPLOYMENT}: {error}' if given.run_id is None else 'its run was deleted'}"
    except httpx.HTTPStatusError as error:
        if error.response.is_client_error:
            return f"{label}: the Prefect server refuses it: {' '.join(error.response.text.split())}"
        log(f"{label}: the Prefect server does not say how it is: {error}")
    except httpx.HTTPError as error:
        log(f"{label}: the Prefect server does not say how it is: {error}")
    return given


def _step(client: SyncPrefectClient, given: _Given, queue: str | None, log: Callable[[str], None]) -> _Given | str:
    """Return how a job goes on, or how it ended: nothing when it is done, else a sentence."""
    job = given.job
    if given.run_id is None:
        return given._replace(run_id=_submit(job, queue))
    run = client.read_flow_run(given.run_id)
    lost = _lost(client, run)
    if lost and run.state and not run.state.is_final():
        client.set_flow_run_state(given.run_id, Crashed(message=lost), force=True)
    ending = _ending(run, lost)
    if not ending:
        return given if ending is None else ""
    if run.state is not None and run.state.is_failed():
        return ending
    if run.state is not None and (run.state.is_cancelled() or run.state.is_cancelling()):
        return f"{job.label}: its run was cancelled"
    if given.attempt == ATTEMPTS:
        return f"{job.label}: given up after {ATTEMPTS} attempts: {ending}"
    log(f"{job.label}: {ending}; given to another worker")
    return given._replace(attempt=given.attempt + 1, run_id=None)


def _submit(job: Job, queue: str | None) -> UUID:
    """Return the id of the first run of ``job`` that has not ended, made when there is none."""
    number = 0
    while True:
        run: Any = run_deployment(  # a flow run here, a coroutine only where there is a loop
            DEPLOYMENT,
            parameters=job.parameters,
            flow_run_name=job.label,
            idempotency_key=f"{job.identity}-{number}",
            work_queue_name=queue,
            timeout=0,
        )
        if run.state is None or not run.state.is_final():
            run_id: UUID = run.id
            return run_id
        number += 1


def _ending(run: FlowRun, lost: str) -> str | None:
    """Return None for a run that goes on, nothing for one that completed, and what happened for any other."""
    if lost:
        return lost
    if run.state is None or not run.state.is_final():
        return None
    return "" if run.state.is_completed() else run.state.message or run.state.name


def _lost(client: SyncPrefectClient, run: FlowRun) -> str:
    """Return why a running run will not end by itself: its worker no longer reports. Nothing when all is well."""
    worker = run.labels.get(WORKER)
    if worker is None or run.state is None or not (run.state.is_running() or run.state.is_cancelling()):
        return ""
    workers = {known.name: known for known in client.read_workers_for_work_pool(POOL)}
    known = workers.get(str(worker))
    if known is not None and _online(known):
        return ""
    since = f" since {known.last_heartbeat_time:%Y-%m-%d %H:%M:%S} UTC" if known and known.last_heartbeat_time else ""
    return f"its worker {worker} has not reported{since}"


def _online(worker: Worker) -> bool:
    return worker.status == WorkerStatus.ONLINE
