"""README's picture is the one that its script draws from the measurements that are committed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from equal_memory_figure import DOCS, RESULTS, THEMES, picture


@pytest.mark.parametrize("theme", THEMES)
def test_the_committed_picture_is_that_of_the_committed_measurements(theme):
    drawn = picture(json.loads(RESULTS.read_text()), theme)
    assert drawn == (DOCS / f"equal_memory_{theme}.svg").read_text()
    for words in ("start here", "8 bits", "23,040 bytes"):
        assert words in drawn
