"""O8: Prefect's temporary server timed out on a cold home folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS

import tasks
from tasks.paths import RESULTS


def test_the_start_of_the_server_has_two_minutes():
    assert tasks.ENVIRONMENT["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] == "120"
    assert PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value() >= 20


def test_the_command_runs_with_a_cold_prefect_home(smoke_night, smoke_config, tmp_path):
    # Results only: other tests look at the night's own store, and a second run would write its name there.
    tracking_dir = tmp_path / "mlruns"
    shutil.copytree(smoke_night[0] / RESULTS, tracking_dir / RESULTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    home = tmp_path / "prefect"
    home.mkdir()
    (home / "prefect.db").write_text("of another version")  # the temporary server has a home of its own
    environment["PREFECT_HOME"] = str(home)
    environment["KIVI_CACHE_DIR"] = str(tmp_path / "cache")  # with no database made earlier
    command = [sys.executable, "-c", "from flows.__main__ import main; main()", "nightly", "--json"]
    command += ["--config", smoke_config, "--tracking-dir", tracking_dir]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)  # nothing but the result is on stdout
    assert printed["passed"] is True
    assert [cell["reused"] for cell in printed["cells"]] == [True, True]
    assert "Traceback" not in done.stderr
    assert "prefect" not in done.stderr.lower()
    assert (home / "prefect.db").read_text() == "of another version"
