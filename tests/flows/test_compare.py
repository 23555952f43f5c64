"""The comparison as a flow: measured, logged, shown, and in a true state."""

from __future__ import annotations

import pytest

from flows.compare import compare
from flows.results import Checked, final_state
from kivi.measure.backends.comparison import ComparisonSettings
from kivi.measure.backends.speed import SpeedSettings
from tasks.run.compare import EXPERIMENT, CompareConfig
from tasks.tracking.runs import Logged
from tasks.tracking.store import writer

CONFIG = CompareConfig(
    specs=("kivi:bits=2,residual=32", "kivi-roundtrip:bits=4"),
    model=None,
    settings=ComparisonSettings(
        speed=SpeedSettings(
            rounds=2, calls=1, dtype="float32", kv_heads=1, query_heads=2, head_dim=32, flush_tokens=(32,), contexts=(96,)
        ),
        parity_shapes=((1, 64, 32),),
    ),
)


@pytest.fixture(scope="module")
def compared(prefect_server, tmp_path_factory):
    tracking_dir = tmp_path_factory.mktemp("compare")
    return tracking_dir, compare(CONFIG, tracking_dir, return_state=True)


def test_a_comparison_that_holds_is_completed_and_logged(compared):
    tracking_dir, state = compared
    assert state.is_completed() and state.message.startswith("passed: "), state.message
    result = state.result()
    with writer(tracking_dir, EXPERIMENT) as store:
        parent = store.client.get_run(result.logged.run_id)
        children = [store.client.get_run(run_id) for run_id in result.logged.child_ids]
    assert parent.data.tags["prefect.flow_run_id"]
    assert {child.data.params["spec"] for child in children} == {spec.spec.slug for spec in result.result.specs}


def test_a_violated_parity_is_failed_and_says_where(compared):
    result = compared[1].result().result
    spec = result.specs[0]
    wrong = spec.parity[0].model_copy(update={"differing": 2})
    broken = result.model_copy(update={"specs": [spec.model_copy(update={"parity": [wrong]})]})
    state = final_state(Checked(result=broken, logged=Logged(experiment_id="1", run_id="x")))
    assert state.is_failed() and "round trip of keys" in state.message


def test_nothing_checked_is_failed(compared):
    result = compared[1].result().result.model_copy(update={"specs": []})
    assert final_state(Checked(result=result, logged=Logged(experiment_id="1", run_id="x"))).is_failed()


def test_a_cache_without_a_backend_is_refused_before_anything_runs(compared):
    config = CompareConfig(specs=("full",), model=None)
    state = compare(config, compared[0], return_state=True)
    assert state.is_failed() and "backends are compared on" in state.message
