"""The store's database brought to the schema of the installed MLflow: backup first, then a copy, then one rename.

MLflow's migrations are not transactions on sqlite, so they run on a copy: whatever interrupts them, the store is as before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tasks.config import Config
from tasks.paths import DATABASE
from tasks.tracking.backup import copy_database, copy_store, require_store
from tasks.tracking.schema import age, mlflow_version, require_not_newer, stored_revision
from tasks.tracking.store import TrackingError, hold


class Upgraded(Config):
    """What an upgrade did."""

    before: str
    after: str
    mlflow: str
    backup: Path | None = None

    @property
    def sentence(self) -> str:
        if self.backup is None:
            return f"schema {self.after} is that of MLflow {self.mlflow}: nothing to do"
        return f"schema {self.before} became {self.after}, of MLflow {self.mlflow}; the store of before is in {self.backup}"


def upgrade(tracking_dir: Path) -> Upgraded:
    """Bring the database to the installed MLflow's schema; one that is there already stays untouched.

    Raises:
        TrackingError: there is no store, it is in use, it is newer than the installed MLflow, or the migration failed;
            in each case the store is as it was.
    """
    require_store(tracking_dir)
    database = tracking_dir / DATABASE
    with hold(tracking_dir):
        before = stored_revision(database)
        if require_not_newer(database) == "current":
            return Upgraded(before=before, after=before, mlflow=mlflow_version())
        _require_unused(database)
        backup = copy_store(tracking_dir)
        working = tracking_dir / f"{DATABASE}.upgrading"
        working.unlink(missing_ok=True)
        try:
            copy_database(database, working)
            _migrate(working)
            _require_unused(database)
            working.replace(database)
        finally:
            working.unlink(missing_ok=True)
    return Upgraded(before=before, after=stored_revision(database), mlflow=mlflow_version(), backup=backup.folder)


def _migrate(database: Path) -> None:
    """Run MLflow's own command on a database, in a process of its own, and look whether it came to its end."""
    command = [sys.executable, "-m", "mlflow", "db", "upgrade", f"sqlite:///{database.resolve()}"]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603  ours
    if done.returncode or age(database) != "current":
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise TrackingError(f"{database}: `mlflow db upgrade` failed, the store is as before: {last}")


def _require_unused(database: Path) -> None:
    """Refuse while another process has the database open: what it writes would go to the file that is replaced."""
    path = str(database.resolve())
    for process in psutil.process_iter(["pid", "name"]):
        try:
            opened = process.pid != os.getpid() and any(file.path == path for file in process.open_files())
        except psutil.Error:  # another user's, or gone: cannot be looked into
            continue
        if opened:
            raise TrackingError(
                f"{database}: process {process.pid} ({process.info['name']}) has it open: stop MLflow's server, then upgrade"
            )
