"""What the tests of a store's long life share: when its nights begin, and what two stores are compared by."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime

FIRST = datetime(2026, 1, 1, 2, 0, tzinfo=UTC)  # days of logged nights are counted from here


def dump(path):
    with closing(sqlite3.connect(path)) as database:
        return list(database.iterdump())


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
