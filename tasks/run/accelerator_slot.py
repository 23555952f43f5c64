"""Prefect's view of the accelerator: a concurrency limit named for the host, of which a measurement holds the one slot.

It shows on Prefect's page that the accelerator is taken, and decides nothing: the lock of :mod:`tasks.run.accelerator` does. A
slot outlives a crashed holder by up to a minute, and a server that is restarted may forget whose it was, so nobody waits
for it.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import httpx
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL

LEASE_S = 60.0  # the shortest that Prefect's server takes
TIMEOUT_S = 5.0
NOT_SHOWN = (TimeoutError, httpx.HTTPError, ConcurrencySlotAcquisitionError, PrefectException, RuntimeError)


def limit_name() -> str:
    """Return the name of this host's limit."""
    return f"accelerator-{platform.node()}"


@functools.cache
def _make_limit(api: str) -> None:  # noqa: ARG001  once a server
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(limit_name(), 1)


@contextmanager
def shown_in_prefect(log: Callable[[str], None]) -> Iterator[None]:
    """Hold the slot while the block runs, within a task run on a Prefect server; elsewhere do nothing.

    Args:
        log: Told when Prefect cannot show it; the block runs all the same.
    """
    api = PREFECT_API_URL.value()
    if TaskRunContext.get() is None or not api:
        yield
        return
    slot = ExitStack()
    try:
        _make_limit(api)
        slot.enter_context(
            concurrency(limit_name(), timeout_seconds=TIMEOUT_S, lease_duration=LEASE_S, raise_on_lease_renewal_failure=False)
        )
    except NOT_SHOWN as error:
        log(f"Prefect does not show who has the accelerator: {type(error).__name__} {error}".rstrip())
    try:
        yield
    finally:
        try:
            slot.close()
        except NOT_SHOWN as error:
            log(f"Prefect shows the accelerator as taken for another {LEASE_S:.0f} s: {type(error).__name__} {error}".rstrip())
