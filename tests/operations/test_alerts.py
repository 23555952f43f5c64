"""A night that fails its gate calls a webhook, through the automation of docs/deploy as docs/operations.md sets it up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "deploy" / "gate-failed.yaml"
SAVE = "from prefect.blocks.webhook import Webhook; import os; print(Webhook(url=os.environ['ALERT_URL']).save('kivi-alerts'))"


@pytest.fixture
def channel() -> Iterator[tuple[str, list[str]]]:
    """A chat's webhook: its address, and what was said there."""
    said: list[str] = []

    class Channel(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Channel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", said
    server.shutdown()


def test_a_regression_is_a_failed_run_that_says_why_to_whoever_is_to_be_told(
    lab: Any, channel: tuple[str, list[str]], tmp_path: Path, tiny_matrix: dict[str, Any]
) -> None:
    address, said = channel
    saved = subprocess.run(
        [sys.executable, "-c", SAVE], env={**lab.environment, "ALERT_URL": address}, capture_output=True, text=True, timeout=120
    )
    assert saved.returncode == 0, saved.stderr
    automation = tmp_path / "gate-failed.yaml"
    automation.write_text(EXAMPLE.read_text().replace("REPLACE-WITH-THE-ID-OF-THE-BLOCK", saved.stdout.split()[-1]))
    made = lab.prefect("automation", "create", "--from-file", str(automation))
    assert made.returncode == 0, made.stdout + made.stderr

    strict = {**tiny_matrix, "specs": ["full", "kivi:bits=2,residual=32"], "thresholds": {"kivi-*": {"compression": 100}}}
    run = lab.run("nightly/nightly", {"config": strict, "tracking_dir": str(tmp_path / "mlruns")})
    assert run["state"]["type"] == "FAILED"
    assert "memory.compression is" in run["state"]["message"]
    (event,) = [event for event in lab.events("kivi.gate.failed") if run["id"] in json.dumps(event["related"])]
    assert "below the limit of 100" in json.dumps(event["payload"])
    lab.until(lambda: said)
    text = json.loads(said[0])["text"]
    assert text.startswith(f"{event['payload']['night']} failed: ")
    assert "below the limit of 100" in text
