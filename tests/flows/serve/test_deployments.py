"""prefect.yaml without a server: what it deploys is described, and is what the flows take."""

from __future__ import annotations

import inspect
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from flows.serve.deployments import load, read
from tasks.config import NightlyConfig, load_config

PROJECT = Path(__file__).parents[3]
ENTRIES = {entry["name"]: entry for entry in read(PROJECT)}


def schema(name: str) -> dict[str, Any]:
    return load(ENTRIES[name]["entrypoint"]).parameters.model_dump_for_openapi()


def test_a_nightly_without_parameters_runs_the_standard_matrix_and_the_form_shows_it() -> None:
    entry = ENTRIES["nightly"]
    assert "parameters" not in entry
    standard = load_config(PROJECT / "flows" / "configs" / "nightly.yaml")
    assert inspect.signature(load(entry["entrypoint"]).fn).parameters["config"].default == standard
    shown = schema("nightly")["properties"]["config"]["default"]
    assert NightlyConfig.model_validate(json.loads(json.dumps(shown))) == standard
    assert "required" not in schema("nightly")


@pytest.mark.parametrize("name", ENTRIES)
def test_deployments_are_described_versioned_and_tagged(name: str) -> None:
    entry = ENTRIES[name]
    assert entry["description"].strip() and entry["tags"]
    assert entry["version"] == version("kivi-mlx")


@pytest.mark.parametrize("name", ENTRIES)
def test_every_parameter_says_what_it_is(name: str) -> None:
    found = schema(name)
    for owner in (found, *found["definitions"].values()):
        for field, about in owner.get("properties", {}).items():
            described = "description" in about or "$ref" in about
            assert described, f"{owner.get('title', name)}.{field} has no description"


@pytest.mark.parametrize("name", ENTRIES)
def test_a_flow_takes_the_parameters_that_its_deployment_gives(name: str) -> None:
    given = ENTRIES[name].get("parameters", {})
    assert set(given) <= set(schema(name)["properties"])
    if set(schema(name).get("required", ())) <= set(given):
        load(ENTRIES[name]["entrypoint"]).validate_parameters(given)
