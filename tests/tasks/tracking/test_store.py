"""The folder of results: whole files or none, misses that mend themselves, errors that say what to do."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.measure.results import CellResult
from tasks.run.result_files import ResultStore, StoreError, ThroughputResult

KEY = "0123456789abcdef" * 2


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "results")


def test_what_is_written_is_read(store: ResultStore, make_result: Any) -> None:
    result = make_result(key=KEY)
    assert store.read(KEY, CellResult) is None
    path = store.write(result)
    assert path == store.folder / f"{KEY}.json"
    assert store.read(KEY, CellResult) == result


def test_timings_of_a_group_are_kept_beside_the_cells(store: ResultStore, make_result: Any) -> None:
    timings = ThroughputResult(cell_key=KEY, arms={"full": make_result().throughput, "mlx-quantized-k4v4-g32": "no kernel"})
    store.write(timings)
    assert store.read(KEY, ThroughputResult) == timings


def test_a_truncated_file_is_a_miss_with_a_warning(store: ResultStore, make_result: Any, caplog: Any) -> None:
    whole = store.write(make_result(key=KEY)).read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        store.path(KEY).write_bytes(whole[:length])
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert store.read(KEY, CellResult) is None
        assert "truncated or not a result" in caplog.text or "not as it was written" in caplog.text


@given(content=st.binary(max_size=200) | st.sampled_from([b"null", b"[]", b'{"cell_key": "x"}', b"NaN", b"\xff\xfe"]))
def test_no_content_crashes_the_reader(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = ResultStore(tmp_path_factory.mktemp("results"))
    store.path(KEY).write_bytes(content)
    assert store.read(KEY, CellResult) is None


def test_the_result_of_another_cell_is_a_miss_with_a_warning(store: ResultStore, make_result: Any, caplog: Any) -> None:
    store.path(KEY).write_bytes(store.write(make_result(key="other")).read_bytes())
    with caplog.at_level(logging.WARNING):
        assert store.read(KEY, CellResult) is None
    assert "result of another cell, other" in caplog.text


def test_a_result_of_another_schema_is_a_miss(store: ResultStore, make_result: Any) -> None:
    text = store.write(make_result(key=KEY)).read_text()
    store.path(KEY).write_text(text.replace('"schema_version": 1', '"schema_version": 2'))
    assert store.read(KEY, CellResult) is None


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"results folder '.*results' cannot be used: Not a directory; free space"):
        ResultStore(tmp_path / "file" / "results")


def test_a_result_that_cannot_be_read_is_an_error_and_not_a_miss(store: ResultStore) -> None:
    store.path(KEY).mkdir()
    with pytest.raises(StoreError, match="cannot be read: Is a directory"):
        store.read(KEY, CellResult)


def test_a_full_disk_leaves_what_was_there_and_nothing_half_written(store: ResultStore, make_result: Any) -> None:
    store.write(make_result(key=KEY, text="old"))
    code = f"""
        import resource, signal
        from kivi.measure.results import CellResult
        from tasks.run.result_files import ResultStore, StoreError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = ResultStore({str(store.folder)!r})
        result = store.read({KEY!r}, CellResult)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # the kernel refuses what goes beyond, as a full disk does
        try:
            store.write(result)
        except StoreError as error:
            print(error)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=60)
    assert "cannot be written to: File too large; free space" in ran.stdout
    assert [path.name for path in store.folder.iterdir()] == [f"{KEY}.json"]
    result = store.read(KEY, CellResult)
    assert result is not None and result.generation.continuations[0].text == "old"


def test_readers_never_see_a_part_while_a_result_is_replaced(store: ResultStore, make_result: Any) -> None:
    results = [make_result(key=KEY, text=letter * 20_000) for letter in "ab"]
    store.write(results[0])
    done = threading.Event()

    def replace() -> None:
        for turn in range(100):
            store.write(results[turn % 2])
        done.set()

    writer = threading.Thread(target=replace)
    writer.start()
    while not done.is_set():
        assert store.read(KEY, CellResult) in results
    writer.join()
