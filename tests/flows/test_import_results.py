"""What ``kivi import`` takes: everything that was measured, and no figure, key or date that no measurement gives."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.import_results import log_result, read_result
from kivi.measure.backends.comparison import ComparisonResult
from kivi.measure.results import CellResult
from tasks.config import ConfigError
from tasks.run.result_files import ResultStore

TESTS = Path(__file__).parents[1]
MEASURED = sorted((TESTS / "bench" / "results").glob("comparison_*.json"))
SOON = datetime.now(UTC) + timedelta(hours=2)
LATER = datetime.now(UTC) + timedelta(days=2)


def test_a_file_of_the_results_folder_is_taken_as_it_was_written_only(tmp_path, make_result):
    result = make_result()
    path = ResultStore(tmp_path).write(result)
    assert read_result(path) == result
    path.write_bytes(path.read_bytes().replace(b'"flip_rate": 0.', b'"flip_rate": 0.0', 1))
    with pytest.raises(ConfigError, match="not a cell's result: is not as it was written"):
        read_result(path)


@pytest.fixture
def edited(tmp_path, make_result):
    """Write a result with one field replaced and return its path."""

    def write(field, value, accuracy=0.5):
        content = json.loads(make_result(accuracy=accuracy).model_dump_json())
        *owners, name = field.split(".")
        at = content
        for owner in owners:
            at = at[int(owner) if owner.isdecimal() else owner]
        at[int(name) if name.isdecimal() else name] = value
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quality.flip_rate", 1.5),
        ("quality.coverage", -0.1),
        ("quality.kl_mean", -0.5),
        ("quality.perplexity", 0),
        ("quality.positions", 0),
        ("quality.sequence_kl", [-1]),
        ("quality.sequence_flips", [2]),
        ("quality.control_flip_rate", 3),
        ("quality.control_kl_mean", -3),
        ("quality.by_depth.0.start", -1),
        ("generation.token_agreement", 2),
        ("generation.repetition_rate", -1),
        ("generation.first_divergence", -1),
        ("generation.logit_cosine.3", 1.5),
        ("generation.continuations.0.agreement", 7),
        ("answers.accuracy", 1.01),
        ("answers.answers.0.score", -1),
        ("throughput.decode_ratio", 0),
        ("throughput.prefill_tps", -100),
        ("throughput.contexts.0.decode_ratio.rounds.1", -0.5),
        ("throughput.peak_bytes", -1),
        ("memory.resident_bytes", 0),
        ("memory.resident_bytes", 10**400),
        ("memory.compression", -3),
        ("memory.tokens", -500),
        ("memory.layer_bytes", [-1]),
        ("accounting.residual_bytes", -1),
        ("accounting.compression_ratio", 0),
        ("audit.bytes.key_codes", -8),
        ("provenance.seconds.score", -1),
        ("provenance.model", ""),
        ("provenance.prompt_set", ""),
        ("provenance.started", "2026-11-29T02:00:00"),
        ("provenance.started", "1970-01-01T00:00:00Z"),
        pytest.param("provenance.started", LATER.isoformat(), id="in two days"),
        ("cell_key", ""),
        ("cell_key", "../../elsewhere"),
        ("cell_key", "AB" * 16),
    ],
)
def test_what_no_measurement_gives_is_one_sentence_that_names_it(edited, tmp_path, field, value):
    done = CliRunner().invoke(app, ["import", str(edited(field, value)), "--tracking-dir", str(tmp_path / "mlruns")])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    assert done.stderr.startswith("kivi: ") and "edited.json: not a cell's result: " in done.stderr
    assert field.rpartition(".")[2].strip("0123") in done.stderr and "expected" in done.stderr.replace("should", "expected")
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quality.kl_mean", -1e-6),
        ("generation.logit_cosine.3", 1.0000001),
        ("memory.growth_bytes", -4096),
        ("audit.bytes.spare", -8),
        pytest.param("provenance.started", SOON.isoformat(), id="in two hours"),
        ("cell_key", "ab" * 32),
    ],
)
def test_what_a_measurement_can_give_is_taken(edited, field, value):
    assert isinstance(read_result(edited(field, value)), CellResult)


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_comparisons_that_were_measured_are_taken(path):
    assert isinstance(read_result(path), ComparisonResult)


def test_a_comparison_from_the_future_is_refused(tmp_path):
    content = {**json.loads(MEASURED[0].read_text()), "started": LATER.isoformat()}
    (tmp_path / "later.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"not a comparison: started: .*set the clock"):
        read_result(tmp_path / "later.json")


def test_a_night_is_called_by_the_time_in_utc(edited, tmp_path):
    result = read_result(edited("provenance.started", "2026-11-29T01:30:00+05:00"))
    assert log_result(result, tmp_path / "mlruns").night.scheduled == "2026-11-28 20:30 UTC"
