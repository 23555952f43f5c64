"""A comparison in a real MLflow store, and as a person reads it."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from kivi.measure.backends.comparison import Agreement, ComparisonResult, ComparisonSettings, ModelComparison, compare_backends
from kivi.measure.backends.speed import SpeedSettings
from kivi.spec import CacheSpec
from tasks.report.comparison import comparison_markdown, headline, speed_figure
from tasks.run.compare import EXPERIMENT, CompareConfig, log_comparison
from tasks.tracking.runs import search
from tasks.tracking.store import writer

SETTINGS = ComparisonSettings(
    speed=SpeedSettings(
        rounds=2, calls=1, dtype="float32", kv_heads=1, query_heads=2, head_dim=32, flush_tokens=(32, 64), contexts=(96,)
    ),
    parity_shapes=((1, 64, 32),),
)


@pytest.fixture(scope="module")
def measured() -> ComparisonResult:
    """A real comparison, with a model's figures made by hand."""
    result = compare_backends([CacheSpec.parse("kivi:bits=2,residual=32")], settings=SETTINGS)
    (spec,) = result.specs
    case = next(case for case in spec.speed if case.operation == "decode attention")
    model = ModelComparison(
        model="tiny|<b>",
        weights_digest="feed",
        dtype="float32",
        prompts="none",
        prefill=case.model_copy(update={"operation": "model prefill"}),
        decode=case.model_copy(update={"operation": "model decode"}),
        agreement=[Agreement(arm="mlx", reference="full", agreement=0.75, first_divergence=3, prompts=1, steps=8)],
    )
    return result.model_copy(update={"specs": [spec.model_copy(update={"model": model})]})


@pytest.fixture
def broken(measured) -> ComparisonResult:
    """The same, with a kernel that is wrong."""
    (spec,) = measured.specs
    wrong = spec.parity[0].model_copy(update={"differing": 3, "max_abs": 0.5, "max_ulps": 9})
    return measured.model_copy(update={"specs": [spec.model_copy(update={"parity": [wrong, *spec.parity[1:]]})]})


@pytest.fixture(scope="module")
def tracking_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("compared")


def test_one_parent_and_a_child_a_backend_logged_once(tracking_dir, measured):
    with writer(tracking_dir, EXPERIMENT) as store:
        logged = log_comparison(store, measured, "f-1")
        assert log_comparison(store, measured, "f-1") == logged
        assert store.client.get_experiment(store.experiment_id).name == "kivi-compare"
        (parent,) = search(store, {"kivi.kind": "comparison"})
        (child,) = search(store, {"kivi.kind": "backend", "mlflow.parentRunId": parent.info.run_id})
        curve = store.client.get_metric_history(child.info.run_id, "speed.round_trip_seconds")
        files = {file.path for file in store.client.list_artifacts(parent.info.run_id)}
    assert (parent.info.run_id, (child.info.run_id,)) == (logged.run_id, logged.child_ids)
    assert parent.info.status == child.info.status == "FINISHED"
    tags = parent.data.tags
    assert (tags["kivi.verdict"], tags["prefect.flow_run_id"]) == ("pass", "f-1")
    assert tags["mlflow.note.content"] == comparison_markdown(measured)
    assert parent.data.params["backends"] == "mlx" == child.data.params["backend"]
    assert child.data.params["cache.key_bits"] == "2"
    assert [point.step for point in curve] == [32, 64]
    metrics = child.data.metrics
    assert metrics["parity.differing"] == 0 and 0 < metrics["parity.attention_share_of_bound"] <= 1
    assert metrics["generation.agreement_with_full"] == 0.75
    slug = measured.specs[0].spec.slug
    rolled_up = parent.data.metrics[f"speed.round_trip_seconds/{slug}/mlx"]
    assert rolled_up == curve[-1].value  # the largest size
    assert files == {"comparison.json", "comparison.md", "figures"}


def test_a_comparison_that_failed_is_failed_in_mlflow(tracking_dir, broken):
    with writer(tracking_dir, EXPERIMENT) as store:
        logged = log_comparison(store, broken)
        runs = [store.client.get_run(run_id) for run_id in (logged.run_id, *logged.child_ids)]
    assert [run.info.status for run in runs] == ["FAILED", "FAILED"]
    assert {run.data.tags["kivi.verdict"] for run in runs} == {"fail"}


def test_the_text_has_verdict_reasons_and_every_table(measured, broken):
    text = comparison_markdown(measured)
    assert text.splitlines()[2] == "**passed: 15 parity checks hold on mlx**"
    assert "metal: not run: no Metal device" in text and "cuda: not run" in text
    assert "| mlx | round trip of keys | 3 of 3 | 0 of 6,144 | 0 | exact | pass |" in text
    assert "| decode attention | 96 | full |" in text and "mx.quantize" in text and "75.0%" in text
    assert "| baseline, spread " in text and "[1.00, 1.00]" not in text
    assert "tiny\\|&lt;b&gt;" in text  # what comes from outside is escaped
    wrong = comparison_markdown(broken)
    assert wrong.splitlines()[2].startswith("**failed: 1 problems") and "9 ULPs" in wrong
    assert headline(broken).startswith("failed")


def test_the_figure_is_an_image_with_a_panel_an_operation(measured):
    svg = speed_figure(measured.specs[0])
    texts = "".join(ET.fromstring(svg).itertext())  # noqa: S314  our own
    for words in ("round trip against mlx", "quantise and pack against mlx", "decode attention against full"):
        assert words in texts
    assert "mathdefault" not in texts


def test_a_configuration_is_read_from_texts():
    config = CompareConfig.model_validate({"specs": ["kivi:bits=4"], "model": None})
    assert config.specs[0].key_bits == 4 and config.model is None
    assert CompareConfig.model_validate({"specs": ["kivi"]}).model.name == "embedded"
