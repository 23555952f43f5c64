"""What docs/checks.md lists is what the code takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from kivi.measure.audit import CHECKS, QUALITY, QUALITY_QUESTION
from kivi.measure.backends.speed import CPU_SETTINGS, SpeedSettings
from tasks.run.audit import AuditConfig
from tasks.run.compare import CompareConfig
from tasks.tune.config import EFFORTS, TuneConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "checks.md").read_text()


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every field that holds settings."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if name in {"settings", "speed", "decode"} and isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def section(command: str, page: str = PAGE) -> str:
    return page.split(f"## `kivi {command}`")[1].split("\n## ")[0]


@pytest.mark.parametrize(("command", "config"), [("compare", CompareConfig), ("audit", AuditConfig)])
def test_every_setting_is_listed_and_nothing_else(command, config):
    listed = re.findall(r"^\| `([\w.]+)` \|(?=.*\|.*\|)", section(command), re.MULTILINE)
    assert set(listed) - {*CHECKS, QUALITY} == set(leaves(config))


def test_every_setting_of_a_tuning_is_listed_and_nothing_else():
    listed = re.findall(r"^\| `(\w+)` \|", section("tune", (DOCS / "tune.md").read_text()), re.MULTILINE)
    assert listed == list(TuneConfig.model_fields)


def test_the_efforts_of_a_tuning_are_those_listed():
    page = (DOCS / "tune.md").read_text()
    for name, effort in EFFORTS.items():
        (row,) = re.findall(rf"^\| `{name}` \| (.+) \|$", page, re.MULTILINE)
        calibrated, bits, judged = row.split(" | ")
        several = f"{effort.score.sequences} × " if effort.score.sequences > 1 else ""
        assert (calibrated, judged) == (f"{effort.tokens:,}", f"{several}{effort.score.length:,}")
        assert [int(found) for found in re.findall(r"\d", bits)] == list(effort.bits)


def test_every_check_is_listed_with_its_question():
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|$", section("audit"), re.MULTILINE))
    assert listed == {name: question for name, (question, _) in CHECKS.items()} | {QUALITY: QUALITY_QUESTION}


def test_the_defaults_of_speed_are_those_listed():
    for name, field in SpeedSettings.model_fields.items():
        (row,) = re.findall(rf"^\| `settings\.speed\.{name}` \| ([^|]+) \|", PAGE, re.MULTILINE)
        for default in (field.default, getattr(CPU_SETTINGS, name)):
            for value in default if isinstance(default, tuple) else (default,):
                assert str(value) in row, name
