"""The deployments of prefect.yaml and their work pools on a Prefect server: made, and compared with the code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml

from flows.serve.background import ServerError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

POOL = "kivi"
FILE = "prefect.yaml"
# What a work pool lets a run choose of its process: nothing. Prefect's own has the command, its folder and its environment.
TEMPLATE = Path(__file__).parents[1] / "configs" / "pool.json"
DEPLOY_S = 300


@contextmanager
def client(api: str) -> Iterator[SyncPrefectClient]:
    """Yield Prefect's client of the server at ``api``, authorised as Prefect's settings say.

    Raises:
        ServerError: the server wants another authorisation.
    """
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.settings import PREFECT_API_AUTH_STRING

    try:
        with SyncPrefectClient(api, auth_string=PREFECT_API_AUTH_STRING.value()) as server:
            yield server
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.UNAUTHORIZED:
            raise
        raise ServerError(f"{api}: not authorised; set PREFECT_API_AUTH_STRING to the server's string") from None


def prepare_pools(api: str, project: Path) -> None:
    """Make the work pools of ``project``'s deployments on the server at ``api``, or give those there :data:`TEMPLATE`."""
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists

    template = _template()
    with client(api) as server:
        for pool in _pools(project):
            try:
                server.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
            except ObjectAlreadyExists:  # also where a worker that waited for the server, or the client's own retry, came first
                server.update_work_pool(pool, WorkPoolUpdate(base_job_template=template))


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

    A server with an older schema would show a form that the flow no longer takes, and refuse what it does take. A work pool
    with another template than :data:`TEMPLATE` is one more difference.
    """
    with client(api) as server:
        deployed = {deployment.entrypoint: deployment for deployment in server.read_deployments()}
        templates = {pool.name: pool.base_job_template for pool in server.read_work_pools()}
    for pool in _pools(project):
        if templates.get(pool) != _template():
            yield f"work pool {pool}: runs may choose the command of their process"
    for entry in read(project):
        name, entrypoint = entry["name"], entry["entrypoint"]
        deployment = deployed.get(entrypoint)
        if deployment is None or deployment.name != name:
            yield f"{name}: is not on the server"
        elif deployment.parameter_openapi_schema != load(entrypoint).parameters.model_dump_for_openapi():
            yield f"{name}: the server knows other parameters than this version of the code"


def read(project: Path) -> list[dict[str, Any]]:
    """Return the deployments of ``project``'s prefect.yaml."""
    entries: list[dict[str, Any]] = yaml.safe_load((project / FILE).read_text(encoding="utf-8"))["deployments"]
    return entries


def _pools(project: Path) -> list[str]:
    return sorted({entry["work_pool"]["name"] for entry in read(project)})


def _template() -> dict[str, Any]:
    template: dict[str, Any] = json.loads(TEMPLATE.read_bytes())
    return template


def load(entrypoint: str) -> Any:
    """Return the flow that an entrypoint names."""
    from prefect.flows import load_flow_from_entrypoint

    return load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)
