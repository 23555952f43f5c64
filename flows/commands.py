"""What the commands of ``kivi`` share: options, exit codes, and how an error becomes a sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

PASSED, FAILED, USAGE = 0, 1, 2

TrackingDir = Annotated[Path, typer.Option("--tracking-dir", help="Folder of the MLflow store, results and reports.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, all else on stderr.")]
MLRUNS = Path("mlruns")


@contextmanager
def sentences() -> Iterator[None]:
    """Turn what a user can mend into one sentence on stderr and exit code 2; all else keeps its traceback."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        from flows.errors import is_usage
        from tasks.escape import visible

        if not is_usage(error):
            raise
        sys.stderr.write(f"kivi: {visible(str(error))}\n")
        raise typer.Exit(USAGE) from None
