"""``kivi fit``: which caches fit into a memory, and how far they go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from flows.cli.commands import FAILED, AsJson, sentences
from flows.cli.output import print_json, print_line, result_console, table

if TYPE_CHECKING:
    from rich.console import Console

    from kivi.fit import Fit

USUAL = (
    "full",
    "mlx-quantized:bits=8,group=64",
    "mlx-quantized:bits=4,group=64",
    "kivi:bits=8,group=64,residual=0,rotate=both",
    "kivi:key_bits=4,value_bits=3,group=64,sinks=64,rotate=both",
    "kivi:key_bits=3,value_bits=2,group=64,sinks=64,rotate=both",
)
HEADER = ("cache", "bytes\na token", "bytes", "peak", "longest\ncontext")


def fit(
    model: Annotated[str, typer.Argument(help="embedded, a folder in mlx-lm's format, or a Hugging Face id, ID[@REVISION].")],
    memory: Annotated[str, typer.Option(help="Memory that MLX may use, e.g. 24GB or 16GiB.")],
    context: Annotated[int | None, typer.Option(min=1, help="Tokens a sequence; the model's longest, at most 32,768.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of equal length.")] = 1,
    spec: Annotated[
        list[str] | None, typer.Option("--spec", help="KIND[:key=value,...]; may be repeated. Usual caches by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Weights: stored, or dequantised in float32, float16 or bfloat16.")] = "stored",
    device: Annotated[str | None, typer.Option(help="cpu or gpu; where MLX runs here by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what fits into a memory without running the model: weights, cache, peak of a prefill, longest context.

    Example: kivi fit mlx-community/Llama-3.1-8B-Instruct-4bit --memory 12GB
    """
    with sentences():
        from kivi.fit import Device, FitError, read_bytes
        from kivi.fit import fit as answer
        from kivi.models.skeleton import SkeletonDtype
        from kivi.spec import CacheSpec
        from tasks.config import split_model

        name, revision = split_model(model)
        found = answer(
            name,
            read_bytes(memory),
            [CacheSpec.parse(text) for text in spec or USUAL],
            context=context,
            batch=batch,
            revision=revision,
            dtype=_one_of(SkeletonDtype, "dtype", dtype),
            device=None if device is None else _one_of(Device, "device", device),
        )
        if found.refused and (spec or not found.rows):
            raise FitError(next(iter(found.refused.values())))
    if as_json:
        print_json(found)
    with result_console(as_json) as console:
        _show(console, found)
    raise typer.Exit(FAILED if context is not None and not any(row.fits for row in found.rows) else 0)


def _show(console: Console, found: Fit) -> None:
    from kivi.fit import show_bytes

    sequences = "1 sequence" if found.batch == 1 else f"{found.batch} sequences"
    taken, memory = show_bytes(found.weight_bytes), show_bytes(found.memory_bytes)
    print_line(console, f"{found.model} on the {found.device.upper()}: weights {taken} of {memory}")
    title = f"{sequences} of {found.context:,} tokens"
    rows = [
        (
            row.spec.text,
            f"{row.bytes_per_token:,.0f}",
            show_bytes(row.cache_bytes),
            show_bytes(row.peak_bytes),
            f"{row.longest_context:,}" if row.longest_context else "none",
        )
        for row in found.rows
    ]
    console.print(table(title, HEADER, rows, numbers=HEADER[1:], section=lambda row: row[0].partition(":")[0]))
    print_line(console, "bytes: exact, of the cache after the prompt; peak: estimated, weights included")
    if too_large := [row.spec.text for row in found.rows if not row.fits]:
        print_line(console, f"does not fit: {', '.join(too_large)}")
    if found.model_context and any(row.longest_context == found.model_context for row in found.rows):
        print_line(console, f"{found.model_context:,} tokens is the model's own limit")
    for text, why in found.refused.items():
        print_line(console, f"{text}: {why}")


def _one_of(kind: object, name: str, text: str) -> Any:
    """Return ``text``, which must be one of the values of a ``Literal``.

    Raises:
        FitError: it is none.
    """
    from kivi.fit import FitError

    if text not in get_args(kind):
        raise FitError(f"{name}={text!r}: expected one of {', '.join(get_args(kind))}")
    return text
