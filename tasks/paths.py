"""Where things are: what a tracking folder holds, and the addresses of MLflow's pages as ``kivi ui`` serves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import quote

DATABASE = "mlflow.db"  # MLflow's runs
ARTIFACTS = "artifacts"  # their files
RESULTS = "results"  # a JSON file for each finished result
REPORTS = "reports"  # a page and its Markdown for each night
PENDING = "unlogged"  # nights that are measured and not in MLflow yet
BACKUPS = "backups"  # of the database and the artefacts
LOCK = "writer.lock"  # held by the process that writes to MLflow

UI_PORT = 5050  # not MLflow's own 5000, which macOS gives to AirPlay
UI_ADDRESS = f"http://127.0.0.1:{UI_PORT}"


def experiment_path(experiment_id: str) -> str:
    """Return the address, after the server's, of the list of nights."""
    return f"#/experiments/{experiment_id}/runs"


def run_path(experiment_id: str, run_id: str) -> str:
    """Return the address of one run's page."""
    return f"#/experiments/{experiment_id}/runs/{run_id}"


def compare_path(experiment_id: str, run_ids: Sequence[str]) -> str:
    """Return the address of the page that lays runs side by side."""
    return f"#/compare-runs?runs={quote(json.dumps(list(run_ids)))}&experiments={quote(json.dumps([experiment_id]))}"
