"""A tuning as a person reads it: the table, the page, and the figure in headless Chromium."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from made_candidates import candidate

from kivi import machine
from tasks.report.tuning import HEADINGS, rows, tuning_figure, tuning_markdown
from tasks.tune.answer import Tuning, choose, recommend
from tasks.tune.config import TuneConfig

CACHES = [  # spec, family, bytes, KL
    ("kivi:bits=2", "uniform", 4000, 0.2),
    ("kivi:bits=4", "uniform", 8000, 0.02),
    ("kivi:bits=3,group=64", "by layer", 5000, 0.05),
    ("kivi:bits=4,group=64", "by layer", 7000, 0.004),
    ("mlx-quantized:bits=4", "mlx-lm", 7500, 0.3),
]


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    config = TuneConfig(model="tiny|<script>")
    candidates = [candidate(spec, size, kl, family, flips=kl / 10, spread=0.5) for spec, family, size, kl in CACHES]
    chosen = choose(config, candidates, 0)
    return Tuning(
        digest="ab" * 32,
        started=datetime(2026, 11, 30, tzinfo=UTC),
        seconds=100,
        model=config.model.name,
        model_dtype="float32",
        weights_bytes=1,
        calibration="384 tokens of topics",
        judged="1 × 1,024 tokens of humaneval",
        config=config,
        sensitivities=[],
        candidates=candidates,
        failed={"kivi-k3v3": "layer 0: NaN"},
        recommendations=[recommend(aim, one, candidates, 0.9) for aim, one in chosen.items()],
        decode_ratio={one.spec.slug: 0.9 for one in chosen.values()},
        **machine.provenance(),
    )


def test_rows_are_by_bytes_and_say_what_is_chosen(tuning: Tuning) -> None:
    lines = [dict(zip(HEADINGS, row, strict=True)) for row in rows(tuning)]
    assert [line["bytes a token"] for line in lines] == ["4,000", "5,000", "7,000", "7,500", "8,000"]
    assert [line["choice"] for line in lines] == ["front", "recommended: marginal", "recommended: good", "", ""]
    assert [line["decode"] for line in lines] == ["–", "0.90×", "0.90×", "–", "–"]
    assert lines[2]["KL, nats (95 %)"] == "0.004 (0.002 to 0.006)" and lines[2]["tier"] == "good"


def test_the_page_has_the_answer_first_and_shows_names_as_they_are(tuning: Tuning) -> None:
    page = tuning_markdown(tuning)
    assert page.startswith("# Which cache for tiny\\|&lt;script&gt;\n\n- good: kivi:k4v4,g64")
    assert "kivi-k3v3: layer 0: NaN" in page and "<script>" not in page and "## Provenance" in page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_figure_shows_every_family_and_rings_what_is_recommended(
    tab: Any, tmp_path: Path, tuning: Tuning, scheme: str
) -> None:
    figure = tuning_figure(tuning)
    ET.fromstring(figure)  # noqa: S314  our own
    page = tmp_path / "figure.html"
    style = "<meta charset=utf-8><meta name=color-scheme content='light dark'><body style='color:CanvasText;background:Canvas'>"
    page.write_text(f"<!doctype html>{style}{figure}", encoding="utf-8")
    tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.open(page.as_uri())
    shown = tab.evaluate("[...document.querySelectorAll('svg text')].map(text => text.textContent)")
    assert {"uniform", "by layer", "mlx-lm", "recommended", "bytes a token at 4,096 tokens, all layers"} <= set(shown)
    ink = tab.evaluate("getComputedStyle(document.body).color")
    large = "[...document.querySelectorAll('svg use')].filter(mark => mark.getBoundingClientRect().width > 12)"
    rings = tab.evaluate(f"{large}.map(mark => getComputedStyle(mark).stroke)")
    boxes = tab.evaluate(
        "[...document.querySelectorAll('svg text')].every(text => text.getBoundingClientRect().right <= innerWidth)"
    )
    assert rings == [ink] * 3 and boxes  # two recommended, and the legend's
    assert len(tab.saw("Network.requestWillBeSent")) == 1
