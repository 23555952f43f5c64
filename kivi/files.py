"""Files that are there whole or not at all, whatever kills the process that writes them."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, content: str | bytes) -> None:
    """Write ``content`` to a new file beside ``path``, have it on disk, and rename it, which replaces ``path`` in one step.

    Several processes may write the same path: the last one wins, and readers see one content or the other.

    Args:
        path: The file, in a folder that exists.
        content: Text is written in UTF-8.

    Raises:
        OSError: the disk is full, the folder is read-only or the like; what was at ``path`` still is.
    """
    draft = path.with_name(f".{path.stem}-{uuid4().hex[:12]}.draft")
    try:
        with draft.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
