"""Backups of a tracking folder: the database as of one moment, and the artefacts that it speaks of."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from tasks.config import Config, first_sentence
from tasks.paths import ARTIFACTS, BACKUPS, DATABASE
from tasks.tracking.schema import TrackingError, connect, mlflow_version, stored_revision
from tasks.tracking.store import hold, relocate, require_artifacts, require_no_journal

MANIFEST = "backup.json"


class Backup(Config):
    """What a backup holds; written beside it as ``backup.json``."""

    folder: Path
    made: datetime
    mlflow: str
    schema_revision: str
    runs: int
    files: int
    bytes: int


def back_up(tracking_dir: Path, folder: Path | None = None) -> Backup:
    """Copy database and artefacts of ``tracking_dir`` into a new folder, which is there whole or not at all.

    The store is held meanwhile, so no night is logged half; what an MLflow server writes in between is in the database's
    copy or not, never half (sqlite's backup API).

    Args:
        tracking_dir: The tracking folder.
        folder: Where the backup goes, ``backups/TIME`` in the tracking folder by default.

    Raises:
        TrackingError: there is no store, its artefacts stayed behind when it was moved, or the folder is there already, is
            among the artefacts, or cannot be written.
    """
    require_store(tracking_dir)
    with hold(tracking_dir):
        return copy_store(tracking_dir, folder)


def copy_store(tracking_dir: Path, folder: Path | None = None) -> Backup:
    """Do what :func:`back_up` says; the caller holds the store."""
    made = datetime.now(UTC)
    folder = folder or tracking_dir / BACKUPS / made.strftime("%Y-%m-%dT%H%M%S.%fZ")
    if folder.exists():
        raise TrackingError(f"{folder}: is there already; a backup goes into a new folder")
    if folder.resolve().is_relative_to((tracking_dir / ARTIFACTS).resolve()):
        raise TrackingError(f"{folder}: is among the artefacts, so it would have to hold itself; choose a folder elsewhere")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _beside(folder) as partial:
            partial.mkdir()
            copy_database(tracking_dir / DATABASE, partial / DATABASE)
            require_artifacts(partial / DATABASE, tracking_dir.resolve() / ARTIFACTS)
            if (tracking_dir / ARTIFACTS).is_dir():
                shutil.copytree(tracking_dir / ARTIFACTS, partial / ARTIFACTS)
            backup = _describe(folder, partial, made)
            (partial / MANIFEST).write_text(backup.model_dump_json(indent=1) + "\n")
            partial.rename(folder)
    except sqlite3.Error as error:
        raise TrackingError(f"{tracking_dir / DATABASE}: is no store of MLflow: {error}: restore a backup") from None
    except OSError as error:
        raise TrackingError(f"{folder}: the backup cannot be written: {error.strerror or error}") from None
    return backup


def restore(folder: Path, tracking_dir: Path) -> Backup:
    """Put a backup where no store is, or where one was moved away from; the store is there whole or not at all.

    Runs name their artefacts' folder by its whole path: in the restored database it is the new one.

    Raises:
        TrackingError: the folder is no backup, ``tracking_dir`` holds a store or the journal of one, or cannot be written.
    """
    backup = _described(folder)
    with hold(tracking_dir):
        for name in (DATABASE, ARTIFACTS):
            if (tracking_dir / name).exists():
                raise TrackingError(f"{tracking_dir / name}: is there; move it away first, a restore replaces nothing")
        require_no_journal(tracking_dir)
        try:
            with _beside(tracking_dir / DATABASE) as database:
                copy_database(folder / DATABASE, database)
                relocate(database, tracking_dir.resolve() / ARTIFACTS)
                if (folder / ARTIFACTS).is_dir():
                    shutil.copytree(folder / ARTIFACTS, database.with_name(ARTIFACTS))
                _put_in_place(database.parent, tracking_dir)
        except sqlite3.Error as error:
            raise TrackingError(f"{folder / DATABASE}: is no store of MLflow: {error}: restore another backup") from None
        except OSError as error:
            raise TrackingError(f"{tracking_dir}: the backup cannot be restored: {error.strerror or error}") from None
    return backup.model_copy(update={"folder": folder})


def require_store(tracking_dir: Path) -> None:
    """Refuse a folder without a store.

    Raises:
        TrackingError: ``tracking_dir`` has no database, or not one of MLflow.
    """
    if not (tracking_dir / DATABASE).is_file():
        raise TrackingError(f"{tracking_dir}: no {DATABASE} in it: give a store's --tracking-dir; `kivi nightly` makes one")
    stored_revision(tracking_dir / DATABASE)


def copy_database(source: Path, target: Path) -> None:
    """Copy a database as of one moment, whoever writes to it, and check the copy.

    Raises:
        TrackingError: the database is damaged, or the copy cannot be written.
    """
    try:
        # The target is opened in autocommit mode with sqlite's rollback journal, so closing it leaves one file.
        with (
            closing(connect(source)) as original,
            closing(sqlite3.connect(target)) as copy,
        ):
            original.backup(copy)
            found = copy.execute("PRAGMA integrity_check").fetchone()[0]
    except sqlite3.Error as error:
        raise TrackingError(f"{source}: cannot be copied to {target}: {error}") from None
    if found != "ok":
        raise TrackingError(f"{source}: is damaged: {found}: restore a backup")


def _described(folder: Path) -> Backup:
    """Return what a backup says of itself, after a look whether its database is there."""
    manifest = folder / MANIFEST
    for name in (MANIFEST, DATABASE):
        if not (folder / name).is_file():
            raise TrackingError(f"{folder}: no {name} in it, so it is no backup, or not a whole one")
    try:
        return Backup.model_validate_json(manifest.read_bytes())
    except ValidationError as error:
        raise TrackingError(f"{manifest}: describes no backup: {first_sentence(error)}: restore another one") from None


def _put_in_place(parts: Path, tracking_dir: Path) -> None:
    """Rename artefacts and then the database into ``tracking_dir``; when one cannot be, the other goes back."""
    with ExitStack() as undo:
        for name in (ARTIFACTS, DATABASE):
            if (parts / name).exists():
                (parts / name).rename(tracking_dir / name)
                undo.callback((tracking_dir / name).rename, parts / name)
        undo.pop_all()


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Give the same name in a new folder beside ``path``, to be filled and renamed to it; the folder goes in any case."""
    folder = TemporaryDirectory(prefix=f"{path.name}.", suffix=".partial", dir=path.parent, ignore_cleanup_errors=True)
    with folder as name:
        yield Path(name) / path.name


def _describe(folder: Path, partial: Path, made: datetime) -> Backup:
    with closing(sqlite3.connect(partial / DATABASE)) as connection:
        runs = connection.execute("SELECT count(*) FROM runs").fetchone()[0]
    files = [path for path in partial.rglob("*") if path.is_file()]
    return Backup(
        folder=folder,
        made=made,
        mlflow=mlflow_version(),
        schema_revision=stored_revision(partial / DATABASE),
        runs=runs,
        files=len(files),
        bytes=sum(path.stat().st_size for path in files),
    )
