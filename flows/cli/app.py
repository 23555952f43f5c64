"""The ``kivi`` command. What is slow to import is imported by the command that needs it."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flows.cli import baseline as cli_baseline
from flows.cli import checks as cli_checks
from flows.cli import store as cli_store
from flows.cli.commands import (
    FAILED,
    MLRUNS,
    PASSED,
    AsJson,
    TrackingDir,
    result_console,
    run_flow,
    sentences,
)

if TYPE_CHECKING:
    from flows.nightly import NightResult
    from tasks.config import NightlyConfig

app = typer.Typer(
    help="KIVI KV caches for MLX, and the nightly regression lab that measures them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_baseline.app, name="baseline")
app.add_typer(cli_store.app, name="store")
app.command()(cli_checks.compare)
app.command()(cli_checks.audit)

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
    config: Config = None, refresh: Refresh = False, tracking_dir: TrackingDir = MLRUNS, as_json: AsJson = False
) -> None:
    """Run the nightly regression: measure, track, gate, report."""
    with sentences():
        from tasks.config import load_config

        matrix = load_config(config or Path(str(files("flows") / "configs" / "nightly.yaml")))
        _check(matrix, tracking_dir)
        from tasks.run.plan import check_thresholds

        check_thresholds(matrix)
        from flows.nightly import nightly as flow

        result: NightResult = run_flow(lambda: flow(matrix, tracking_dir.resolve(), refresh, return_state=True))
    _finish(result, tracking_dir, as_json)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="embedded, a folder in mlx-lm's format, or a Hugging Face id as ID@COMMIT.")],
    prompts: Annotated[str, typer.Argument(help="humaneval, retrieval, a Hugging Face id, or a local file or folder.")],
    spec: Annotated[str, typer.Argument(help="KIND[:key=value,...], e.g. kivi:bits=2 or mlx-quantized:bits=4.")],
    column: Annotated[str | None, typer.Option(help="Column of the prompt set that holds the text.")] = None,
    split: Annotated[str, typer.Option(help="Split of the prompt set.")] = "train",
    limit: Annotated[int | None, typer.Option(help="Rows to take, from the first.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Matrix whose measure and thresholds are used.")] = None,
    refresh: Refresh = False,
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Evaluate one cache of one model on one prompt set."""
    with sentences():
        from pydantic import ValidationError

        from tasks.config import ConfigError, NightlyConfig, first_sentence, load_config

        base = load_config(config) if config else None
        fields: dict[str, Any] = {"source": prompts, "column": column, "split": split, "limit": limit}
        extra = {"measure": base.measure, "thresholds": base.thresholds} if base else {}
        try:
            matrix = NightlyConfig.model_validate({"models": [model], "prompt_sets": [fields], "specs": [spec], **extra})
        except ValidationError as error:
            raise ConfigError(first_sentence(error)) from None
        _check(matrix, tracking_dir)
        from flows.evaluate import evaluate as flow

        cell = (matrix.models[0], matrix.prompt_sets[0], matrix.specs[0], matrix.measure, matrix.thresholds)
        result: NightResult = run_flow(lambda: flow(*cell, tracking_dir.resolve(), refresh, return_state=True))
    _finish(result, tracking_dir, as_json)


@app.command("import")
def import_(
    result: Annotated[
        Path, typer.Argument(metavar="RESULT.json", help="A cell's result, a comparison or an audit, measured elsewhere.")
    ],
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Log a result that was measured where no tracker is."""
    with sentences():
        from flows.import_results import log_check, log_result, read_result
        from kivi.measure.results import CellResult

        read = read_result(result)
        if not isinstance(read, CellResult):
            cli_checks.finish(log_check(read, tracking_dir), tracking_dir, as_json)
        logged = log_result(read, tracking_dir)
    _finish(logged, tracking_dir, as_json)


@app.command()
def doctor(tracking_dir: TrackingDir = MLRUNS, as_json: AsJson = False) -> None:
    """Say what this machine can run, and what is missing."""
    with sentences():
        from rich.text import Text

        from flows.serve.doctor import examine

        findings = list(examine(tracking_dir))
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))  # noqa: T201  the result
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
    as_json: AsJson = False,
) -> None:
    """Serve MLflow on the local store, and print its links once it answers."""
    with sentences():
        from flows.serve.ui import links, serve

        where = links(tracking_dir, port)

        def show() -> None:
            if as_json:
                print(where.model_dump_json(), flush=True)  # noqa: T201  the result
                return
            for name, address in where.model_dump(exclude_none=True).items():
                Console().print(f"{name:8}{address}", soft_wrap=True, highlight=False, markup=False)

        code = serve(tracking_dir, port, show)
    raise typer.Exit(code)


def _check(matrix: NightlyConfig, tracking_dir: Path) -> None:
    """Find out before anything is started whether backends and models are there, and a store can be.

    Raises:
        BackendError: a backend that is required is not available.
        ModelError: a model cannot be loaded.
        TrackingError: what is measured could not be logged.
    """
    from kivi.models import check_model
    from tasks.run.plan import resolve_specs
    from tasks.tracking.store import require_usable

    require_usable(tracking_dir)
    resolve_specs(matrix)
    for model in matrix.models:
        check_model(model.name, model.revision)


def _finish(result: NightResult, tracking_dir: Path, as_json: bool) -> None:
    from flows.cli.terminal import as_json as jsonable
    from flows.cli.terminal import show

    with result_console(as_json) as console:
        show(console, result, tracking_dir)
        if as_json:
            print(json.dumps(jsonable(result, tracking_dir), indent=2))  # noqa: T201  the result
    raise typer.Exit(PASSED if result.verdict.passed else FAILED)


# Prefect's own lines would bury the table; what the project's code logs is shown by flows.cli.terminal.
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
