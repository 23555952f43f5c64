"""The folder of finished results: one JSON file a result, found by its key.

A file is there whole or not at all, whatever kills the process that writes it. What is in the folder and is not a result of
the asked key is a miss with a warning, because measuring again mends it; what the operating system refuses is an error.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from kivi.files import write_whole
from kivi.measure.candidate import Candidate
from kivi.measure.records import Record
from kivi.measure.results import CellResult, Throughput
from kivi.measure.sensitivity import Sensitivity

logger = logging.getLogger(__name__)


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

    def read(self, key: str, kind: type[Result]) -> Result | None:
        """Return the result called ``key``, or None when there is none, or none that can be used.

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
            result = kind.model_validate_json(text)
        except ValidationError as error:
            logger.warning("%s is truncated or not a result of this version, measuring again: %s", path, _first(error))
            return None
        if result.cell_key != key:
            logger.warning("%s holds the result of another cell, %s, measuring again", path, result.cell_key)
            return None
        return result

    def write(self, result: CellResult | ThroughputResult | Sensitivity | Candidate) -> Path:
        """Write ``result`` under its key, whole or not at all, replacing what was there.

        Raises:
            StoreError: the disk is full, the folder is read-only or the like; what was there before still is.
        """
        path = self.path(result.cell_key)
        try:
            write_whole(path, result.model_dump_json(indent=1))
        except OSError as error:
            raise self._refused("written to", error) from error
        return path

    def _refused(self, verb: str, error: OSError) -> StoreError:
        return StoreError(
            f"results folder {str(self.folder)!r} cannot be {verb}: {error.strerror or error}; "
            "free space, mend its permissions or choose another folder"
        )


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".lstrip(": ")
