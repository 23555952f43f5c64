"""The steps of flows: the only code that knows Prefect, MLflow and datasets."""
