"""prefect.yaml on a real server: what is deployed is what the code takes, and what it would refuse is refused there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flows.serve.deployments import drift
from flows.serve.doctor import examine

PROJECT = Path(__file__).parents[2]


def test_those_who_share_the_lab_run_in_one_process(lab: Any, request: pytest.FixtureRequest) -> None:
    assert "PYTEST_XDIST_WORKER" not in os.environ or request.node.nodeid.endswith("@lab")


def test_what_is_deployed_is_what_the_code_takes(lab: Any) -> None:
    assert list(drift(lab.api, PROJECT)) == []


def test_a_deployment_of_other_code_is_noticed(lab: Any) -> None:
    deployment = lab.deployment("evaluate/evaluate")
    older = json.loads(json.dumps(deployment["parameter_openapi_schema"]))
    del older["properties"]["refresh"]
    lab.patch(f"/deployments/{deployment['id']}", {"parameter_openapi_schema": older})
    try:
        assert [sentence.split(":")[0] for sentence in drift(lab.api, PROJECT)] == ["evaluate"]
    finally:
        lab.patch(f"/deployments/{deployment['id']}", {"parameter_openapi_schema": deployment["parameter_openapi_schema"]})


@pytest.mark.parametrize(
    ("name", "parameters", "field"),
    [
        (
            "nightly/nightly",
            {"config": {"specs": ["full"], "measure": {"score": {"length": 10}}}},
            "config.measure.score.length",
        ),
        ("nightly/nightly", {"config": {"specs": []}}, "config.specs"),
        ("nightly/nightly", {"config": {"specs": ["kiwi:bits=2"]}}, "config.specs"),
        ("nightly/nightly", {"config": {"specs": ["full"], "sepcs": 1}}, "sepcs"),
        ("nightly/nightly", {"refresh": "perhaps"}, "refresh"),
        ("evaluate/evaluate", {"spec": "kiwi:bits=2"}, "spec"),
        ("evaluate/evaluate", {"measure": {"deadline_s": 0}}, "measure.deadline_s"),
    ],
)
def test_the_server_refuses_a_bad_value_and_names_its_field(
    lab: Any, name: str, parameters: dict[str, Any], field: str
) -> None:
    answer = lab.post(f"/deployments/{lab.deployment(name)['id']}/create_flow_run", {"parameters": parameters})
    assert answer.status_code in {409, 422}, answer.text
    assert field in answer.text


def test_the_command_of_the_readme_runs_a_night_and_shows_it(lab: Any, tmp_path: Path, tiny_matrix: dict[str, Any]) -> None:
    options = ["-p", f"config={json.dumps(tiny_matrix)}", "-p", f"tracking_dir={json.dumps(str(tmp_path / 'mlruns'))}"]
    done = lab.prefect("deployment", "run", "nightly/nightly", *options, "--watch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Completed" in done.stdout
    (page,) = (tmp_path / "mlruns" / "reports").glob("*.html")
    assert "kivi-k2v2-g32-r32-mlx" in page.read_text()


def test_the_doctor_says_how_servers_and_deployments_are(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    found = {finding.name: finding for finding in examine(lab.tracking_dir)}
    names = ["make up: prefect", "make up: mlflow", "make up: worker", "make up: cells", "deployments"]
    assert [found[name].ok for name in names] == [True] * 5
    assert found["make up: mlflow"].text == lab.mlflow_address


def test_up_again_changes_nothing(lab: Any) -> None:
    before = lab.processes()
    done = lab.servers("up")
    assert done.returncode == 0, done.stderr
    assert lab.processes() == before


def test_servers_listen_on_this_machine_only(lab: Any) -> None:
    hosts = {
        connection.laddr.ip
        for name in ("prefect", "mlflow")
        for process in lab.tree(name)
        for connection in process.net_connections(kind="tcp")
        if connection.status == "LISTEN"
    }
    assert hosts == {"127.0.0.1"}
