"""The steps of flows: the only code that knows Prefect, MLflow and datasets.

Importing this package says to all three that nobody phones home, before any of them is imported; a variable that is
already set stays as it is. Where the environment has a proxy, it says that servers of this machine are asked without it.
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


def _ask_local_servers_directly() -> None:
    from urllib.request import getproxies_environment

    proxies = getproxies_environment()
    excepted = proxies.pop("no", "")
    if proxies and excepted != "*":
        listening = map(os.environ.get, ("PREFECT_SERVER_API_HOST", "MLFLOW_HOST"))
        local = ("127.0.0.1", "localhost", "::1", *listening)
        names = dict.fromkeys(filter(None, (*map(str.strip, excepted.split(",")), *local)))
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(names)


if any(_name.lower().endswith("_proxy") for _name in os.environ):
    _ask_local_servers_directly()
