"""What stands in files is what the model reads: numbers as written, folders of all kinds, nothing from outside them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tasks.config import PromptSetConfig
from tasks.prompts.prompt_sets import PromptSetError, load_prompt_set


def texts(source: Path, **fields: Any) -> list[str]:
    if "template" not in fields:
        fields.setdefault("column", "text")
    return load_prompt_set(PromptSetConfig(source=str(source), **fields)).texts()


def refusal(source: Path, **fields: Any) -> str:
    with pytest.raises(PromptSetError) as caught:
        texts(source, **fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("numbers", "written"),
    [
        (["18", "0.5"], ["18", "0.5"]),
        (["12345678901234567", "null"], ["12345678901234567"]),
        (["1.10", "1e5", "-0.0"], ["1.10", "1e5", "-0.0"]),
        (["0.1000000000000000055511151231257827"], ["0.1000000000000000055511151231257827"]),
    ],
)
@pytest.mark.parametrize("layout", ["a.jsonl", "a.json", "a.jsonl.gz", "folder"])
def test_numbers_are_text_as_they_stand(tmp_path: Path, numbers: list[str], written: list[str], layout: str) -> None:
    lines = [f'{{"n": {number}}}' for number in numbers]
    content = f"[{', '.join(lines)}]" if layout == "a.json" else "\n".join(lines)
    path = tmp_path / layout
    if layout == "folder":
        path.mkdir()
        (path / "a.jsonl").write_text(content)
    elif layout.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content)
    assert texts(path, template="<{n}>", limit=len(written)) == [f"<{number}>" for number in written]
    assert "row 0: 'n' holds" in refusal(path, column="n")


def test_csv_is_text_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,other\n18,a\n1.10,NA\n007,\n")
    assert texts(tmp_path, column="n") == ["18", "1.10", "007"]


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "text": "b"}\n')
    assert "twice" in refusal(tmp_path / "a.jsonl")


@pytest.mark.parametrize("as_folder", [False, True])
def test_columns_that_are_not_asked_for_do_not_matter(tmp_path: Path, as_folder: bool) -> None:
    rows = [{"text": "a", "x": 1}, {"text": "b", "x": "one"}, {"text": "c", "x": {"y": []}}, {"text": "d", "z": [1, "2"]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert texts(tmp_path if as_folder else tmp_path / "a.jsonl") == ["a", "b", "c", "d"]


def test_columns_of_parquet_that_are_not_asked_for_do_not_matter(tmp_path: Path) -> None:
    for name, other in (("a", 1), ("b", "one")):
        pyarrow.parquet.write_table(pyarrow.table({"text": [name], "x": [other]}), tmp_path / f"{name}.parquet")
    assert texts(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("where", ["../secret.jsonl", "{outside}/secret.jsonl", "../*.jsonl", "link.jsonl"])
@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
def test_a_folder_gives_no_file_from_outside(tmp_path: Path, where: str, card: str) -> None:
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    fields = f"configs:\n- config_name: default\n  data_files: {json.dumps(where.format(outside=tmp_path))}\n"
    (folder / card).write_text(f"---\n{fields}---\n" if card == "README.md" else fields)
    said = refusal(folder)
    assert "outside of the folder" in said and "'secret'" not in said


def test_a_folder_reads_what_its_card_names_inside(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: data/*.jsonl\n---\n")
    assert texts(tmp_path) == ["b"]


@pytest.mark.parametrize("name", ["br[1]", "what?", "a*b", "{a,b}", "with space", "a::b"])
def test_a_folder_s_name_is_no_pattern(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    assert texts(folder) == ["a"]


def test_a_folder_of_save_to_disk_is_read(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "two")
    assert texts(tmp_path / "one") == ["a", "b"]
    assert texts(tmp_path / "two", limit=1) == ["a"]
    assert texts(tmp_path / "two", split="test") == ["b"]
    assert "Should be one of ['train', 'test']" in refusal(tmp_path / "two", split="validation")
    assert "no column 'prompt'; there are 'text', 'n'" in refusal(tmp_path / "one", column="prompt")


def test_a_folder_of_save_to_disk_gives_no_file_from_outside(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["secret"]}).save_to_disk(tmp_path / "secret")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "set")
    state = tmp_path / "set" / "state.json"
    fields = json.loads(state.read_text())
    fields["_data_files"][0]["filename"] = "../secret/data-00000-of-00001.arrow"
    state.write_text(json.dumps(fields))
    assert "outside of the folder" in refusal(tmp_path / "set")


def bomb(path: Path) -> Path:
    """Write a file of some kilobytes that holds 400 megabytes, or a folder with such a file."""
    if path.suffix == ".parquet":
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4000, pyarrow.int32()), ["a" * 100_000])
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(b'{"text": "') + gzip.compress(b"a" * 20_000_000, 1) * 20 + gzip.compress(b'"}'))
    else:
        path.mkdir()
        with zipfile.ZipFile(path / "a.jsonl.zip", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.jsonl", "w") as file:
            for _ in range(40):
                file.write(b'{"text": "' + b"a" * 10_000_000 + b'"}\n')
    return path


READ = """
import resource, sys
import tasks.prompts.files
from tasks.config import PromptSetConfig
from tasks.prompts.prompt_sets import PromptSetError, load_prompt_set
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before, tasks.prompts.files.MAX_BYTES = used(), 50_000_000
try:
    load_prompt_set(PromptSetConfig(source=sys.argv[1], column="text"))
except PromptSetError as error:
    print(error)
print(used() - before)
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("a.jsonl.gz", "more than 50,000,000 bytes"), ("a.parquet", "more than 50,000,000 bytes"), ("folder", "unpack")],
)
def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path: Path, name: str, sentence: str) -> None:
    command = [sys.executable, "-c", READ, str(bomb(tmp_path / name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert sentence in done.stdout, done.stderr[-2000:]
    assert int(done.stdout.splitlines()[-1]) < 250  # MiB
