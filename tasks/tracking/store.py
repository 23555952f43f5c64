"""The MLflow store of a tracking folder: made once, opened by explicit addresses, written by one process at a time.

``<tracking_dir>/mlflow.db`` holds runs, ``<tracking_dir>/artifacts`` their files. MLflow's environment variables
(MLFLOW_RUN_ID, MLFLOW_TRACKING_URI and the like) have no say: only its client is used, with explicit ids, never the
functions that act on "the active run". The one exception is ``KIVI_TRACKING_URI``, which is this project's own: the address
of an MLflow server that a team's machines share. Runs go there then, and the tracking folder keeps results and reports.
"""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse, urlsplit

from filelock import FileLock, Timeout
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy.exc import SQLAlchemyError

from tasks.paths import ARTIFACTS, DATABASE, LOCK
from tasks.sanitize import redact
from tasks.tracking.schema import TrackingError as TrackingError  # for whoever opens a store
from tasks.tracking.schema import connect, require_current

EXPERIMENT = "kivi-nightly"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # else MLflow shows its pages for traces first
TRACKING_URI = "KIVI_TRACKING_URI"
SCHEMES = ("http", "https")  # of a server's address
JOURNALS = ("-journal", "-wal", "-shm")  # what sqlite appends to a database's name for the files beside it
LOCK_TIMEOUT_S = 600  # a writer logs for seconds; one that holds the lock for longer is stuck


@dataclass(frozen=True)
class TrackingStore:
    """An open store: MLflow's client and the experiment that runs go to.

    On a server several machines write; ``writer`` then names the one folder of one machine whose lock this process holds.
    """

    directory: Path
    client: MlflowClient
    experiment_id: str
    writer: str = ""


def database_uri(tracking_dir: Path) -> str:
    """Return the address of the store's database.

    Raises:
        TrackingError: see :func:`require_address`.
    """
    require_address(tracking_dir)
    return f"sqlite:///{tracking_dir.resolve() / DATABASE}"


def require_address(tracking_dir: Path) -> None:
    """Refuse a folder whose path means another in the address of a database.

    Raises:
        TrackingError: the path has a ``?`` or a ``%``, which MLflow and SQLAlchemy take for a query and for an escape.
    """
    path = str(tracking_dir.resolve())
    if "?" in path or "%" in path:
        raise TrackingError(f"{path}: a database's address cannot hold '?' or '%'; choose another --tracking-dir")


def require_usable(tracking_dir: Path) -> None:
    """Refuse before anything is measured a store that could not be logged to; a server is not asked yet.

    Raises:
        TrackingError: the address of the server is none, the folder cannot hold a database, or its database is older or
            newer than the installed MLflow.
    """
    if server := os.environ.get(TRACKING_URI):
        _require_server_address(server)
        return
    require_address(tracking_dir)
    if (tracking_dir / DATABASE).exists():
        require_current(tracking_dir / DATABASE)


def _require_server_address(server: str) -> None:
    if urlsplit(server).scheme not in SCHEMES:
        raise TrackingError(f"{TRACKING_URI}={redact(server)}: expected an address such as http://lab:5050")


@contextmanager
def writer(tracking_dir: Path, experiment: str = EXPERIMENT) -> Iterator[TrackingStore]:
    """Open the store of ``tracking_dir``, making it when it is new, as its only writer; runs go to ``experiment``.

    The lock is the kernel's, so it ends with the process that holds it: whoever gets it knows that a run which is still
    RUNNING was left behind.

    Raises:
        TrackingError: the folder cannot be written, another process keeps the lock, the database is older or newer than
            the installed MLflow, the journal of one that was moved away is in its place, artefacts stayed behind when the
            folder was moved, or the server does not answer.
    """
    server = os.environ.get(TRACKING_URI)
    with hold(tracking_dir):
        if server:
            _require_server_address(server)
            yield _open_server(tracking_dir, server, experiment)
            return
        _create_database(tracking_dir)
        require_current(tracking_dir / DATABASE)
        _follow_move(tracking_dir)
        yield _open(tracking_dir, experiment)


@contextmanager
def hold(tracking_dir: Path) -> Iterator[None]:
    """Be the only process that changes the store of ``tracking_dir``, which is made when it is new.

    Raises:
        TrackingError: the folder cannot be written, or another process keeps the lock.
    """
    require_address(tracking_dir)
    lock = FileLock(tracking_dir / LOCK, timeout=LOCK_TIMEOUT_S, thread_local=False)
    try:
        tracking_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise TrackingError(
            f"{tracking_dir}: another process has been logging for {LOCK_TIMEOUT_S} s; "
            f"end it and run again, finished cells are kept"
        ) from None
    except OSError as error:
        raise TrackingError(f"{tracking_dir}: {error.strerror}; choose another --tracking-dir") from None
    try:
        yield
    finally:
        lock.release()


def require_no_journal(tracking_dir: Path) -> None:
    """Refuse to put a database beside the journal of another: sqlite would write the other's pages into it.

    Raises:
        TrackingError: the journal of a database that was moved away is still there.
    """
    for suffix in JOURNALS:
        journal = tracking_dir / f"{DATABASE}{suffix}"
        if journal.exists():
            raise TrackingError(
                f"{journal}: belongs to a database that is not here any more: move it to where {DATABASE} went, "
                f"with the same name before {suffix}"
            )


