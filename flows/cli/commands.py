"""What the commands of ``kivi`` share: options, exit codes, how a flow is run and how an error becomes a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flows import interruption
from flows.cli.output import print_line
from flows.errors import sentence

PASSED, FAILED, USAGE = 0, 1, 2

TrackingDir = Annotated[Path, typer.Option("--tracking-dir", help="Folder of the MLflow store, results and reports.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, all else on stderr.")]
MLRUNS = Path("mlruns")


@contextmanager
def sentences() -> Iterator[None]:
    """Turn what a user can mend into one sentence on stderr and exit code 2; all else keeps its traceback.

    After Ctrl-C or SIGTERM the command ends here, whether the block raised or something in it took the exception.
    """
    try:
        yield
    except Exception as error:
        from tasks.sanitize import visible

        interruption.settle()
        if not (said := sentence(error)):
            raise
        sys.stderr.write(f"kivi: {visible(said)}\n")
        raise typer.Exit(USAGE) from None
    finally:
        interruption.settle()


def pinned(model: str) -> str:
    """Return ``model``, a Hugging Face id with its commit, which is printed if it was not given.

    Raises:
        ModelError: there is no such model, or nobody knows its commit.
    """
    from kivi.models import find_commit
    from tasks.config import split_model

    name, revision = split_model(model)
    commit = find_commit(name, revision)
    if commit in (None, revision):
        return model
    print_line(Console(stderr=True), f"{name} is at commit {commit}; {name}@{commit} will be the same weights another day")
    return f"{name}@{commit}"


def run_flow(flow: Callable[[], Any]) -> Any:
    """Run a flow with progress on stderr; return what it came to, whether it passed or not.

    Raises:
        BaseException: what stopped the flow before it had a verdict.
    """
    from flows.cli.progress import Progress, logging_to
    from flows.progress import listening
    from flows.serve.temporary_server import reachable

    console = Console(stderr=True)
    with Progress(console) as shown, reachable(), logging_to(console), listening(shown):
        state = flow()
    result = state.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        raise result
    return result
