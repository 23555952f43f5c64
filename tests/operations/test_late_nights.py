"""After an outage all missed nights come at once: those that a newer one replaces cancel themselves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any


def test_only_the_newest_of_several_late_nights_runs(lab: Any, tmp_path: Path, tiny_matrix: dict[str, Any]) -> None:
    deployment = lab.deployment("nightly/nightly")
    parameters = {"config": {**tiny_matrix, "specs": ["full"]}, "tracking_dir": str(tmp_path / "mlruns")}
    lab.patch("/work_pools/kivi", {"is_paused": True})  # the outage
    first = datetime.now(UTC) + timedelta(seconds=15)
    rule = f"DTSTART:{first:%Y%m%dT%H%M%S}\nRRULE:FREQ=SECONDLY;INTERVAL=2;COUNT=3"
    schedule = {"schedule": {"rrule": rule, "timezone": "UTC"}, "active": True, "parameters": parameters}
    (made,) = lab.post(f"/deployments/{deployment['id']}/schedules", [schedule]).raise_for_status().json()
    due = {
        "deployments": {"id": {"any_": [deployment["id"]]}},
        "flow_runs": {"expected_start_time": {"after_": (first - timedelta(seconds=1)).isoformat()}},
        "sort": "EXPECTED_START_TIME_ASC",
    }

    def waiting() -> Any:
        found = lab.post("/flow_runs/filter", due).raise_for_status().json()
        late = [run for run in found if run["expected_start_time"] < datetime.now(UTC).isoformat()]
        return late if len(late) == 3 else None

    try:
        runs = [run["id"] for run in lab.until(waiting)]
    finally:
        lab.patch("/work_pools/kivi", {"is_paused": False})
    oldest, older, newest = [lab.wait(run) for run in runs]
    lab.delete(f"/deployments/{deployment['id']}/schedules/{made['id']}")
    assert [run["state"]["type"] for run in (oldest, older, newest)] == ["CANCELLED", "CANCELLED", "COMPLETED"]
    due_last = datetime.fromisoformat(newest["expected_start_time"]).strftime("%Y-%m-%d %H:%M:%S")
    for run in (oldest, older):
        assert run["state"]["message"].startswith("outdated: this night was due at ")
        assert "takes its place" in run["state"]["message"]
    assert f"the one due at {due_last} UTC" in older["state"]["message"]


def test_runs_that_people_start_do_not_cancel_each_other(lab: Any, tmp_path: Path, tiny_matrix: dict[str, Any]) -> None:
    parameters = {"config": {**tiny_matrix, "specs": ["full"]}, "tracking_dir": str(tmp_path / "mlruns")}
    runs = [lab.start("nightly/nightly", parameters) for _ in range(2)]
    assert [lab.wait(run)["state"]["type"] for run in runs] == ["COMPLETED", "COMPLETED"]
