"""O13: a run that was resumed after a crash had its curve twice."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tasks.config import NightlyConfig
from tasks.judge.gate import judge
from tasks.tracking.nights import find_cells, finish_night, log_night
from tasks.tracking.store import writer

# Dies without a word (no cleanup, as kill -9) at the N-th call of the method named M of MLflow's client.
CRASH = """
import os, sys
from pathlib import Path
from mlflow import MlflowClient
from tasks.run.night import Night
from tasks.tracking.nights import log_night
from tasks.tracking.store import writer

directory, night, method, calls = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
original, seen = getattr(MlflowClient, method), []

def dying(*args, **options):
    seen.append(method)
    if len(seen) > calls:
        os._exit(9)
    return original(*args, **options)

setattr(MlflowClient, method, dying)
with writer(Path(directory)) as store:
    log_night(store, Night.model_validate_json(Path(night).read_text()))
os._exit(0)
"""


@pytest.mark.parametrize(
    ("method", "calls"),
    [("log_batch", 2), ("log_text", 1), ("set_terminated", 0)],
    ids=["before the curves", "after the curves", "before the end"],
)
def test_a_curve_is_there_once_after_a_crash(tmp_path, make_result, make_night, method, calls):
    result = make_result()
    night = make_night(result)
    (tmp_path / "night.json").write_text(night.model_dump_json())
    command = [sys.executable, "-c", CRASH, tmp_path / "store", tmp_path / "night.json", method, str(calls)]
    died = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert died.returncode == 9, died.stderr
    with writer(tmp_path / "store") as store:
        parent = log_night(store, night)
        finish_night(store, parent, night, judge(night, NightlyConfig(specs=("full",))), "", {})
        (child,) = find_cells(store, parent)
        for name, curve in (("quality.logit_cosine", result.generation.logit_cosine), ("quality.kl_mean", [0.0027])):
            points = store.client.get_metric_history(child.info.run_id, name)
            assert [(point.step, point.value) for point in points] == list(enumerate(curve))
        runs = store.client.search_runs([store.experiment_id])
        assert sorted(run.info.status for run in runs) == ["FINISHED", "FINISHED"]
        assert store.client.get_run(parent).info.status == "FINISHED"
