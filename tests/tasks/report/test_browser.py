"""The report's page as a person sees it: in headless Chromium, on a phone and on a desk, in light and in dark."""

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

from tasks.config import NightlyConfig
from tasks.judge.gate import judge
from tasks.report.night import build_report
from tasks.run.plan import Skipped

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")

PHONE, DESK = (390, 844), (1280, 900)
START_S, ANSWER_S = 60, 30
SCRIPT = '<script>document.title = "taken"; alert(1)</script>'
HOSTILE = f"</pre>{SCRIPT}<img src=http://127.0.0.1:9/x onerror=alert(2)> \x1b[2J\x07 \u202e"
UNBROKEN = "m" * 300
READABLE = 4.5  # contrast of text that WCAG 2.1 (1.4.3) asks for
LOOK = """
(() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), colours = new Set();
  while (texts.nextNode()) {
    const box = texts.currentNode.parentElement, style = getComputedStyle(box);
    if (texts.currentNode.data.trim() && box.getClientRects().length)
      colours.add(box instanceof SVGElement ? style.fill : style.color);
  }
  return {
    width: document.documentElement.scrollWidth, title: document.title, text: document.body.textContent,
    scripts: document.scripts.length, images: document.images.length, figures: document.querySelectorAll("svg").length,
    background: getComputedStyle(document.body).backgroundColor, colours: [...colours],
  };
})()
"""


class Tab:
    """One page of a running browser, told what to do by Chromium's DevTools protocol."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Network"):
            self._send(f"{domain}.enable")

    def look(self, page: Path, size: tuple[int, int], scheme: str) -> dict[str, Any]:
        """Open a file and return what is seen there, requests and dialogs included."""
        width, height = size
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=size == PHONE)
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self._send("Page.navigate", url=page.as_uri())
        while not self._saw("Page.loadEventFired"):
            self._receive()
        seen: dict[str, Any] = self._send("Runtime.evaluate", expression=LOOK, returnByValue=True)["result"]["value"]
        requests = [event["params"]["request"]["url"] for event in self._saw("Network.requestWillBeSent")]
        return {**seen, "requests": requests, "dialogs": self._saw("Page.javascriptDialogOpening")}

    def _saw(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["method"] == method]

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
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
            self.events.append(message)
            if message["method"] == "Page.javascriptDialogOpening":  # nothing goes on until somebody answers it
                self._number += 1
                dismissal = {"id": self._number, "method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
                self._socket.send(json.dumps({**dismissal, **self._session}))
        return message


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A page of one browser for all tests."""
    profile = tmp_path_factory.mktemp("chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    command = [str(CHROMIUM), *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(address(profile / "DevToolsActivePort", browser), max_size=None) as socket:
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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, make_result: Any, make_night: Any) -> Path:
    """A night with everything that a report can show, some of it hostile, some without a place to break a line."""
    good, bad = make_result("full"), make_result(kl_mean=0.5, model=UNBROKEN, audit_passed=False)
    hostile = make_result("kivi-roundtrip:bits=8,backend=mlx", text=HOSTILE, model=HOSTILE, prompt_set=HOSTILE, accuracy=0.5)
    skipped = (Skipped(what="kivi-k2v2-g32-r128-metal", why=f"backend metal: {UNBROKEN}"),)
    night = make_night(good, bad, hostile, f"the kernel {UNBROKEN} did not compile {HOSTILE}", skipped=skipped)
    verdict = judge(night, NightlyConfig(specs=("full",)))
    return build_report(night, verdict, experiment_id="1", parent_id="p", cell_ids=["c"]).write(
        tmp_path_factory.mktemp("report")
    )


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_can_be_read_and_asks_nobody(tab: Tab, page: Path, size: tuple[int, int], scheme: str) -> None:
    seen = tab.look(page, size, scheme)
    assert seen["width"] <= size[0]
    assert seen["requests"] == [page.as_uri()]
    assert seen["figures"] == 9
    assert (luminance(seen["background"]) < 0.5) == (scheme == "dark")
    assert len(seen["colours"]) >= 4  # ink, soft, and what passed and failed
    faint = {colour: contrast(colour, seen["background"]) for colour in seen["colours"]}
    assert {colour: ratio for colour, ratio in faint.items() if ratio < READABLE} == {}


def test_what_models_and_data_sets_say_stays_text(tab: Tab, page: Path) -> None:
    seen = tab.look(page, DESK, "light")
    assert (seen["scripts"], seen["images"], seen["dialogs"]) == (0, 0, [])
    assert seen["title"] == "nightly 2026-11-29: fail"
    assert seen["text"].count(SCRIPT) >= 3
    assert "\\x1b[2J\\x07 \\u202e" in seen["text"]
    assert not {"\x1b", "\x07", "\u202e"} & set(seen["text"])


def test_this_browser_would_have_seen_it(tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(f'<title>mine</title><p style="width: 2000px; color: #eee">wide{HOSTILE}', encoding="utf-8")
    seen = tab.look(page, DESK, "light")
    assert seen["width"] >= 2000
    assert (seen["title"], seen["scripts"], seen["images"]) == ("taken", 1, 1)
    assert [event["params"]["message"] for event in seen["dialogs"]][:1] == ["1"]
    assert "http://127.0.0.1:9/x" in seen["requests"]
    assert min(contrast(colour, "rgb(255, 255, 255)") for colour in seen["colours"]) < READABLE


def contrast(one: str, other: str) -> float:
    """Return the contrast of two CSS colours as WCAG 2.1 defines it, 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of ``rgb(r, g, b)``, 0 to 1."""
    assert colour.startswith("rgb("), colour
    channels = [int(part) / 255 for part in colour[4:-1].split(",")]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
