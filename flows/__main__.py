"""Where the ``kivi`` command begins: signals are heard before anything that takes time is imported."""

from __future__ import annotations

from flows import interruption


def main() -> None:
    """Run the command line: 0 passed, 1 a regression or a failed cell, 2 bad usage or configuration, 130 or 143 interrupted."""
    interruption.listen()
    try:
        from flows.cli.app import app

        app()
    finally:
        interruption.settle()


if __name__ == "__main__":
    main()
