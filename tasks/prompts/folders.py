"""Rows of a dataset folder: its data files, which its README may name, or what ``Dataset.save_to_disk`` wrote.

``datasets`` says which files make which split. It would also read files outside the folder, take a name such as ``br[1]`` for a
pattern, and have a changed file with an old time stamp come from its cache.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import datasets
import yaml
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard

from tasks.prompts.files import READERS, FileError, Table, read_files, suffix

PLAIN = (*READERS, ".csv", ".tsv", ".txt")  # no archives: what they hold may be of any size, or lie anywhere
MAX_PATTERNS = 10_000
PATTERN = str.maketrans("[]{}*?:", "_______")
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"


def read_folder(folder: Path, config: str | None, split: str, wanted: Collection[str], limit: int | None) -> Table:
    """Read a split of a folder in the columns ``wanted``, at most ``limit`` rows.

    Raises:
        FileError: a file cannot be read, lies outside the folder, or is an archive.
        Exception: whatever ``datasets`` raises of a folder, a configuration or a split that is not there.
    """
    if (folder / SAVED).is_file() or (folder / SAVED_SPLITS).is_file():
        return take(_saved(folder, split), wanted, limit)
    _check_card(folder)
    with tempfile.TemporaryDirectory(prefix="kivi-prompts-") as temporary:
        mirror = _mirror(folder, Path(temporary) / folder.resolve().name.translate(PATTERN))
        try:
            builder = datasets.load_dataset_builder(str(mirror), config, cache_dir=f"{temporary}/cache")
        except datasets.exceptions.DatasetNotFoundError as error:
            raise FileError(str(error).replace(str(mirror), str(folder))) from error
        paths = {name: [_data_file(folder, Path(file)) for file in files] for name, files in builder.config.data_files.items()}
        ours = all(suffix(path) in READERS for path in paths.get(split, ()))
        if split in paths and ours and getattr(builder.config, "field", None) is None:
            return read_files(paths[split], wanted, limit)
        if hasattr(builder.config, "converters"):  # of csv: text as it stands
            builder.config.converters = dict.fromkeys(wanted, str)
        builder.download_and_prepare()
        return take(builder.as_dataset(split=split, in_memory=True), wanted, limit)


def _mirror(folder: Path, mirror: Path) -> Path:
    """Return a folder of links to the files in ``folder``, whose path holds nothing that reads as a pattern."""
    for where, _, names in os.walk(folder):
        here = mirror / Path(where).relative_to(folder)
        here.mkdir(parents=True)
        for name in names:
            (here / name).symlink_to((Path(where) / name).resolve())
    return mirror


def take(dataset: datasets.Dataset, wanted: Collection[str], limit: int | None) -> Table:
    """Return the first rows of ``dataset`` in the columns ``wanted``, those that it does not have as None."""
    columns, found = dataset.column_names, len(dataset)
    kept = dataset.select_columns([name for name in columns if name in wanted]) if set(wanted) & set(columns) else None
    rows = kept.select(range(min(found, limit or found))).to_list() if kept is not None else []
    return Table([{name: row.get(name) for name in wanted} for row in rows], columns, found)


def _saved(folder: Path, split: str) -> datasets.Dataset:
    """Return what ``save_to_disk`` wrote: one table, or a folder of each split."""
    if (folder / SAVED_SPLITS).is_file():
        splits = json.loads((folder / SAVED_SPLITS).read_text(encoding="utf-8"))["splits"]
        if split not in splits or PurePosixPath(split).name != split:
            raise FileError(f'Unknown split "{split}". Should be one of {splits}.')
        folder /= split
    state = json.loads((folder / SAVED).read_text(encoding="utf-8"))
    for file in state["_data_files"]:
        _within(folder, folder / file["filename"])
    return datasets.load_from_disk(str(folder), keep_in_memory=True)


def _data_file(folder: Path, path: Path) -> Path:
    if suffix(path) not in PLAIN:
        raise FileError(f"{path.name!r} is none of {', '.join(PLAIN)}; unpack or convert it")
    return _within(folder, path)


def _within(folder: Path, path: Path) -> Path:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise FileError(f"{str(path.resolve())!r} is outside of the folder; copy the file into it")
    return path


def _check_card(folder: Path) -> None:
    """Refuse a README that names files outside the folder, before anything looks for them."""
    for count, pattern in enumerate(_patterns(folder)):
        if count == MAX_PATTERNS:  # aliases of YAML make any number of a few
            raise FileError(f"its README names more than {MAX_PATTERNS:,} files; name them by a pattern")
        parts = PurePosixPath(pattern).parts
        if pattern.startswith(("/", "~")) or ".." in parts or ":" in pattern:
            raise FileError(f"its README names {pattern!r}, which is outside of the folder; copy the file into it")


def _patterns(folder: Path) -> Iterator[str]:
    """Yield all that the folder's README, or its own YAML file, says of data files."""
    card, standalone = folder / datasets.config.REPOCARD_FILENAME, folder / datasets.config.REPOYAML_FILENAME
    said = [DatasetCard.load(card).data.to_dict()] if card.is_file() else []
    said += [yaml.safe_load(standalone.read_text(encoding="utf-8")) or {}] if standalone.is_file() else []
    for fields in said:
        for config in fields.get(MetadataConfigs.FIELD_NAME) or ():
            yield from _strings([config.get("data_files"), config.get("data_dir")])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _strings(member)
