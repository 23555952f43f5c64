"""O20: offline, a cached data set must not come back at another revision than the one asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest

OLD, NEW, UNKNOWN = "a" * 40, "b" * 40, "c" * 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of ``datasets`` that holds owner/name at two revisions, as downloads from the hub leave it."""
    home = tmp_path_factory.mktemp("hf")
    for text, revision in (("old", OLD), ("new", NEW)):
        rows = home / f"{text}.jsonl"
        rows.write_text(json.dumps({"text": text}) + "\n")
        builder = datasets.load_dataset_builder("json", data_files=str(rows), cache_dir=str(home / text))
        builder.download_and_prepare()
        folder = home / "datasets" / "owner___name" / "default" / "0.0.0" / revision
        shutil.copytree(builder.cache_dir, folder)
        (folder / "json-train.arrow").rename(folder / "name-train.arrow")
        info = json.loads((folder / "dataset_info.json").read_text())
        (folder / "dataset_info.json").write_text(json.dumps({**info, "dataset_name": "name", "config_name": "default"}))
        time.sleep(0.01)  # so that the new one is the newest
    return home


def load_offline(cache: Path, **fields: str) -> str:
    """Load in a process that was started offline, and return what it printed."""
    code = """
import json, sys
from tasks.prompts.prompt_sets import PromptSetConfig, PromptSetError, load_prompt_set
try:
    prompts = load_prompt_set(PromptSetConfig(**json.loads(sys.argv[1])))
    print(prompts.revision, prompts.texts())
except PromptSetError as error:
    print(error)
"""
    config = json.dumps({"source": "owner/name", "column": "text", **fields})
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_DATASETS_CACHE", None)
    command = [sys.executable, "-c", code, config]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_the_asked_revision_is_the_one_that_comes(cache: Path) -> None:
    assert load_offline(cache, revision=OLD) == f"{OLD} ['old']"
    assert load_offline(cache, revision=NEW) == f"{NEW} ['new']"


def test_another_revision_is_an_error_that_names_the_cached_ones(cache: Path) -> None:
    message = load_offline(cache, revision=UNKNOWN)
    assert UNKNOWN in message
    assert f"in the cache: {OLD} (default), {NEW} (default)" in message


def test_a_set_that_is_not_cached_says_so(cache: Path) -> None:
    message = load_offline(cache, source="owner/other", revision=OLD)
    assert "Hugging Face cannot be reached" in message
    assert "nothing of it is in the cache" in message


def test_a_wrong_split_of_a_cached_set_names_what_exists(cache: Path) -> None:
    assert "Should be one of ['train']" in load_offline(cache, revision=OLD, split="test")
