"""Which MLflow a store's database belongs to: its schema revision beside those that the installed MLflow knows.

It is looked at before MLflow opens a database, because MLflow migrates an older one unasked and without a backup, by
statements that sqlite does not roll back, as soon as a table is missing in it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

from alembic.script import ScriptDirectory
from mlflow.store.db.utils import _get_alembic_config

Age = Literal["older", "current", "newer"]


class TrackingError(RuntimeError):
    """A tracking folder or server that cannot be used; one sentence says why and what to do."""


def connect(database: Path) -> sqlite3.Connection:
    """Open a database that is there, to read it; it is never made.

    What a process that died in a commit has left half done is undone by whoever opens the database next, and for that it must
    be writable to him. A file that cannot be written is opened for reading: sqlite does so by itself.

    Raises:
        sqlite3.Error: there is no such file, or it cannot be opened.
    """
    return sqlite3.connect(f"{database.resolve().as_uri()}?mode=rw", uri=True)


def stored_revision(database: Path) -> str:
    """Return the schema revision that a database says it has; nothing is changed in it.

    Raises:
        TrackingError: the file is not a database of MLflow.
    """
    try:
        with closing(connect(database)) as connection:
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    except sqlite3.Error as error:
        raise TrackingError(
            f"{database}: MLflow cannot open it: {error}: restore a backup, or move it away and a new one is made"
        ) from None
    if len(rows) != 1:
        raise TrackingError(f"{database}: {len(rows)} schema revisions instead of one: restore a backup")
    return str(rows[0][0])


@functools.cache
def known_revisions() -> tuple[str, ...]:
    """Return the revisions that the installed MLflow can migrate from, newest first."""
    scripts = ScriptDirectory.from_config(_get_alembic_config(""))  # type: ignore[no-untyped-call]
    return tuple(script.revision for script in scripts.walk_revisions())


def age(database: Path) -> Age:
    """Return how a database compares with the installed MLflow; one whose revision it does not know is newer.

    Raises:
        TrackingError: the file is not a database of MLflow.
    """
    known = known_revisions()
    revision = stored_revision(database)
    if revision not in known:
        return "newer"
    return "current" if revision == known[0] else "older"


def require_not_newer(database: Path) -> Age:
    """Return how old a database is.

    Raises:
        TrackingError: it is newer than the installed MLflow, or not a database of MLflow.
    """
    found = age(database)
    if found == "newer":
        raise TrackingError(
            f"{database}: its schema {stored_revision(database)} is unknown to MLflow {mlflow_version()}, a newer MLflow made "
            "it: install that one, or restore a backup from before"
        )
    return found


def require_current(database: Path) -> None:
    """Refuse what MLflow should not open as it is.

    Raises:
        TrackingError: the database is older or newer than the installed MLflow, or not MLflow's.
    """
    if require_not_newer(database) == "older":
        raise TrackingError(
            f"{database}: its schema {stored_revision(database)} is older than MLflow {mlflow_version()}: run "
            "`kivi store upgrade`, which makes a backup first"
        )


def mlflow_version() -> str:
    return importlib.metadata.version("mlflow")
