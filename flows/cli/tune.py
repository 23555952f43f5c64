"""``kivi tune``: which cache for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.checks import read
from flows.cli.commands import MLRUNS, AsJson, TrackingDir, pinned, run_flow, sentences

Column = Annotated[str | None, typer.Option(help="Column that holds the text, of both prompt sets where they are files.")]


def tune(
    model: Annotated[
        str,
        typer.Argument(help="embedded, a folder in mlx-lm's format, or a Hugging Face id: ID@COMMIT, or ID for its latest."),
    ],
    prompts: Annotated[
        str | None, typer.Argument(help="Judged on these; by default humaneval, calibrated on topics (Python's reference).")
    ] = None,
    calibrate: Annotated[
        str | None, typer.Option(help="Prompt set to calibrate on; by default rows of PROMPTS that are not judged on.")
    ] = None,
    column: Column = None,
    kl: Annotated[float | None, typer.Option("--kl", help="Largest mean KL in nats: find the smallest cache within.")] = None,
    bytes_per_token: Annotated[float | None, typer.Option(help="Most bytes a token: find the best cache within.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Most bytes of weights and cache, e.g. 16GB: find the best cache within.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens at which bytes are counted.", show_default="4096")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences that the memory is for.", show_default="1")] = None,
    effort: Annotated[str | None, typer.Option(help="low, default or high.", show_default="default")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the order of calibration rows.", show_default="0")] = None,
    settings: Annotated[
        Path | None, typer.Option("--settings", help="YAML of further fields, as in Prefect's form; docs/tune.md lists them.")
    ] = None,
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Find the KV cache for a model: the smallest of each tier, or the best within a budget.

    Example: kivi tune embedded
    """
    with sentences():
        from flows.cli.results import finish
        from flows.tune import require_tunable
        from flows.tune import tune as flow
        from tasks.tracking.store import require_usable
        from tasks.tune.config import TuneConfig

        require_usable(tracking_dir)
        given: dict[str, Any] = {
            "prompts": _prompts(prompts, column),
            "calibrate": _prompts(calibrate, column),
            "kl": kl,
            "bytes_per_token": bytes_per_token,
            "memory": memory,
            "context": context,
            "batch": batch,
            "effort": effort,
            "seed": seed,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        config = read(TuneConfig, {"model": pinned(model), **fields}, settings)
        require_tunable(config)
        result = run_flow(lambda: flow(config, tracking_dir.resolve(), return_state=True))
    finish(result, tracking_dir, as_json)


def _prompts(source: str | None, column: str | None) -> dict[str, str | None] | None:
    """Return the fields of a prompt set; the built-in ones have no column to choose."""
    from tasks.config import BUILT_IN

    if source is None:
        return None
    return {"source": source, "column": None if source in BUILT_IN else column}
