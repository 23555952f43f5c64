"""Headless Chromium, told what to do by its DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

START_S, ANSWER_S = 60, 30


class Tab:
    """One page of a running browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self._session: dict[str, str] = {}
        self._events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Network"):
            self.send(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go to an address and wait until its page has loaded; what happened before is forgotten."""
        self._events.clear()
        self.send("Page.navigate", url=url)
        while not self.saw("Page.loadEventFired"):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of the page, once its promise is kept where it is one."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression of the page is true."""
        due = time.monotonic() + ANSWER_S
        while not self.evaluate(expression):
            assert time.monotonic() < due, f"{expression} was not seen; the page says {self.evaluate(TEXT)!r}"
            time.sleep(0.1)

    def saw(self, method: str) -> list[dict[str, Any]]:
        """Return what has happened of one kind since the page was opened."""
        return [event["params"] for event in self._events if event["method"] == method]

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params, **self._session}))
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=ANSWER_S))
        if "method" in message:
            self._events.append(message)
            if message["method"] == "Page.javascriptDialogOpening":  # nothing goes on until somebody answers it
                self._number += 1
                dismissal = {"id": self._number, "method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
                self._socket.send(json.dumps({**dismissal, **self._session}))
        return message


TEXT = "document.body.innerText"


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A page of one browser for all tests; names that end in ``.example`` are this machine's."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the PATH")
    profile = tmp_path_factory.mktemp("chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "--host-resolver-rules=MAP *.example 127.0.0.1"]
    browser = subprocess.Popen([chromium, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(address(profile / "DevToolsActivePort", browser), max_size=None, ping_interval=None) as socket:
            yield Tab(socket)
    finally:
        browser.terminate()
        browser.wait(timeout=30)


def address(file: Path, browser: subprocess.Popen[bytes]) -> str:
    """Wait for the file in which the browser says where it listens."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and browser.poll() is None:
        if file.exists() and len(lines := file.read_text().split()) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.1)
    raise RuntimeError(f"the browser does not listen: exit status {browser.poll()}")
