"""Servers of one machine: Prefect, MLflow and workers, their deployments, and what the machine can run."""
