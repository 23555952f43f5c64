"""O12: four processes that start on a new store all failed and left it broken for good."""

from __future__ import annotations

import subprocess
import sys

from tasks.tracking.store import writer

SCRIPT = """
import sys
from pathlib import Path
from tasks.tracking.store import writer

with writer(Path(sys.argv[1])) as store:
    store.client.create_run(store.experiment_id, run_name=sys.argv[2])
"""


def test_four_processes_start_on_a_new_store(tmp_path):
    command = [sys.executable, "-c", SCRIPT, tmp_path / "mlruns"]
    processes = [subprocess.Popen([*command, str(index)], stderr=subprocess.PIPE, text=True) for index in range(4)]
    failures = [(process.communicate(timeout=240)[1], process.returncode) for process in processes]
    assert [code for _, code in failures] == [0, 0, 0, 0], failures
    with writer(tmp_path / "mlruns") as store:
        assert {run.info.run_name for run in store.client.search_runs([store.experiment_id])} == {"0", "1", "2", "3"}
