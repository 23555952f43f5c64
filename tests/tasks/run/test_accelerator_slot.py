"""Prefect shows who has the accelerator, and is never waited for."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from tasks.run.accelerator_slot import LEASE_S, limit_name, shown_in_prefect


@pytest.fixture
def free_slot(prefect_server: None) -> None:
    """Make the limit anew: nights that other tests killed leave its slot taken until their lease ends."""
    with get_client(sync_client=True) as client:
        with suppress(ObjectNotFound):
            client.delete_global_concurrency_limit_by_name(limit_name())
        client.upsert_global_concurrency_limit_by_name(limit_name(), 1)


def taken() -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(limit_name()).active_slots


@task
def measure() -> tuple[int, list[str]]:
    heard: list[str] = []
    with shown_in_prefect(heard.append):
        slots = taken()
    return slots, heard


@flow
def night() -> tuple[int, list[str]]:
    return measure()


def test_the_slot_is_held_while_a_task_measures_and_free_afterwards(free_slot: None) -> None:
    assert night() == (1, [])
    assert taken() == 0


def test_a_slot_that_a_dead_process_has_left_taken_stops_nobody(free_slot: None) -> None:
    with get_client(sync_client=True) as client:
        lease = client.increment_concurrency_slots_with_lease([limit_name()], 1, "concurrency", LEASE_S).json()["lease_id"]
        started = time.monotonic()
        slots, heard = night()
        assert time.monotonic() - started < LEASE_S / 2
        client.release_concurrency_slots_with_lease(lease)
    assert slots == 1
    (said,) = heard
    assert said.startswith("Prefect does not show who has the accelerator: ") and "timed out after 5.0 second" in said


def test_outside_of_a_task_run_nobody_is_asked() -> None:
    heard: list[str] = []
    with shown_in_prefect(heard.append):
        pass
    assert not heard
