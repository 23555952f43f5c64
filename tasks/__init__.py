"""The steps of flows: the only code that knows Prefect, MLflow and datasets.

Importing this package says to all three that nobody phones home, before any of them is imported; a variable that is
already set stays as it is.
"""

from __future__ import annotations

import os

ENVIRONMENT = {
    "DO_NOT_TRACK": "true",  # Prefect looks for the word
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # A temporary server on a cold home folder creates its database first: 10 to 30 s, and Prefect's own limit is 20 s.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # else each new store prints its schema migrations
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # a bar for each small file
    "HF_HUB_DISABLE_TELEMETRY": "1",
}

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
