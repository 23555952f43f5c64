"""Compare backends with `kivi` alone, and write the typed result: for machines that have an accelerator and no tracker.

    python -m kivi.measure.backends kivi:bits=2 kivi:bits=4 --out comparison.json

`kivi import comparison.json` logs it later, where the tracker is. The file is written after every stage, so that what was
measured is kept when the machine is taken away.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kivi.measure import MeasureError
from kivi.measure.backends.comparison import ComparisonResult, ComparisonSettings, check_comparable, compare_backends
from kivi.measure.monitor import Monitor
from kivi.measure.settings import read_settings
from kivi.models import EMBEDDED, ModelError, load_model
from kivi.spec import CacheSpec, SpecError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 when parity held, 1 when it did not. It exits with 2 when it cannot begin."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        specs = [CacheSpec.parse(text) for text in options.specs]
        for spec in specs:
            check_comparable(spec)
        settings = read_settings(options.settings, ComparisonSettings)
        if not options.out.parent.is_dir():
            raise MeasureError(f"out {str(options.out)!r}: its folder is not there")
        model = None if options.model == "none" else load_model(options.model)
    except (SpecError, ModelError, MeasureError) as error:
        parser.error(str(error))

    def save(result: ComparisonResult) -> None:
        result.write(options.out)

    result = compare_backends(specs, settings=settings, model=model, monitor=Monitor(_report), save=save)
    save(result)
    for line in [*result.problems, *result.not_run]:
        print(line, file=sys.stderr)  # noqa: T201  the verdict
    return 0 if result.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kivi.measure.backends", description="Compare backends on cache specs.")
    parser.add_argument("specs", nargs="*", default=["kivi:bits=2"], help="KIND[:key=value,...]; kivi:bits=2 by default")
    parser.add_argument("--out", type=Path, required=True, help="file for the result")
    parser.add_argument("--model", default=EMBEDDED, help="embedded, a folder in mlx-lm's format, or none")
    parser.add_argument("--settings", type=Path, help="JSON file of ComparisonSettings, see docs/checks.md")
    return parser


def _report(stage: str, done: int, total: int) -> None:
    print(f"{stage}: {done} of {total}", file=sys.stderr, flush=True)  # noqa: T201  progress


if __name__ == "__main__":
    sys.exit(main())
