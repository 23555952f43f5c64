"""A prompt set without a source, and a store that a test finds empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.prompts import PromptSet, digest
from tasks.tracking_store import TrackingStore, writer


@pytest.fixture(scope="session")
def story() -> PromptSet:
    """A prompt set of plain sentences, 4,000 bytes in all."""
    rows: tuple[dict[str, Any], ...] = tuple({"text": f"Sentence {n} says that {n * n} is a square. " * 2} for n in range(50))
    return PromptSet(name="story", rows=rows, source="story", revision=None, split="train", sha256=digest(rows), note="")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that is made once: its schema takes seconds."""
    directory = tmp_path_factory.mktemp("store")
    with writer(directory):
        pass
    return directory


@pytest.fixture
def store(empty_store: Path) -> Iterator[TrackingStore]:
    """The store, emptied."""
    with writer(empty_store) as store:
        for run in store.client.search_runs([store.experiment_id]):
            store.client.delete_run(run.info.run_id)
        yield store
