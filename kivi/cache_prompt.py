"""``kivi.cache_prompt``: mlx-lm's ``mlx_lm.cache_prompt`` with ``--cache SPEC`` (:mod:`kivi.commands`)."""

from __future__ import annotations

from kivi.commands import run


def main() -> None:
    """Run the command on this process's arguments."""
    run("cache_prompt")


if __name__ == "__main__":
    main()
