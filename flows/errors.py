"""Which errors need no traceback: those that a user can mend, whose message says how, and those that the user asked for."""

from __future__ import annotations

# By name, since a class that was never imported was never raised, and importing all of them takes seconds.
USAGE = frozenset(
    {
        "kivi.attention.AttentionError",
        "kivi.backends.BackendError",
        "kivi.models.ModelError",
        "kivi.spec.SpecError",
        "tasks.baseline.BaselineError",
        "tasks.config.ConfigError",
        "tasks.sources.PromptSetError",
        "tasks.store.StoreError",
        "tasks.tracking_store.TrackingError",
    }
)


def is_usage(error: BaseException) -> bool:
    """Return whether ``error`` is bad usage, a bad configuration, or a folder that cannot be used."""
    return any(f"{kind.__module__}.{kind.__qualname__}" in USAGE for kind in type(error).__mro__)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def interruption(error: BaseException) -> KeyboardInterrupt | None:
    """Return the Ctrl-C or SIGTERM that ``error`` is, or that was on its way out when ``error`` came up.

    Prefect's task engine, interrupted before it has made its task run, raises ``ValueError: Task run is not set`` instead.
    """
    at: BaseException | None = error
    while at is not None and not isinstance(at, KeyboardInterrupt):
        at = at.__cause__ or at.__context__
    return at
