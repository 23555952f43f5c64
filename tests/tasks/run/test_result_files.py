"""Result files: read as they were written or not at all."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import pytest

from kivi.measure.results import CellResult
from tasks.run.result_files import ResultStore


@pytest.fixture
def store(tmp_path: Any) -> ResultStore:
    return ResultStore(tmp_path / "results")


def test_a_figure_that_was_edited_is_no_result(store: ResultStore, make_result: Any, caplog: Any) -> None:
    result = make_result()
    path = store.write(result)
    content = path.read_text()
    edited = content.replace(f'"kl_mean": {result.quality.kl_mean}', '"kl_mean": 1e-9', 1)
    assert edited != content
    path.write_text(edited)
    with caplog.at_level(logging.WARNING):
        assert store.read(result.cell_key, CellResult, "kivi-k2v2 on tiny × story") is None
    assert f"kivi-k2v2 on tiny × story: {path} is not as it was written" in caplog.text
    assert "measuring again" in caplog.text
    store.write(result)
    assert store.read(result.cell_key, CellResult) == result


def test_no_bit_that_flips_is_read(store: ResultStore, make_result: Any) -> None:
    result = make_result()
    path = store.write(result)
    content, chosen = path.read_bytes(), random.Random(0)  # noqa: S311  not for secrets
    for _ in range(400):
        at = chosen.randrange(8 * len(content))
        path.write_bytes(content[: at // 8] + bytes([content[at // 8] ^ 1 << at % 8]) + content[at // 8 + 1 :])
        assert store.read(result.cell_key, CellResult) is None, at


def test_a_file_without_checksum_stays_readable(store: ResultStore, make_result: Any) -> None:
    result = make_result()
    store.path(result.cell_key).write_text(result.model_dump_json(indent=1))
    assert store.read(result.cell_key, CellResult) == result


def test_the_file_is_json(store: ResultStore, make_result: Any) -> None:
    result = make_result()
    fields = json.loads(store.write(result).read_bytes())
    assert len(fields.pop("sha256")) == 64 and CellResult.model_validate(fields) == result