def _create_database(tracking_dir: Path) -> None:
    """Make the database under another name first: a process that dies half way leaves no broken store."""
    if (tracking_dir / DATABASE).exists():
        return
    require_no_journal(tracking_dir)
    partial = tracking_dir / f"{DATABASE}.partial"
    partial.unlink(missing_ok=True)
    uri, artifacts = f"sqlite:///{partial.resolve()}", str(tracking_dir.resolve() / ARTIFACTS)
    store = SqlAlchemyStore(uri, artifacts)  # type: ignore[no-untyped-call]
    store.engine.dispose()
    partial.replace(tracking_dir / DATABASE)


def require_artifacts(database: Path, artifacts: Path) -> None:
    """Refuse a store that was moved without its artefacts, or whose later ones were still written to where it was.

    Args:
        database: The store's database, or a copy of it.
        artifacts: The store's folder of artefacts.

    Raises:
        TrackingError: runs have artefacts where the store was, and not here.
        sqlite3.Error: the database is locked, or not MLflow's.
    """
    with closing(connect(database)) as connection:
        for experiment, old, new in _moved_experiments(connection, artifacts):
            uris = "SELECT artifact_uri FROM runs WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?"
            for (uri,) in connection.execute(uris, (experiment, len(old), old)):
                if _stayed_behind(_local_folder(uri), _local_folder(new + uri[len(old) :])):
                    raise TrackingError(
                        f"{_local_folder(old)}: artefacts of this store are still there, and it was moved: "
                        f"move what is in it to {_local_folder(new)}, then run again"
                    )


def relocate(database: Path, artifacts: Path) -> None:
    """Let runs find their artefacts where the store is now; the experiment's own location says where it was.

    An experiment whose artefacts a person sent elsewhere keeps its location.

    Raises:
        sqlite3.Error: the database is locked, cannot be written, or is not MLflow's; it is as it was.
    """
    with closing(connect(database)) as connection, connection:
        for experiment, old, new in _moved_experiments(connection, artifacts):
            connection.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (new, experiment))
            connection.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) "
                "WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
                (new, len(old) + 1, experiment, len(old), old),
            )


def _moved_experiments(connection: sqlite3.Connection, artifacts: Path) -> list[tuple[int, str, str]]:
    """Return id, location and new location of the experiments whose artefacts belong to a store in another folder."""
    moved = []
    experiments = "SELECT experiment_id, artifact_location FROM experiments WHERE artifact_location IS NOT NULL"
    for experiment, location in connection.execute(experiments):
        # MLflow's default experiment has a folder named by its number inside the root; ours has the root itself.
        root = location.removesuffix(f"/{experiment}")
        folder = _local_folder(root)
        if folder is not None and folder.name == ARTIFACTS and folder.resolve() != artifacts:
            moved.append((experiment, location, artifacts.as_uri() + location[len(root) :]))
    return moved


def _stayed_behind(before: Path | None, now: Path | None) -> bool:
    """Return whether artefacts are where a store was and not where it is."""
    if before is None or now is None:
        return False
    try:
        return before.is_dir() and not now.exists()
    except PermissionError:  # where another user, who does not show it, had the store
        return False


def _local_folder(location: str) -> Path | None:
    """Return the folder of a location of artefacts, or nothing when it is on no disk."""
    if location.startswith("file:"):
        return Path(unquote(urlparse(location).path))
    return Path(location) if location.startswith("/") else None


def _follow_move(tracking_dir: Path) -> None:
    """Tell a database that was moved with its folder where it is, else artefacts would go on being written to the old place."""
    database, artifacts = tracking_dir / DATABASE, tracking_dir.resolve() / ARTIFACTS
    try:
        require_artifacts(database, artifacts)
        relocate(database, artifacts)
    except sqlite3.Error as error:
        raise TrackingError(f"{database}: MLflow cannot open it: {error}") from None


def _open(tracking_dir: Path, name: str) -> TrackingStore:
    uri = database_uri(tracking_dir)
    try:
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment_id = _experiment(client, name, (tracking_dir.resolve() / ARTIFACTS).as_uri())
    except (MlflowException, SQLAlchemyError) as error:
        reason = getattr(error, "message", None) or getattr(error, "orig", None) or error
        raise TrackingError(f"{tracking_dir / DATABASE}: MLflow cannot open it: {reason}") from None
    return TrackingStore(tracking_dir, client, experiment_id)


def _open_server(tracking_dir: Path, uri: str, name: str) -> TrackingStore:
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    try:
        experiment_id = _experiment(client, name)
    except MlflowException as error:
        raise TrackingError(f"the MLflow server does not take this night: {redact(error.message)}") from None
    return TrackingStore(tracking_dir, client, experiment_id, writer=f"{platform.node()}:{tracking_dir.resolve()}")


def _experiment(client: MlflowClient, name: str, artifacts: str | None = None) -> str:
    """Return the id of an experiment, which is made or taken back from the deleted ones, by this or another machine."""
    experiment = client.get_experiment_by_name(name)
    try:
        if experiment is None:
            return str(client.create_experiment(name, artifact_location=artifacts, tags=EXPERIMENT_TAGS))
        if experiment.lifecycle_stage != "active":
            client.restore_experiment(experiment.experiment_id)
    except MlflowException:
        experiment = client.get_experiment_by_name(name)
        if experiment is None or experiment.lifecycle_stage != "active":
            raise
    return str(experiment.experiment_id)
