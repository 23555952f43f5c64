"""What could not be run, told from what failed."""

from __future__ import annotations

import mlx.core as mx

from kivi.backends import BackendError


def file_error(error: Exception, *, own: bool) -> dict[str, str]:
    """Return how a record names ``error``: as a failure, or as what MLX itself refused and nobody could run.

    MLX's operations refuse some shapes on a GPU, by an error of a built-in class. On a CPU they take all that a cache makes of
    itself, and an error of any other class is this project's own: both are failures.

    Args:
        error: What was raised.
        own: Whether a kernel of this project ran, which may refuse nothing.
    """
    if isinstance(error, BackendError):
        return {"failed": str(error)}
    refused = not own and type(error) in {RuntimeError, ValueError} and on_gpu()
    return {"not_run" if refused else "failed": f"{type(error).__name__}: {error}"}


def not_run(reason: str) -> str:
    """Return a backend's ``reason`` for not being available as what was not run and why; some reasons begin so."""
    return reason if reason.startswith("not run") else f"not run: {reason}"


def on_gpu() -> bool:
    """Return whether MLX's operations run on a GPU by default."""
    return bool(mx.default_device() == mx.gpu)
