"""Nights that are measured and not yet logged: kept in the tracking folder until the store has them.

What was measured takes hours and logging takes seconds, so a store that is away for a while must cost neither a night nor a
second measurement: the next run that reaches the store logs what was left.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import ValidationError

from kivi.files import write_whole
from tasks.config import Config, NightlyConfig
from tasks.paths import PENDING
from tasks.run.night import Night
from tasks.run.result_files import StoreError

logger = logging.getLogger(__name__)


class PendingNight(Config):
    """A night with what it is judged by."""

    night: Night
    config: NightlyConfig


def keep(tracking_dir: Path, night: Night, config: NightlyConfig) -> None:
    """Write a night down, whole or not at all.

    Raises:
        StoreError: the folder cannot be written.
    """
    path = _path(tracking_dir, night)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, PendingNight(night=night, config=config).model_dump_json())
    except OSError as error:
        raise StoreError(f"{path.parent} cannot be written to: {error.strerror}; free space or mend its permissions") from error


def forget(tracking_dir: Path, night: Night) -> None:
    """Remove a night that the store has."""
    _path(tracking_dir, night).unlink(missing_ok=True)


def left_over(tracking_dir: Path, other_than: Night) -> list[PendingNight]:
    """Return the nights that earlier runs could not log, oldest first."""
    found = []
    for path in sorted((tracking_dir / PENDING).glob("*.json"), key=lambda path: path.stat().st_mtime):
        if path == _path(tracking_dir, other_than):
            continue
        try:
            found.append(PendingNight.model_validate_json(path.read_bytes()))
        except ValidationError as error:
            logger.warning("%s is no night of this version and is not logged: %s", path, error.errors()[0]["msg"])
    return found


def _path(tracking_dir: Path, night: Night) -> Path:
    return tracking_dir / PENDING / f"{night.key}.json"
