"""The MLflow store of a tracking folder: nights and checks as runs, the baseline, and the upkeep of the store."""
