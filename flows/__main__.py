"""Where the ``kivi`` command begins: signals are heard before anything that takes time is imported."""

from __future__ import annotations

import sys

from flows import interruption, plain_output
from flows.errors import sentence


def main() -> None:
    """Run the command line: 0 passed, 1 a regression or a failed cell, 2 bad usage or configuration, 130 or 143 interrupted."""
    interruption.listen()
    plain_output.allow()
    try:
        try:
            from flows.cli.app import app
        except Exception as error:
            if not (said := sentence(error)):
                raise
            sys.stderr.write(f"kivi: {said}\n")
            sys.exit(2)
        app()
    finally:
        interruption.settle()


if __name__ == "__main__":
    main()
