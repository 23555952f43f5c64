"""Which errors a user can mend: their message says what is wrong and what to do, so a traceback would only be in the way."""

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
