"""The deployments of prefect.yaml on a Prefect server: made, and compared with the code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from flows.serve.background import ServerError

POOL = "kivi"
FILE = "prefect.yaml"
DEPLOY_S = 300


def deploy(api: str, project: Path, environment: Mapping[str, str]) -> None:
    """Deploy all of ``project``'s prefect.yaml to the server at ``api``, and look whether it is there as the code has it.

    Raises:
        ServerError: something is not deployed.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(project / FILE)]
    settings = {**environment, "PREFECT_API_URL": api}
    done = subprocess.run(  # noqa: S603  ours
        command, cwd=project, env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEPLOY_S
    )
    # Prefect ends with 0 also when it has stopped half way, so what it was to do is looked at.
    differences = list(drift(api, project))
    if done.returncode or differences:
        raise ServerError(f"deploying failed: {'; '.join(differences)}\n{done.stdout}{done.stderr}")


def drift(api: str, project: Path) -> Iterator[str]:
    """Yield a sentence for each deployment of prefect.yaml that is missing on the server or has other parameters than the code.

    A server with an older schema would show a form that the flow no longer takes, and refuse what it does take.
    """
    found = httpx.post(f"{api}/deployments/filter", json={}, timeout=30).raise_for_status().json()
    deployed = {deployment["entrypoint"]: deployment for deployment in found}
    for entry in read(project):
        name, entrypoint = entry["name"], entry["entrypoint"]
        deployment = deployed.get(entrypoint)
        if deployment is None or deployment["name"] != name:
            yield f"{name}: is not on the server"
        elif deployment["parameter_openapi_schema"] != load(entrypoint).parameters.model_dump_for_openapi():
            yield f"{name}: the server knows other parameters than this version of the code"


def read(project: Path) -> list[dict[str, Any]]:
    """Return the deployments of ``project``'s prefect.yaml."""
    entries: list[dict[str, Any]] = yaml.safe_load((project / FILE).read_text(encoding="utf-8"))["deployments"]
    return entries


def load(entrypoint: str) -> Any:
    """Return the flow that an entrypoint names."""
    from prefect.flows import load_flow_from_entrypoint

    return load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)
