"""A prompt set without a source, and a store that a test finds empty."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks.config import NightlyConfig
from tasks.judge.gate import judge
from tasks.prompts.prompt_sets import PromptSet, digest
from tasks.tracking.backup import back_up, restore
from tasks.tracking.baseline import mark_good
from tasks.tracking.nights import finish_night, log_night
from tasks.tracking.store import TrackingStore, writer

sys.path.insert(0, str(Path(__file__).parent))
from store_contents import FIRST

CONFIG = NightlyConfig(specs=("full",))


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


@pytest.fixture(scope="session")
def made_store(tmp_path_factory):
    """An empty store that no test writes into, made once."""
    directory = tmp_path_factory.mktemp("made")
    with writer(directory):
        pass
    return directory


@pytest.fixture
def tracking(made_store, tmp_path):
    """An empty store in a folder of its own; the copy's experiment is told where it is."""
    restore(back_up(made_store, tmp_path / "empty").folder, tmp_path / "mlruns")
    return tmp_path / "mlruns"


@pytest.fixture
def log(make_result, make_night):
    """Log the good night of a day since the first of January."""

    def log(store, day):
        result = make_result(key=f"{day:032x}")
        quality = result.quality.model_copy(update={"sequence_kl": [0.002] * 16, "sequence_flips": [0.02] * 16})
        made = result.provenance.model_copy(update={"started": FIRST + timedelta(days=day)})
        night = make_night(result.model_copy(update={"quality": quality, "provenance": made}), scheduled=f"day {day}")
        parent = log_night(store, night)
        finish_night(store, parent, night, judge(night, CONFIG), "", {"report.html": "<p>report</p>"})
        mark_good(store, parent)
        # A real parent begins with its night; this one began now.
        with closing(sqlite3.connect(store.directory / "mlflow.db")) as database, database:
            started = int(made.started.timestamp() * 1000)
            database.execute("UPDATE runs SET start_time = ? WHERE run_uuid = ?", (started, parent))
        return night

    return log
