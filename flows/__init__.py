"""What runs: one short file a flow, and the command line."""

import tasks  # noqa: F401  first: it sets the environment that Prefect and MLflow read when they are imported
