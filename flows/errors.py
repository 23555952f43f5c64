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


def was_interrupted(error: BaseException) -> bool:
    """Return whether ``error`` is Ctrl-C, or came up while Ctrl-C was on its way out.

    Prefect's task engine, interrupted before it has made its task run, raises ``ValueError: Task run is not set`` instead.
    """
    while not isinstance(error, KeyboardInterrupt):
        if (before := error.__cause__ or error.__context__) is None:
            return False
        error = before
    return True
