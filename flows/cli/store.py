"""``kivi store``: backups, retention and upgrades of the local store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flows.cli.commands import MLRUNS, AsJson, TrackingDir, sentences
from flows.cli.output import print_json, print_line

if TYPE_CHECKING:
    from tasks.config import Config

MEGABYTE = 1_000_000

app = typer.Typer(help="Back up, restore, prune and upgrade the local MLflow store.", no_args_is_help=True)


@app.command()
def backup(
    to: Annotated[Path | None, typer.Option(help="New folder; backups/TIME in the tracking folder by default.")] = None,
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Copy database and artefacts, as of one moment; nights and MLflow's server may run meanwhile.

    Example: kivi store backup /backups/kivi-2026-12-01
    """
    with sentences():
        from tasks.tracking.backup import back_up

        made = back_up(tracking_dir, to)
    _show(made, f"{made.folder}: {made.runs} runs, {made.files} files, {made.bytes / MEGABYTE:.1f} MB", as_json)


@app.command()
def restore(
    backup: Annotated[Path, typer.Argument(metavar="BACKUP", help="Folder of a backup.")],
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Put a backup where no store is; move a damaged one away first.

    Example: kivi store restore /backups/kivi-2026-12-01
    """
    with sentences():
        from tasks.tracking.backup import restore as put

        made = put(backup, tracking_dir)
    _show(made, f"{tracking_dir}: holds {made.runs} runs as of {made.made:%Y-%m-%d %H:%M} UTC", as_json)


@app.command()
def prune(
    keep_days: Annotated[int, typer.Option(min=1, max=36_500, help="Days that every night keeps its artefacts.")] = 90,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, say what would be.")] = False,
    tracking_dir: TrackingDir = MLRUNS,
    as_json: AsJson = False,
) -> None:
    """Remove old nights' artefacts; metrics, baselines and pinned nights stay.

    Example: kivi store prune --keep-days 30 --dry-run
    """
    with sentences():
        from tasks.tracking.backup import require_store
        from tasks.tracking.retention import prune as remove
        from tasks.tracking.store import writer

        require_store(tracking_dir)
        with writer(tracking_dir) as store:
            pruned = remove(store, keep_days, dry_run=dry_run)
    verb = "would go" if dry_run else "went"
    lines = [f"artefacts of {len(pruned.runs)} runs {verb}, {pruned.bytes / MEGABYTE:.1f} MB", *pruned.kept]
    _show(pruned, "\n".join(lines), as_json)


@app.command()
def upgrade(tracking_dir: TrackingDir = MLRUNS, as_json: AsJson = False) -> None:
    """Bring the database to the installed MLflow's schema, after a backup.

    Example: kivi store upgrade
    """
    with sentences():
        from tasks.tracking.upgrade import upgrade as migrate

        upgraded = migrate(tracking_dir)
    _show(upgraded, upgraded.sentence, as_json)


def _show(result: Config, text: str, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    for line in text.splitlines():
        print_line(Console(), line)
