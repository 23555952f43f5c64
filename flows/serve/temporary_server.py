"""The Prefect server that a command's flows report to: the one that is set, or a temporary one of the command's own.

Prefect would start a temporary one itself, in the command's process group, where Ctrl-C ends it first, on the database in the
user's home, which may be of another version.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import prefect
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, temporary_settings

from flows.serve.guard import guarded
from kivi.models.embedded import cache_dir
from tasks.config import ConfigError
from tasks.sanitize import redact

ANSWERS_S = 5.0
POLL_S = 0.1
HOST = "127.0.0.1"
DATABASE = "prefect.db"
PROFILE = ("PREFECT_PROFILE", "PREFECT_PROFILES_PATH")  # the user's, which the server's own home does not have
LOG_LINES = 15


@contextmanager
def reachable() -> Iterator[None]:
    """Have the flows of the block report to a Prefect server that answers.

    Raises:
        ConfigError: the one that is set does not answer.
        RuntimeError: a temporary one does not start.
    """
    if url := PREFECT_API_URL.value():
        if reason := _silent(url):
            raise ConfigError(
                f"PREFECT_API_URL={redact(url)}: no Prefect server answers ({redact(reason)}); start it, or for a "
                "temporary one unset the variable, or the profile's setting with: prefect config unset PREFECT_API_URL"
            )
        yield
        return
    with temporary_settings({PREFECT_API_URL: temporary_server()}):
        yield


@functools.cache
def temporary_server() -> str:
    """Start a server that ends with this process, however it ends; return the address of its API.

    Its home is a folder of its own, whose database is copied from an empty one of this Prefect version, kept in the cache
    folder: making one takes Prefect longer than all else.

    Raises:
        RuntimeError: it ended at once, or took too long.
    """
    home = Path(tempfile.mkdtemp(prefix="kivi-prefect-"))
    empty = cache_dir() / "prefect" / f"{prefect.__version__}.db"
    if empty.exists():
        shutil.copyfile(empty, home / DATABASE)
    owner, _held = os.pipe()  # this process holds the other end until it ends
    with (home / "log").open("wb") as log:
        try:
            server, address = _start(home, owner, log.fileno())
        finally:
            os.close(owner)
    until = time.monotonic() + PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
    while reason := _silent(address):
        if server.poll() is not None or time.monotonic() > until:
            empty.unlink(missing_ok=True)  # perhaps damaged
            said = (home / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            raise RuntimeError("\n".join([f"the temporary Prefect server does not start: {reason}", *said]))
        time.sleep(POLL_S)
    if not empty.exists():
        _keep(home / DATABASE, empty)
    return address


def _start(home: Path, owner: int, log: int) -> tuple[subprocess.Popen[bytes], str]:
    """Start the server as Prefect starts its temporary ones, but guarded; return it and the address of its API."""
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--host", HOST, "--port", str(port), "--log-level", "error", "--lifespan", "on", "--factory"]
    command = [sys.executable, "-m", "uvicorn", *options, "prefect.server.api.server:create_app"]
    own = {name: value for name, value in os.environ.items() if name not in PROFILE}
    settings = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / DATABASE}",
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
    }
    server = subprocess.Popen(  # noqa: S603  ours
        guarded(command, owner=owner, remove=home),
        env={**own, **settings},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(owner,),
        start_new_session=True,
    )
    return server, f"http://{HOST}:{port}/api"


def _silent(api: str) -> str:
    """Return why no server answers there, nothing when one does. One that asks for a password answers."""
    try:
        answer = httpx.get(f"{api}/health", timeout=ANSWERS_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return f"status {answer.status_code}" if answer.is_server_error else ""


def _keep(database: Path, empty: Path) -> None:
    """Copy a database that has just been made, all of it or nothing; commands that do so at once do no harm."""
    empty.parent.mkdir(parents=True, exist_ok=True)
    draft = empty.with_suffix(f".{os.getpid()}.draft")
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(draft)) as target:
        source.backup(target)
    draft.replace(empty)
