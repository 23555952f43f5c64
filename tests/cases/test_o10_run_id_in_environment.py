"""O10: MLFLOW_RUN_ID in the environment made a child be its parent."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
from pathlib import Path
from mlflow.entities import RunStatus
from kivi.spec import CacheSpec
from tasks.config import ModelConfig
from kivi.measure.settings import MeasureSettings
from tasks.run.night import Night, Outcome
from tasks.run.plan import Cell
from tasks.tracking.nights import find_cells, log_night
from tasks.tracking.store import writer

cell = Cell(key="k", label="l", model=ModelConfig(), prompt_set="p", prompt_sha256="s", spec=CacheSpec(kind="full"),
            settings=MeasureSettings())
with writer(Path(sys.argv[1])) as store:
    parent = log_night(store, Night(name="n", scheduled="d", outcomes=(Outcome(cell=cell, error="none"),)))
    (child,) = find_cells(store, parent)
    print(parent, child.info.run_id)
"""


def test_environment_names_no_run_of_ours(tmp_path):
    environment = {
        **os.environ,
        "MLFLOW_RUN_ID": "0" * 32,
        "MLFLOW_EXPERIMENT_ID": "99",
        "MLFLOW_EXPERIMENT_NAME": "elsewhere",
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
        "MLFLOW_REGISTRY_URI": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    parent, child = done.stdout.split()
    assert len({parent, child, "0" * 32}) == 3
