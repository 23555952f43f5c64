"""The ``kivi`` command. What is slow to import is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flows.cli import baseline, checks, store, tune
from flows.cli.commands import FAILED, MLRUNS, PASSED, AsJson, TrackingDir, pinned, run_flow, sentences
from flows.cli.fit import fit
from flows.cli.output import print_json, print_line

if TYPE_CHECKING:
    from tasks.config import NightlyConfig

app = typer.Typer(
    help="KIVI KV caches for MLX, and the nightly regression lab that measures them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(baseline.app, name="baseline")
app.add_typer(store.app, name="store")
app.command()(checks.compare)
app.command()(checks.audit)
app.command()(fit)
app.command()(tune.tune)

Refresh = Annotated[bool, typer.Option("--refresh", help="Measure anew what was measured before.")]
Config = Annotated[Path | None, typer.Option("--config", help="Matrix to run, a YAML file; the standard one by default.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kivi {version('kivi-mlx')}")  # noqa: T201  the result
        raise typer.Exit


@app.callback()
def kivi(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that come before a command."""


@app.command()
def nightly(
    config: Config = None,
    refresh: Refresh = False,
    summary: Annotated[
        Path | None,
        typer.Option("--summary", help="File that gets verdict and table as Markdown, e.g. for a CI job."),
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="File that gets JUnit's XML, a test a cell.")] = None,
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Run the nightly regression: measure, track, gate, report.

    Example: kivi nightly --summary "$GITHUB_STEP_SUMMARY" --junit nightly.xml
    """
    with sentences():
        from tasks.config import load_config

        given = load_config(config) if config else None
        from flows.cli.results import finish, require_writable, write_summaries
        from flows.nightly import STANDARD
        from flows.nightly import nightly as flow
        from tasks.run.plan import check_thresholds

        matrix = given or STANDARD
        _check(matrix, tracking_dir)
        check_thresholds(matrix)
        for file in filter(None, (summary, junit)):
            require_writable(file)
        result = run_flow(lambda: flow(matrix, tracking_dir.resolve(), refresh, return_state=True))
        write_summaries(result, summary, junit)
    finish(result, tracking_dir, as_json)


@app.command()
def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="embedded, a folder in mlx-lm's format, or a Hugging Face id: ID@COMMIT, or ID for its latest."),
    ],
    prompts: Annotated[str, typer.Argument(help="humaneval, retrieval, a Hugging Face id, or a local file or folder.")],
    specs: Annotated[list[str], typer.Argument(metavar="SPEC", help="Caches: kivi:k4v3,g64 or KIND[:key=value,...].")],
    column: Annotated[str | None, typer.Option(help="Column of the prompt set that holds the text.")] = None,
    split: Annotated[str, typer.Option(help="Split of the prompt set.")] = "train",
    limit: Annotated[int | None, typer.Option(help="Rows to take, from the first.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Matrix whose measure and thresholds are used.")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Leave out the full cache and mlx-lm's nearest.")] = False,
    refresh: Refresh = False,
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Evaluate caches of one model on one prompt set, beside the full cache and mlx-lm's nearest.

    Example: kivi evaluate embedded humaneval kivi:k4v3,g64,s64,hkv kivi:k3v2,g64,s64,hkv
    """
    with sentences():
        from tasks.config import NightlyConfig, load_config

        base = load_config(config) if config else None
        fields: dict[str, Any] = {"source": prompts, "column": column, "split": split, "limit": limit}
        extra = {"measure": base.measure, "thresholds": base.thresholds} if base else {}
        matrix = checks.read(NightlyConfig, {"models": [pinned(model)], "prompt_sets": [fields], "specs": specs, **extra})
        from flows.cli.results import finish
        from flows.evaluate import compared
        from flows.evaluate import evaluate as flow

        _check(matrix, tracking_dir)
        if not alone:
            caches, left_out = compared(matrix.specs, matrix.models[0])
            for sentence in left_out:
                print_line(Console(stderr=True), sentence)
            matrix = matrix.model_copy(update={"specs": tuple(caches)})
        (model_,), (prompts_,), (first, *others) = matrix.models, matrix.prompt_sets, matrix.specs
        cells = (model_, prompts_, first, matrix.measure, matrix.thresholds, tracking_dir.resolve(), refresh, tuple(others))
        result = run_flow(lambda: flow(*cells, return_state=True))
    finish(result, tracking_dir, as_json)


@app.command("import")
def import_(
    result: Annotated[
        Path, typer.Argument(metavar="RESULT.json", help="A cell's result, a comparison or an audit, measured elsewhere.")
    ],
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Log a result that was measured where no tracker is.

    Example: kivi import cell.json
    """
    with sentences():
        from flows.cli.results import finish
        from flows.import_results import log_result, read_result

        logged = log_result(read_result(result), tracking_dir)
    finish(logged, tracking_dir, as_json)


@app.command()
def doctor(tracking_dir: TrackingDir = MLRUNS, as_json: AsJson = False) -> None:
    """Say what this machine can run, and what is missing.

    Example: kivi doctor
    """
    with sentences():
        from rich.text import Text

        from flows.serve.doctor import examine

        findings = list(examine(tracking_dir))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    console = Console(stderr=as_json)
    for finding in findings:
        mark, style = ("ok", "green") if finding.ok else ("no", "red" if finding.needed else "yellow")
        remedy = f" → {finding.remedy}" if finding.remedy else ""
        line = Text.assemble((f"{mark:3}", style), f"{finding.name}: {finding.text}", (remedy, "bold"))
        console.print(line, soft_wrap=True)
    raise typer.Exit(FAILED if any(finding.needed and not finding.ok for finding in findings) else PASSED)


@app.command()
def ui(
    tracking_dir: TrackingDir = MLRUNS,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1; links in reports name 5050.")] = 5050,
    open_page: Annotated[bool, typer.Option("--open", help="Open the latest night in the browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve MLflow on the local store, and print its links once it answers.

    Example: kivi ui --open
    """
    with sentences():
        from flows.serve.ui import links, serve

        where = links(tracking_dir, port)

        def show() -> None:
            if as_json:
                print_json(where, indent=None)
            else:
                for name, address in where.model_dump(exclude_none=True).items():
                    print_line(Console(), f"{name:8}{address}")
            sys.stdout.flush()
            if open_page:
                webbrowser.open(where.latest or where.nights)

        code = serve(tracking_dir, port, show)
    raise typer.Exit(code)


def _check(matrix: NightlyConfig, tracking_dir: Path) -> None:
    """Raise before anything is started when a backend, a model or text is missing, or no store could be used."""
    from flows.matrix import require_runnable, require_text
    from tasks.tracking.store import require_usable

    require_usable(tracking_dir)
    require_runnable(matrix)
    require_text(matrix)


# Prefect's own lines would bury the table; what the project's code logs is shown by flows.cli.progress.
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
