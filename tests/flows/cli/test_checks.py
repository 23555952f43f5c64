"""``kivi compare``, ``kivi audit`` and importing what they measured elsewhere: exit codes, sentences, JSON."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli.app import app
from kivi.measure.audit import AuditReport, AuditSettings, audit_spec
from kivi.measure.backends.comparison import ComparisonResult, compare_backends
from kivi.spec import CacheSpec
from tasks.run import audit, compare
from tasks.tracking.runs import search
from tasks.tracking.store import writer

SPEED = {
    "rounds": 2,
    "calls": 1,
    "dtype": "float32",
    "kv_heads": 1,
    "query_heads": 2,
    "head_dim": 32,
    "flush_tokens": [32],
    "contexts": [96],
}
SMALL = {"settings": {"speed": SPEED, "parity_shapes": [[1, 64, 32]]}}


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tracking_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("checks")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("compare", "full"), "backends are compared on one layer's cache"),
        (("compare", "kivi:bits=5"), "KIVI codes have 2, 3, 4 or 8 bits"),
        (("compare", "kivi", "--model", "/no/such/folder"), "model '/no/such/folder': neither"),
        (("compare", "kivi", "--settings", "/no/such/file.yaml"), "cannot be read"),
        (("audit", "mlx-quantized:bits=4"), "has byte accounting to be audited"),
        (("audit", "kivi", "--check", "books"), "check 'books': expected one of bytes"),
        (("audit", "kivi:bits"), "expected key=value"),
        (("import", "/no/such/file.json"), "cannot be read"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(tmp_path, arguments, sentence):
    done = call(*arguments, "--tracking-dir", tmp_path / "mlruns")
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("kivi: ") and sentence in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == "" and not (tmp_path / "mlruns").exists()


def test_compare_prints_its_result_as_json_and_the_tables_beside_it(prefect_server, tracking_dir, tmp_path):
    settings = tmp_path / "small.yaml"
    settings.write_text(yaml.safe_dump(SMALL))
    arguments = ("compare", "kivi:bits=2,residual=32", "kivi:k2v2,r64", "--model", "none", "--settings", settings)
    done = call(*arguments, "--tracking-dir", tracking_dir, "--json")
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    assert written["passed"] and ComparisonResult.model_validate(written["result"]).passed
    assert "parity with the definition" in done.stderr and "metal: not run: no Metal device" in done.stderr
    assert written["logged"]["run_id"] in done.stderr
    assert "to compare the caches: kivi evaluate MODEL PROMPTS kivi:k2v2,r32 kivi:k2v2,r64" in done.stderr


def test_audit_of_one_check_shows_its_evidence(prefect_server, tracking_dir):
    done = call("audit", "kivi:bits=2,residual=32,backend=mlx", "--check", "definition", "--tracking-dir", tracking_dir)
    assert done.exit_code == 0, done.output
    assert "equal the definition bit for bit" in done.stdout and "passed: 1 check, 2 facts, 0 warnings" in done.stdout


def test_a_file_gives_the_checks_and_the_model_that_the_command_line_leaves_out(prefect_server, tracking_dir, tmp_path):
    settings = tmp_path / "audit.yaml"
    settings.write_text("checks: [definition, quality]\nmodel: null\n")
    arguments = ("audit", "kivi:bits=2,residual=32,backend=mlx", "--settings", settings, "--tracking-dir", tracking_dir)
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    assert "passed: 1 check, 2 facts, 0 warnings" in done.stdout
    assert "passed: 1 check, " in call(*arguments, "--check", "trim").stdout


def test_an_audit_in_which_nothing_ran_is_exit_code_1(prefect_server, tracking_dir):
    arguments = ("audit", "kivi:bits=2,backend=mlx", "--check", "quality", "--model", "none")
    done = call(*arguments, "--tracking-dir", tracking_dir)
    assert done.exit_code == 1 and "failed: no check was run" in done.stdout


def test_what_was_measured_without_a_tracker_is_imported_once(tracking_dir, tmp_path):
    spec = CacheSpec.parse("kivi:bits=4,residual=32,backend=mlx")
    compared = compare_backends([spec], settings=compare.ComparisonSettings.model_validate(SMALL["settings"]))
    audited = audit_spec(spec, AuditSettings(), names=["definition"])
    for result, flow, kind in ((compared, compare, "comparison"), (audited, audit, "audit")):
        path = tmp_path / "measured.json"
        path.write_text(result.model_dump_json())
        runs = []
        for _ in range(2):
            done = call("import", path, "--tracking-dir", tracking_dir, "--json")
            assert done.exit_code == 0, done.output
            runs.append(json.loads(done.stdout)["logged"]["run_id"])
        assert runs[0] == runs[1]
        with writer(tracking_dir, flow.EXPERIMENT) as store:
            assert runs[0] in {run.info.run_id for run in search(store, {"kivi.kind": kind})}


def test_a_file_that_says_what_it_is_and_is_not_is_refused_by_that_name(tracking_dir, tmp_path):
    report = audit_spec(CacheSpec.parse("kivi:backend=mlx"), names=["definition"])
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({**json.loads(report.model_dump_json()), "passed": False}))
    done = call("import", broken, "--tracking-dir", tracking_dir)
    assert done.exit_code == 2 and "not an audit" in done.stderr and "contradicts the findings" in done.stderr
    assert AuditReport.model_validate_json(report.model_dump_json()).passed
