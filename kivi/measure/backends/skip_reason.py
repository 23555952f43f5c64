"""Skip reasons: what could not be run, told from what failed."""

from __future__ import annotations

import mlx.core as mx

from kivi.backends import BackendError


def failed_or_not_run(error: Exception, *, own: bool) -> dict[str, str]:
    """Return the field of a record that holds ``error``: ``not_run`` for a shape that MLX rejects on a GPU, else ``failed``.

    MLX's operations reject some shapes on a GPU with an error of a built-in class. On a CPU they take every shape of a cache,
    and errors of other classes are this project's: both are failures.

    Args:
        error: What was raised.
        own: Whether a kernel of this project ran, which takes every shape.
    """
    if isinstance(error, BackendError):
        return {"failed": str(error)}
    skipped = not own and type(error) in {RuntimeError, ValueError} and on_gpu()
    return {"not_run" if skipped else "failed": f"{type(error).__name__}: {error}"}


def not_run(reason: str) -> str:
    """Return a backend's ``reason`` for not being available as what was not run and why; some reasons begin so."""
    return reason if reason.startswith("not run") else f"not run: {reason}"


def on_gpu() -> bool:
    """Return whether MLX's operations run on a GPU by default."""
    return bool(mx.default_device() == mx.gpu)
