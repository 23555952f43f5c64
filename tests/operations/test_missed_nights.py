"""After an outage the server starts all missed nights at once: those that a newer one replaces cancel themselves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any


def test_only_the_newest_of_several_late_nights_runs(lab: Any, tmp_path: Path, tiny_matrix: dict[str, Any]) -> None:
    deployment = lab.deployment("nightly/nightly")
    parameters = {"config": {**tiny_matrix, "specs": ["full"]}, "tracking_dir": str(tmp_path / "mlruns")}
    lab.patch("/work_pools/kivi", {"is_paused": True})  # the outage
    first = datetime.now(UTC) + timedelta(seconds=60)  # a busy server needs some to make the runs of the schedule
    last = first + timedelta(seconds=6)
    rule = f"DTSTART:{first:%Y%m%dT%H%M%S}\nRRULE:FREQ=SECONDLY;INTERVAL=2;COUNT=4"
    schedule = {"schedule": {"rrule": rule, "timezone": "UTC"}, "active": True, "parameters": parameters}
    (made,) = lab.post(f"/deployments/{deployment['id']}/schedules", [schedule]).raise_for_status().json()
    due = {
        "deployments": {"id": {"any_": [deployment["id"]]}},
        "flow_runs": {"expected_start_time": {"after_": (first - timedelta(seconds=1)).isoformat()}},
        "sort": "EXPECTED_START_TIME_ASC",
    }

    def waiting() -> Any:
        """All that the schedule has made, once they are late; a server that was busy has left out the first ones."""
        if datetime.now(UTC) < last + timedelta(seconds=2):
            return None
        found = lab.post("/flow_runs/filter", due).raise_for_status().json()
        return [run for run in found if datetime.fromisoformat(run["expected_start_time"]) <= last]

    try:
        runs = [run["id"] for run in lab.until(waiting)]
    finally:
        lab.patch("/work_pools/kivi", {"is_paused": False})
    *older, newest = [lab.wait(run) for run in runs]
    lab.delete(f"/deployments/{deployment['id']}/schedules/{made['id']}")
    assert older
    assert {run["state"]["type"] for run in older} == {"CANCELLED"}
    assert newest["state"]["type"] == "COMPLETED", newest["state"]["message"]
    due_last = datetime.fromisoformat(newest["expected_start_time"]).strftime("%Y-%m-%d %H:%M:%S")
    for run in older:
        assert run["state"]["message"].startswith("outdated: this night was due at ")
        assert "takes its place" in run["state"]["message"]
    assert f"the one due at {due_last} UTC" in older[-1]["state"]["message"]
    wanted = lab.retry(runs[0])
    assert wanted["state"]["type"] == "COMPLETED", "who retries a night by hand wants it"


def test_runs_that_people_start_do_not_cancel_each_other(lab: Any, tmp_path: Path, tiny_matrix: dict[str, Any]) -> None:
    parameters = {"config": {**tiny_matrix, "specs": ["full"]}, "tracking_dir": str(tmp_path / "mlruns")}
    runs = [lab.start("nightly/nightly", parameters) for _ in range(2)]
    assert [lab.wait(run)["state"]["type"] for run in runs] == ["COMPLETED", "COMPLETED"]
