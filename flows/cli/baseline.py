"""``kivi baseline``: which earlier nights a night is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flows.cli.commands import MLRUNS, AsJson, TrackingDir, sentences
from flows.cli.output import print_json, print_line

if TYPE_CHECKING:
    from tasks.tracking.baseline import Marked
    from tasks.tracking.store import TrackingStore

app = typer.Typer(help="Choose and show the nights that a night is compared with.", no_args_is_help=True)

NIGHT = typer.Argument(
    metavar="NIGHT", help="A run id, a night's scheduled start as shown, or last: the newest that was no evaluation."
)
NightName = Annotated[str, NIGHT]


@app.command("set")
def set_(night: NightName = "last", tracking_dir: TrackingDir = MLRUNS, as_json: AsJson = False) -> None:
    """Make a finished night the baseline, also one that failed: its changes are accepted. The next good night follows it.

    Example: kivi baseline set 2026-12-01
    """
    with sentences():
        from tasks.tracking.baseline import set_baseline

        with _store(tracking_dir) as store:
            marked = set_baseline(store, night)
    _show([marked], as_json)


@app.command()
def pin(
    night: Annotated[str | None, NIGHT] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove all pins instead.")] = False,
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Pin a finished night: every night is compared with it too, until another is pinned.

    Example: kivi baseline pin last
    """
    with sentences():
        from tasks.tracking.baseline import BaselineError, pin_baseline, unpin

        if remove and night is not None:
            raise BaselineError(f"--remove takes off all pins: leave {night!r} out")
        with _store(tracking_dir) as store:
            removed = unpin(store) if remove else 0
            marked = [] if remove else [pin_baseline(store, night or "last")]
    if remove and not as_json:
        print_line(Console(), f"{removed} pin{'' if removed == 1 else 's'} removed")
    else:
        _show(marked, as_json)


@app.command()
def show(tracking_dir: TrackingDir = MLRUNS, as_json: AsJson = False) -> None:
    """Show the nights that a night is compared with now, and for how many cells.

    Example: kivi baseline show
    """
    with sentences():
        from tasks.tracking.baseline import marked_nights

        with _store(tracking_dir) as store:
            marked = marked_nights(store)
    _show(marked, as_json)


@contextmanager
def _store(tracking_dir: Path) -> Iterator[TrackingStore]:
    """Open a store that is there: a folder's name that was mistyped makes no new one."""
    from tasks.run.result_transfer import between_machines
    from tasks.tracking.backup import require_store
    from tasks.tracking.store import writer

    if not between_machines():
        require_store(tracking_dir)
    with writer(tracking_dir) as store:
        yield store


def _show(marked: list[Marked], as_json: bool) -> None:
    if as_json:
        print_json(marked)
        return
    console = Console()
    for night in marked:
        print_line(console, f"{night.night}: {night.mark}, {night.cells} cells, run {night.run_id}")
        for sentence in night.left_out:
            print_line(console, f"  left out: {sentence}", "yellow")
    if not marked:
        print_line(console, "no night is marked: nights are judged by thresholds alone")
