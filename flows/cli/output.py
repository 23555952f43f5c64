"""How the commands of ``kivi`` print: lines and tables for a person, JSON for a program."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import Box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tasks.sanitize import visible

LINES = Box("    \n    \n────\n    \n────\n────\n    \n    \n")  # a line below the header and each section
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


def print_link(console: Console, name: str, shown: str, address: str) -> None:
    """Print where to look: on a terminal a short text to click on, elsewhere the address."""
    if console.is_terminal:
        console.print(Text.assemble(f"{name:8}", (visible(shown), f"underline link {address}")), soft_wrap=True)
    else:
        print_line(console, f"{name:8}{address}")


def table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[str] = (),
    section: Callable[[Sequence[str]], str] = lambda row: "",  # noqa: ARG005
) -> Table:
    """Return a table whose verdicts are coloured.

    Args:
        title: What is above it.
        header: The names of its columns, broken where a narrow terminal should break them.
        rows: Its cells.
        numbers: The columns that are flush right.
        section: What rows have in common between two lines.
    """
    shown = Table(title=Text(visible(title), style="bold"), title_justify="left", box=LINES, padding=0, show_edge=False)
    for name in header:
        shown.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for _, members in itertools.groupby(rows, section):
        for row in members:
            shown.add_row(*[Text(visible(text), style=STYLES.get(text.partition(":")[0], "")) for text in row])
        shown.add_section()
    return shown


def fits(console: Console, table: Table) -> bool:
    """Return whether no text of a table is broken on this console."""
    return Measurement.get(console, console.options.update(width=10_000), table).maximum <= console.width
