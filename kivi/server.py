"""``kivi.server``: mlx-lm's ``mlx_lm.server`` with ``--cache SPEC`` (:mod:`kivi.commands`)."""

from __future__ import annotations

from kivi.commands import run


def main() -> None:
    """Run the command on this process's arguments."""
    run("server")


if __name__ == "__main__":
    main()
