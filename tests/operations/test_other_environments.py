"""Servers where the environment is not ours: a fresh folder, a password, another host name, a proxy."""

from __future__ import annotations

import base64
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

from flows.serve.background import Background, ServerError, end_tree, free_port
from flows.serve.deployments import POOL, client, drift, prepare_pools
from flows.serve.servers import answers, worker_is_online

PROJECT = Path(__file__).parents[2]
AUTH = "kivi:planted"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a Prefect server that listens everywhere, wants a password and is called lab.example by others."""
    folder = tmp_path_factory.mktemp("fresh")
    port = free_port("127.0.0.1", 4600)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment = {
        **own,
        "PREFECT_SERVER_API_HOST": "0.0.0.0",  # noqa: S104  as a team's server does
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_API_AUTH_STRING": AUTH,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://lab.example:{port}",
    }
    command = [sys.executable, "-m", "flows.servers", "run", "prefect", str(folder / "not" / "there")]
    processes = Background(folder)
    started = processes.start("prefect", command, environment)
    try:
        processes.wait(started, lambda: answers(f"http://127.0.0.1:{port}/api/health"))
        yield f"http://127.0.0.1:{port}"
    finally:
        process = started.find()
        if process is not None:
            end_tree(process)


def test_a_fresh_folder_gets_what_the_server_needs(server: str) -> None:
    assert answers(f"{server}/api/health")


def test_our_own_requests_are_authorised(server: str) -> None:
    api = f"{server}/api"
    with temporary_settings({PREFECT_API_AUTH_STRING: AUTH}):
        prepare_pools(api, PROJECT)
        assert not worker_is_online(server, POOL)
        with client(api) as prefect:
            prefect.send_worker_heartbeat(POOL, platform.node(), heartbeat_interval_seconds=30)
        assert worker_is_online(server, POOL)
        assert "nightly: is not on the server" in list(drift(api, PROJECT))


def test_another_password_is_one_sentence(server: str) -> None:
    with (
        temporary_settings({PREFECT_API_AUTH_STRING: "kivi:other"}),
        pytest.raises(ServerError, match="not authorised; set PREFECT_API_AUTH_STRING to the server's string"),
    ):
        prepare_pools(f"{server}/api", PROJECT)


def test_its_pages_work_under_the_name_that_others_use(server: str, tab: Any) -> None:
    with temporary_settings({PREFECT_API_AUTH_STRING: AUTH}):
        prepare_pools(f"{server}/api", PROJECT)
    lab = server.replace("127.0.0.1", "lab.example")
    tab.open(lab)
    tab.evaluate(f"localStorage.setItem('prefect-password', '{base64.b64encode(AUTH.encode()).decode()}')")
    tab.open(f"{lab}/v2/work-pools")
    tab.until("document.body.innerText.includes('kivi-cells')")
    tab.open(server.replace("127.0.0.1", "other.example"))
    assert "is none of this server's" in tab.evaluate("document.body.innerText")


ASK = """
import sys, requests, flows
from urllib.request import proxy_bypass, urlopen
from flows.serve.servers import answers
for url in sys.argv[2:]:
    assert answers(url) and requests.get(url).ok and urlopen(url).status == 200
assert not proxy_bypass("huggingface.example")
assert bool(proxy_bypass("intern.example")) == (sys.argv[1] == "excepted")
"""


@pytest.mark.parametrize(
    ("proxy", "excepted"),
    [
        ("http_proxy", {}),
        ("HTTP_PROXY", {"NO_PROXY": "intern.example"}),
        ("all_proxy", {"no_proxy": "x.example, intern.example"}),
    ],
)
def test_servers_of_this_machine_are_asked_without_the_proxy(server: str, proxy: str, excepted: dict[str, str]) -> None:
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    urls = [f"{server.replace('127.0.0.1', name)}/api/health" for name in ("127.0.0.1", "localhost")]
    command = [sys.executable, "-c", ASK, "excepted" if excepted else "", *urls]
    environment = {**own, proxy: "http://127.0.0.1:9", **excepted}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
