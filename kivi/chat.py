"""``kivi.chat``: mlx-lm's ``mlx_lm.chat`` with ``--cache SPEC`` (:mod:`kivi.commands`)."""

from __future__ import annotations

from kivi.commands import run


def main() -> None:
    """Run the command on this process's arguments."""
    run("chat")


if __name__ == "__main__":
    main()
