"""Rows of json and parquet files as they stand: numbers keep the digits they were written with, and only the columns that are
asked for are looked at. ``datasets`` gives a column one type, so 18 beside 0.5 becomes 18.0, and refuses types that differ.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import pyarrow
import pyarrow.parquet

READERS = {".json": "json", ".jsonl": "json", ".json.gz": "json", ".jsonl.gz": "json", ".parquet": "parquet"}
MAX_BYTES = 1_000_000_000  # of a set's files, decompressed; a few kilobytes of gzip or parquet can hold any number
OBJECT_BYTES = 100  # what an object takes in memory beside its text, at least
BATCH_ROWS = 64  # of parquet at a time: rows that a dictionary repeats take their full size once they are read


class FileError(ValueError):
    """A file that cannot be read; the message is half a sentence."""


class Table(NamedTuple):
    """The first rows, in the columns that were asked for; all columns there are; and how many rows there are in all."""

    rows: list[dict[str, Any]]
    columns: list[str]
    found: int


class WrittenFloat(float):
    """A number of JSON, which as text is what stood in the file."""

    written: str

    def __new__(cls, written: str) -> WrittenFloat:
        number = super().__new__(cls, written)
        number.written = written
        return number

    def __str__(self) -> str:
        return self.written


def suffix(path: Path) -> str:
    """Return the suffix that says what a file is: ``.jsonl.gz`` rather than ``.gz``."""
    *_, inner, last = ("", "", *path.suffixes)
    return inner + last if last == ".gz" else last


def read_files(paths: Sequence[Path], wanted: Collection[str], limit: int | None) -> Table:
    """Read json and parquet files, one after the other, as one table.

    Args:
        paths: The files, with a suffix of ``READERS``.
        wanted: The columns to keep. One that a row does not have is None there.
        limit: How many rows to keep, all by default; the others are counted.

    Raises:
        FileError: a file is broken, or there is more in them than ``MAX_BYTES``.
        OSError: a file cannot be opened.
    """
    rows: list[dict[str, Any]] = []
    columns: dict[str, None] = {}
    found, budget = 0, _Budget()
    for path in paths:
        read = _parquet if READERS[suffix(path)] == "parquet" else _json
        for row in read(path, wanted, budget):
            columns.update(dict.fromkeys(row))
            if limit is None or found < limit:
                rows.append({name: row.get(name) for name in wanted})
            found += 1
    return Table(rows, list(columns), found)


class _Budget:
    """What may still be read."""

    def __init__(self) -> None:
        self.left = MAX_BYTES

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise FileError(f"its files have more than {MAX_BYTES:,} bytes when they are read; keep the rows that are needed")


def _json(path: Path, wanted: Collection[str], budget: _Budget) -> Iterator[dict[str, Any]]:  # noqa: ARG001  as _parquet
    """Yield the objects of a file that has one a line, or a list of them, or a single one in any layout."""
    opened = gzip.open if suffix(path).endswith(".gz") else open
    decoder = json.JSONDecoder(
        object_pairs_hook=partial(_object, budget), parse_float=WrittenFloat, parse_constant=_no_constant
    )
    number = -1
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(_lines(file, budget)):
                try:
                    value = decoder.decode(line)
                except json.JSONDecodeError:
                    if number > 0:
                        raise
                    value = decoder.decode(line + "".join(_lines(file, budget)))
                for row in value if isinstance(value, list) else [value]:
                    if not isinstance(row, dict):
                        raise ValueError(f"{row!r:.60} is no object of columns")
                    yield row
    except (ValueError, RecursionError, OSError, EOFError, zlib.error) as error:  # UnicodeDecodeError is a ValueError
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path.name!r} cannot be read: {error}, in row {max(number, 0)}") from error


def _lines(file: BinaryIO | gzip.GzipFile, budget: _Budget) -> Iterator[str]:
    first = True
    while line := file.readline(budget.left + 1):
        budget.take(len(line))
        if line.strip():
            yield line.decode("utf-8-sig" if first else "utf-8")
        first = False


def _object(budget: _Budget, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    budget.take(OBJECT_BYTES)
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"a name is there twice in {', '.join(name for name, _ in pairs):.60}")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parquet(path: Path, wanted: Collection[str], budget: _Budget) -> Iterator[dict[str, Any]]:
    """Yield the rows in the columns that are asked for; the others are None."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            others = dict.fromkeys(file.schema_arrow.names)
            columns = [name for name in others if name in wanted]
            if not columns:
                yield from ({**others} for _ in range(min(1, file.metadata.num_rows)))
                return
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                full = [_decoded(column) for column in batch.columns]
                budget.take(sum(column.nbytes for column in full))
                for values in zip(*(column.to_pylist() for column in full), strict=True):
                    yield {**others, **dict(zip(columns, values, strict=True))}
    except pyarrow.ArrowException as error:
        raise FileError(f"{path.name!r} cannot be read: {error}") from error


def _decoded(column: Any) -> Any:
    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
