"""``kivi compare`` and ``kivi audit``: backends side by side, and one cache seen from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from flows.cli.commands import MLRUNS, AsJson, TrackingDir, pinned, run_flow, sentences

Loaded = TypeVar("Loaded")

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="embedded, a folder in mlx-lm's format, a Hugging Face id (ID@COMMIT, or ID for its latest), or none.",
        show_default="embedded",
    ),
]
Settings = Annotated[
    Path | None, typer.Option("--settings", help="YAML of further fields, as in Prefect's form; docs/checks.md lists them.")
]


def compare(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC", help="KIND[:key=value,...], e.g. kivi:bits=2.")],
    model: ModelName = None,
    settings: Settings = None,
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Compare this machine's backends with each other, on each cache by itself: parity with the definition, and speed.

    Caches are compared with each other by kivi evaluate.

    Example: kivi compare kivi:k4v3,g64 --model none
    """
    with sentences():
        from flows.cli.results import finish
        from flows.compare import compare as flow
        from flows.compare import require_comparable
        from tasks.run.compare import CompareConfig
        from tasks.tracking.store import require_usable

        require_usable(tracking_dir)
        config = read(CompareConfig, {"specs": specs, **_model(model)}, settings)
        require_comparable(config)
        result = run_flow(lambda: flow(config, tracking_dir.resolve(), return_state=True))
    finish(result, tracking_dir, as_json)


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
    """Audit one cache: its bytes, its memory, what it gives back, its kernels, its error along a decode.

    Example: kivi audit kivi:k4v3,g64,s64,hkv --check bytes
    """
    with sentences():
        from flows.audit import audit as flow
        from flows.audit import require_auditable
        from flows.cli.results import finish
        from tasks.run.audit import AuditConfig
        from tasks.tracking.store import require_usable

        require_usable(tracking_dir)
        config = read(AuditConfig, {"spec": spec, **({"checks": check} if check else {}), **_model(model)}, settings)
        require_auditable(config)
        result = run_flow(lambda: flow(config, tracking_dir.resolve(), return_state=True))
    finish(result, tracking_dir, as_json)


def _model(name: str | None) -> dict[str, str | None]:
    """Return the field that the option gives; none where it was not given, so that a file may give it."""
    return {} if name is None else {"model": None if name == "none" else pinned(name)}


def read(kind: type[Loaded], fields: dict[str, Any], settings: Path | None = None) -> Loaded:
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
