"""``kivi compare`` and ``kivi audit``: backends side by side, and one cache seen from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from flows.cli.commands import FAILED, MLRUNS, PASSED, AsJson, TrackingDir, result_console, run_flow, sentences

if TYPE_CHECKING:
    from flows.audit import Audited
    from flows.compare import Compared

Loaded = TypeVar("Loaded")

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="embedded, a folder in mlx-lm's format, a Hugging Face id as ID@COMMIT, or none.",
        show_default="embedded",
    ),
]
Settings = Annotated[
    Path | None, typer.Option("--settings", help="YAML of further fields, as in Prefect's form; docs/checks.md lists them.")
]


def compare(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="KIND[:key=value,...], e.g. kivi:bits=2.")],
    model: ModelName = None,
    settings: Settings = None,
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Compare the backends of this machine on caches: parity with the definition, and speed."""
    with sentences():
        from kivi.measure.backends.comparison import check_comparable
        from tasks.run.compare import CompareConfig
        from tasks.tracking.store import require_usable

        require_usable(tracking_dir)
        config = _read(CompareConfig, {"specs": specs, **_model(model)}, settings)
        for spec in config.specs:
            check_comparable(spec)
        _check_model(config.model)
        from flows.compare import compare as flow

        compared = run_flow(lambda: flow(config, tracking_dir.resolve(), return_state=True))
    finish(compared, tracking_dir, as_json)


def audit(
    spec: Annotated[str, typer.Argument(help="KIND[:key=value,...], e.g. kivi:bits=2 or kivi-roundtrip:bits=2.")],
    check: Annotated[
        list[str] | None, typer.Option("--check", help="Run this check only; may be repeated. docs/checks.md lists them.")
    ] = None,
    model: ModelName = None,
    settings: Settings = None,
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Audit one cache: its bytes, its memory, what it gives back, its kernels, its error along a decode."""
    with sentences():
        from kivi.backends import resolve
        from kivi.measure.audit import subject_of
        from tasks.run.audit import AuditConfig
        from tasks.tracking.store import require_usable

        require_usable(tracking_dir)
        config = _read(AuditConfig, {"spec": spec, **({"checks": check} if check else {}), **_model(model)}, settings)
        subject_of(config.spec, heads=1, head_dim=8)
        resolve(config.spec.backend)
        _check_model(config.model if config.needs_model else None)
        from flows.audit import audit as flow

        audited = run_flow(lambda: flow(config, tracking_dir.resolve(), return_state=True))
    finish(audited, tracking_dir, as_json)


def finish(result: Compared | Audited, tracking_dir: Path, as_json: bool) -> NoReturn:
    """Show what a comparison or an audit came to, and end with its exit code."""
    from flows.cli.terminal_checks import show_audit, show_comparison
    from flows.compare import Compared

    measured = result.result if isinstance(result, Compared) else result.report
    with result_console(as_json) as console:
        if isinstance(result, Compared):
            show_comparison(console, result, tracking_dir)
        else:
            show_audit(console, result, tracking_dir)
        if as_json:
            shown = {"logged": result.logged.model_dump(mode="json"), "result": measured.model_dump(mode="json")}
            print(json.dumps({"passed": measured.passed, **shown}, indent=2))  # noqa: T201  the result
    raise typer.Exit(PASSED if measured.passed else FAILED)


def _model(name: str | None) -> dict[str, str | None]:
    """Return the field that the option gives; none where it was not given, so that a file may give it."""
    return {} if name is None else {"model": None if name == "none" else name}


def _check_model(model: Any) -> None:
    from kivi.models import check_model

    if model is not None:
        check_model(model.name, model.revision)


def _read(kind: type[Loaded], fields: dict[str, Any], settings: Path | None) -> Loaded:
    """Return the configuration of ``fields``, which were given on the command line, and of the file.

    Raises:
        ConfigError: the file cannot be read, or a field cannot be used.
    """
    from pydantic import TypeAdapter, ValidationError

    from tasks.config import ConfigError, first_sentence, read_fields

    further = read_fields(settings) if settings else {}
    try:
        return TypeAdapter(kind).validate_python({**further, **fields})
    except ValidationError as error:
        raise ConfigError(first_sentence(error)) from None
