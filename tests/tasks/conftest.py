"""A prompt set without a source."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.prompts import PromptSet, digest


@pytest.fixture(scope="session")
def story() -> PromptSet:
    """A prompt set of plain sentences, 4,000 bytes in all."""
    rows: tuple[dict[str, Any], ...] = tuple({"text": f"Sentence {n} says that {n * n} is a square. " * 2} for n in range(50))
    return PromptSet(name="story", rows=rows, source="story", revision=None, split="train", sha256=digest(rows), note="")
