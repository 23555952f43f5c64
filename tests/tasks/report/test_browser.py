"""The report's page as a person sees it: in headless Chromium, on a phone and on a desk, in light and in dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.config import NightlyConfig
from tasks.judge.gate import judge
from tasks.report.night import build_report
from tasks.run.plan import Skipped

PHONE, DESK = (390, 844), (1280, 900)
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


def look(tab: Any, page: Path, size: tuple[int, int], scheme: str) -> dict[str, Any]:
    """Open a file and return what is seen there, requests and dialogs included."""
    width, height = size
    tab.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=size == PHONE)
    tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.open(page.as_uri())
    requests = [event["request"]["url"] for event in tab.saw("Network.requestWillBeSent")]
    return {**tab.evaluate(LOOK), "requests": requests, "dialogs": tab.saw("Page.javascriptDialogOpening")}


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
def test_the_page_fits_can_be_read_and_asks_nobody(tab: Any, page: Path, size: tuple[int, int], scheme: str) -> None:
    seen = look(tab, page, size, scheme)
    assert seen["width"] <= size[0]
    assert seen["requests"] == [page.as_uri()]
    assert seen["figures"] == 9
    assert (luminance(seen["background"]) < 0.5) == (scheme == "dark")
    assert len(seen["colours"]) >= 4  # ink, soft, and what passed and failed
    faint = {colour: contrast(colour, seen["background"]) for colour in seen["colours"]}
    assert {colour: ratio for colour, ratio in faint.items() if ratio < READABLE} == {}


def test_what_models_and_data_sets_say_stays_text(tab: Any, page: Path) -> None:
    seen = look(tab, page, DESK, "light")
    assert (seen["scripts"], seen["images"], seen["dialogs"]) == (0, 0, [])
    assert seen["title"] == "nightly 2026-11-29: fail"
    assert seen["text"].count(SCRIPT) >= 3
    assert "\\x1b[2J\\x07 \\u202e" in seen["text"]
    assert not {"\x1b", "\x07", "\u202e"} & set(seen["text"])


def test_this_browser_would_have_seen_it(tab: Any, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(f'<title>mine</title><p style="width: 2000px; color: #eee">wide{HOSTILE}', encoding="utf-8")
    seen = look(tab, page, DESK, "light")
    assert seen["width"] >= 2000
    assert (seen["title"], seen["scripts"], seen["images"]) == ("taken", 1, 1)
    assert [event["message"] for event in seen["dialogs"]][:1] == ["1"]
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
