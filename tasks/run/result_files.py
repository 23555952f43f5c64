"""The folder of finished results: one JSON file a result, found by its key.

A file is there whole or not at all, whatever kills the process that writes it, and begins with a checksum of the rest, but for
those of version 0.1.0. What is in the folder and is not a result of the asked key, or not as it was written, is a miss with a
warning, because measuring again mends it; what the operating system refuses is an error.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from kivi.files import write_whole
from kivi.measure.candidate import Candidate
from kivi.measure.records import Record
from kivi.measure.results import CellResult, Throughput
from kivi.measure.sensitivity import Sensitivity

logger = logging.getLogger(__name__)

CHECKSUM = re.compile(rb'\{\n "sha256": "([0-9a-f]{64})",\n')  # of the file without this line


class StoreError(RuntimeError):
    """The folder of results cannot be read or written; one sentence says why and what to do."""


class ThroughputResult(Record):
    """The timings of all caches of one model and prompt set, interleaved."""

    cell_key: str
    arms: dict[str, Throughput | str] = Field(description="by slug of the spec; a sentence for a cache that could not be timed")


Result = TypeVar("Result", CellResult, ThroughputResult, Sensitivity, Candidate)


class ResultStore:
    """Finished results in ``folder``, made when it is missing.

    Raises:
        StoreError: the folder can neither be used nor made.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refused("used", error) from error

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def read(self, key: str, kind: type[Result], label: str = "") -> Result | None:
        """Return the result called ``key``, or None when there is none, or none that can be used.

        Args:
            key: Its key.
            kind: What it is.
            label: What people call it, for the warning when it cannot be used.

        Raises:
            StoreError: the file is there and may not be read.
        """
        path = self.path(key)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refused("read", error) from error
        try:
            result = kind.model_validate_json(checked(text))
            if result.cell_key == key:
                return result
            problem = f"holds the result of another cell, {result.cell_key}"
        except ChecksumError as error:
            problem = str(error)
        except ValidationError as error:
            problem = f"is truncated or not a result of this version: {_first(error)}"
        logger.warning("%s: %s %s; measuring again", label or key, path, problem)
        return None

    def write(self, result: CellResult | ThroughputResult | Sensitivity | Candidate) -> Path:
        """Write ``result`` under its key, whole or not at all, replacing what was there.

        Raises:
            StoreError: the disk is full, the folder is read-only or the like; what was there before still is.
        """
        path = self.path(result.cell_key)
        try:
            write_whole(path, _with_checksum(result.model_dump_json(indent=1).encode()))
        except OSError as error:
            raise self._refused("written to", error) from error
        return path

    def _refused(self, verb: str, error: OSError) -> StoreError:
        return StoreError(
            f"results folder {str(self.folder)!r} cannot be {verb}: {error.strerror or error}; "
            "free space, mend its permissions or choose another folder"
        )


class ChecksumError(ValueError):
    """A result file that is not as it was written."""


def _with_checksum(content: bytes) -> bytes:
    return b'{\n "sha256": "' + hashlib.sha256(content).hexdigest().encode() + b'",\n' + content.removeprefix(b"{\n")


def checked(content: bytes) -> bytes:
    """Return the result in a file's content, without its checksum; a file of version 0.1.0 has none.

    Raises:
        ChecksumError: the checksum is that of another content.
    """
    if (found := CHECKSUM.match(content)) is None:
        return content
    result = b"{\n" + content[found.end() :]
    if hashlib.sha256(result).hexdigest().encode() != found.group(1):
        raise ChecksumError("is not as it was written: its checksum is that of another content")
    return result


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".lstrip(": ")
