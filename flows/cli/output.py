"""How the commands of ``kivi`` print: lines and tables for a person, JSON for a program."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.sanitize import visible

STYLES = {
    **dict.fromkeys(("pass", "passed", "good"), "green"),
    **dict.fromkeys(("marginal", "warning"), "yellow"),
    **dict.fromkeys(("fail", "failed", "bad", "error"), "red"),
}


class _ResultConsole(Console):
    def on_broken_pipe(self) -> None:
        """Leave what happens to whoever prints; rich would end the process with exit code 1, which means a failed night."""
        raise BrokenPipeError


@contextmanager
def result_console(as_json: bool) -> Iterator[Console]:
    """Yield what shows a result, on stderr beside JSON. A reader that leaves, as ``| head -1`` does, changes no exit code."""
    try:
        yield _ResultConsole(stderr=as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends


def print_json(result: Any, indent: int | None = 2) -> None:
    """Print the result of a command for ``--json``."""
    from pydantic_core import to_jsonable_python

    print(json.dumps(to_jsonable_python(result), indent=indent))  # noqa: T201  the result


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print one line, however long, with control characters made visible."""
    console.print(Text(visible(text), style=style), soft_wrap=True)


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> Table:
    """Return a table whose verdicts are coloured; the columns called ``numbers`` are flush right."""
    shown = Table(title=Text(visible(title)), title_justify="left")
    for name in header:
        shown.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        shown.add_row(*[Text(visible(text), style=STYLES.get(text, "")) for text in row])
    return shown
