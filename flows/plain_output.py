"""Output where the terminal or file takes fewer characters than are printed: plain ones stand in for those that it lacks."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

PLAIN = {"×": "x", "→": "->", "–": "-", "—": "-", "…": "...", "“": '"', "”": '"', "‘": "'", "’": "'", "·": "-", "±": "+-"}
ERRORS = "kivi-plain"


def allow() -> None:
    """Have stdout and stderr print a plain character, or ``?``, for each that their encoding lacks."""
    codecs.register_error(ERRORS, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERRORS)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(map(_plain, lacking)), error.end


def _plain(character: str) -> str:
    """Return what stands in for one character: itself without accents, as PLAIN says, or ``?``."""
    stripped = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return PLAIN.get(character) or stripped or "?"
