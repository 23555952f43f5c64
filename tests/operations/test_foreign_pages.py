"""Prefect's server is asked by a foreign web page, as a browser would: nothing is run, nothing is read. Its own pages work."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from flows.serve.deployments import POOL, TEMPLATE, client, drift, prepare_pools
from tasks.run.fan_out import POOL as CELLS

PROJECT = Path(__file__).parents[2]
FOREIGN = Origin("http://attacker.example")
# fetch() with a blob that has no type sends no content type: no preflight, and Prefect takes the body for JSON.
ATTACKS = """
(async () => {
  const ends = [];
  for (const options of [
    {headers: {"content-type": "application/json"}, body: BODY},
    {headers: {"content-type": "text/plain"}, body: BODY},
    {mode: "no-cors", body: BODY},
    {mode: "no-cors", body: new Blob([BODY])},
  ])
    ends.push(await fetch(URL_, {method: "POST", ...options}).then(answer => answer.type + answer.status, () => "refused"));
  return ends;
})()
"""


def url(lab: Any) -> str:
    return f"{lab.api}/deployments/{lab.deployment('evaluate/evaluate')['id']}/create_flow_run"


def runs(lab: Any) -> int:
    return int(lab.post("/flow_runs/count", {}).raise_for_status().json())


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", None])
@pytest.mark.parametrize("origin", [FOREIGN, "null", "", "http://127.0.0.1:1", "https://attacker.example:4200"])
def test_a_foreign_page_starts_no_run(lab: Any, origin: str, content_type: str | None) -> None:
    before = runs(lab)
    headers = {"origin": origin, **({"content-type": content_type} if content_type else {})}
    answer = httpx.post(url(lab), content=json.dumps({"job_variables": {}}), headers=headers)
    assert (answer.status_code, answer.text.count("is none of this server's")) == (403, 1)
    assert runs(lab) == before


@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE"])
def test_a_preflight_of_a_foreign_page_grants_nothing(lab: Any, method: str) -> None:
    headers = {"origin": FOREIGN, "access-control-request-method": method, "access-control-request-headers": "content-type"}
    answer = httpx.options(url(lab), headers=headers)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("host", ["attacker.example", "127.0.0.1.attacker.example", "localhost.attacker.example", "[", ""])
@pytest.mark.parametrize("path", ["/api/health", "/", "/api/flow_runs/count"])
def test_a_foreign_name_that_resolves_to_this_machine_is_refused(lab: Any, host: str, path: str) -> None:
    port = httpx.URL(lab.api).port
    headers = {"host": f"{host}:{port}", "origin": f"http://{host}:{port}", "content-type": "application/json"}
    for method in ("GET", "POST"):
        answer = httpx.request(method, lab.prefect_address + path, headers=headers)
        assert answer.status_code == 403, answer.text


@pytest.mark.parametrize(("host", "origin"), [("127.0.0.1", FOREIGN), ("attacker.example", None)])
@pytest.mark.parametrize("path", ["/api/events/in", "/api/events/out"])
def test_a_foreign_page_opens_no_websocket(lab: Any, path: str, host: str, origin: Origin | None) -> None:
    port = httpx.URL(lab.api).port
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        pytest.raises(InvalidStatus, match="403"),
        connect(f"ws://{host}:{port}{path}", sock=connection, origin=origin),
    ):
        pass


@pytest.mark.parametrize("headers", [{}, {"host": "localhost"}, {"host": "[::1]:4200"}], ids=str)
def test_what_is_no_foreign_page_is_let_in(lab: Any, headers: dict[str, str]) -> None:
    assert httpx.get(f"{lab.api}/health", headers=headers).is_success
    with_origin = {**headers, "origin": f"http://{headers['host']}" if headers else lab.prefect_address}
    assert httpx.post(f"{lab.api}/flow_runs/count", json={}, headers=with_origin).is_success


@pytest.mark.parametrize("name", ["evaluate/evaluate", "cell/cell"])
@pytest.mark.parametrize("variable", ["command", "env", "env.PATH", "working_dir", "name", "labels"])
def test_a_run_chooses_nothing_of_its_process(lab: Any, name: str, variable: str) -> None:
    before = runs(lab)
    path = f"/deployments/{lab.deployment(name)['id']}/create_flow_run"
    answer = lab.post(path, {"job_variables": {variable: "touch x"}, "enforce_parameter_schema": False})
    assert answer.status_code == 422 and f"'{variable}' was unexpected" in answer.text
    assert runs(lab) == before


def test_a_pool_that_is_open_is_noticed_and_closed(lab: Any) -> None:
    open_ = {"job_configuration": {"command": "{{ command }}"}, "variables": {"properties": {"command": {"type": "string"}}}}
    for pool in (POOL, CELLS):
        lab.patch(f"/work_pools/{pool}", {"base_job_template": open_, "concurrency_limit": 7})
    try:
        assert [sentence.split(":")[0] for sentence in drift(lab.api, PROJECT)] == [f"work pool {POOL}", f"work pool {CELLS}"]
        prepare_pools(lab.api, PROJECT)
        with client(lab.api) as server:
            found = [server.read_work_pool(pool) for pool in (POOL, CELLS)]
        assert [pool.base_job_template for pool in found] == [json.loads(TEMPLATE.read_bytes())] * 2
        assert [pool.concurrency_limit for pool in found] == [7, 7]
        assert list(drift(lab.api, PROJECT)) == []
    finally:
        for pool in (POOL, CELLS):
            lab.patch(f"/work_pools/{pool}", {"concurrency_limit": None})


class Site(BaseHTTPRequestHandler):
    """A web site that keeps what it is sent: the origin, the content type, the body."""

    heard: list[tuple[str | None, str | None, bytes]]

    def do_GET(self) -> None:
        self._answer()

    def do_OPTIONS(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.heard.append((self.headers["origin"], self.headers["content-type"], body))
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        for name in ("origin", "methods", "headers"):
            self.send_header(f"access-control-allow-{name}", "*")
        self.send_header("content-type", "text/html")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[ThreadingHTTPServer]:
    Site.heard = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def attack(tab: Any, address: str) -> list[str]:
    """Return how the attacks of the open page ended."""
    body = json.dumps(json.dumps({"state": {"type": "SCHEDULED"}}))
    ends: list[str] = tab.evaluate(ATTACKS.replace("BODY", body).replace("URL_", json.dumps(address)))
    return ends


def test_a_page_in_a_browser_starts_no_run(lab: Any, tab: Any, site: ThreadingHTTPServer) -> None:
    before = runs(lab)
    for host in ("attacker.example", "127.0.0.1", "localhost"):
        tab.open(f"http://{host}:{site.server_port}/")
        assert attack(tab, url(lab)) == ["refused", "refused", "opaque0", "opaque0"]
    assert runs(lab) == before


def test_this_browser_sends_the_attacks(tab: Any, site: ThreadingHTTPServer) -> None:
    page = f"http://attacker.example:{site.server_port}"
    tab.open(page)
    Site.heard.clear()
    assert attack(tab, f"http://127.0.0.1:{site.server_port}/") == ["cors200", "cors200", "opaque0", "opaque0"]
    assert {origin for origin, _, _ in Site.heard} == {page}
    assert [kind for _, kind, _ in Site.heard] == ["application/json", "text/plain", "text/plain;charset=UTF-8", None]
    assert all(json.loads(body) for _, _, body in Site.heard)


def test_a_rebound_name_in_a_browser_reads_and_starts_nothing(lab: Any, tab: Any) -> None:
    before = runs(lab)
    rebound = lab.api.replace("127.0.0.1", "attacker.example")
    tab.open(rebound)
    assert "is none of this server's" in tab.evaluate("document.body.innerText")
    assert attack(tab, url(lab).replace(lab.api, rebound)) == ["basic403"] * 4
    assert runs(lab) == before


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("path", ["/deployments", "/v2/deployments"])
def test_its_own_pages_work(lab: Any, tab: Any, name: str, path: str) -> None:
    tab.open(lab.prefect_address.replace("127.0.0.1", name) + path)
    tab.until("document.body.innerText.includes('evaluate')")
    answers = [event["response"] for event in tab.saw("Network.responseReceived") if "/api/" in event["response"]["url"]]
    assert answers
    assert [answer["url"] for answer in answers if answer["status"] >= 400] == []
