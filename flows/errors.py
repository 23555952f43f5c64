"""Which errors need no traceback: those that a user can mend, whose message says how, and those that the user asked for."""

from __future__ import annotations

import errno
import os
import re
import traceback

# By name, since a class that was never imported was never raised, and importing all of them takes seconds.
USAGE = frozenset(
    {
        "kivi.attention.AttentionError",
        "kivi.backends.BackendError",
        "kivi.fit.FitError",
        "kivi.models.loading.ModelError",
        "kivi.open_files.OpenFilesError",
        "kivi.spec.SpecError",
        "tasks.tracking.baseline.BaselineError",
        "tasks.config.ConfigError",
        "tasks.prompts.sources.PromptSetError",
        "tasks.run.result_files.StoreError",
        "tasks.tune.answer.TuneError",
        "tasks.tracking.schema.TrackingError",
    }
)


def is_usage(error: BaseException) -> bool:
    """Return whether ``error`` is bad usage, a bad configuration, or a folder that cannot be used."""
    return any(f"{kind.__module__}.{kind.__qualname__}" in USAGE for kind in type(error).__mro__)


def sentence(error: BaseException) -> str:
    """Return what to tell a user who can mend ``error``; nothing where a traceback says more."""
    if is_usage(error):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # ours are short: it was given
        return f"{error.filename}: {error.strerror}; choose a shorter name"
    return _database(error) or _prefect_setting(error)


def _database(error: BaseException) -> str:
    """Return the sentence for what sqlite could not do for MLflow (a full disk, say), nothing for any other error."""
    raised = re.search(r"\(sqlite3\.OperationalError\) ([^\n\[]+)", str(error))
    return f"MLflow's database: {raised.group(1).strip()}; mend it and run again: what is finished is kept" if raised else ""


def _prefect_setting(error: BaseException) -> str:
    """Return the sentence for a setting of Prefect that cannot be used, nothing for any other error.

    Prefect reads its settings, from the environment and its profile, when it is imported, and raises what pydantic found.
    """
    from pydantic import ValidationError

    from kivi.spec import reason

    frames = traceback.walk_tb(error.__traceback__)
    if not any(frame.f_globals.get("__name__") == "pydantic_settings.main" for frame, _ in frames):
        return ""
    if not isinstance(error, ValidationError):  # of a value that has to be JSON
        return f"Prefect's settings: {error}; correct it in the environment or Prefect's profile, or unset it"
    first = error.errors()[0]
    field = "_".join(str(part) for part in first["loc"])
    given = (name for name, value in os.environ.items() if name.startswith("PREFECT_") and value == first["input"])
    name = next((name for name in given if name.endswith(field.upper())), f"Prefect's setting {field}")
    return f"{name}={reason(first)}; correct it, or unset it for Prefect's default"
