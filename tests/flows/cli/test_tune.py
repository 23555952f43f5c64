"""``kivi tune``: its table and sentences, JSON, and what cannot be tuned in one sentence and exit code 2."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.mamba import Model, ModelArgs
from typer.testing import CliRunner

from flows.cli.app import app
from kivi.spec import CacheSpec


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tracking_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tune")


def test_a_tuning_is_shown_with_its_estimate_and_printed_as_json(prefect_server, tiny_models, tracking_dir):
    options = ("--effort", "low", "--bytes-per-token", "90", "--tracking-dir", tracking_dir, "--json")
    done = call("tune", tiny_models(1).name, *options)
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    assert written["passed"] and "measurements, about" in done.stderr
    (recommended,) = written["result"]["recommendations"]
    chosen = next(one for one in written["result"]["candidates"] if CacheSpec.checked(one["spec"]).slug == recommended["slug"])
    assert 80 < chosen["bytes_per_token"] <= 90
    assert "recommended: bytes a token at most 90: " in done.stderr and "recommended.yaml" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("/no/such/folder",), "model '/no/such/folder': neither"),
        (("embedded", "--kl", "0.01", "--memory", "1GB"), "kl and memory are both given"),
        (("embedded", "--kl", "0"), "kl: 0.0: expected"),
        (("embedded", "--effort", "most"), "effort: 'most': expected 'low', 'default' or 'high'"),
        (("embedded", "--memory", "lots"), "memory: 'lots': "),
        (("embedded", "--calibrate", "humaneval"), "calibrate is given without prompts"),
        (("embedded", "/no/such/file.jsonl", "--column", "text"), "does not exist"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(prefect_server, tmp_path, arguments, sentence):
    refused(sentence, tmp_path, *arguments)


def test_budgets_below_the_weights_and_below_the_smallest_cache(prefect_server, tiny_models, tmp_path):
    name = tiny_models(1).name
    refused("the weights of", tmp_path, name, "--memory", "100kB")
    refused("and the smallest setting takes", tmp_path, name, "--bytes-per-token", "10")


def test_too_little_text(prefect_server, tiny_models, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "short"}\n' * 50)
    refused(
        "too little text: calibration takes 320 tokens of 'rows', and judging 1 × 641 of the rows of 'rows' that are left",
        tmp_path,
        *(tiny_models(1).name, rows, "--column", "text", "--effort", "low"),
    )


def test_a_model_that_takes_no_packed_cache(prefect_server, tiny_models, tmp_path):
    folder = tmp_path / "recurrent"
    shutil.copytree(tiny_models(1).name, folder)
    fields = {"hidden_size": 32, "intermediate_size": 64, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 4}
    switches = {"use_bias": False, "use_conv_bias": True, "time_step_rank": 4, "vocab_size": 256, "model_type": "mamba"}
    model = Model(ModelArgs.from_dict({**fields, **switches}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps({**fields, **switches}))
    refused("no layer attends to keys and values of its own", tmp_path, folder)


def refused(sentence, tmp_path, *arguments):
    done = call("tune", *arguments, "--tracking-dir", tmp_path / "mlruns")
    assert done.exit_code == 2, done.output
    assert done.stderr.splitlines()[-1].startswith("kivi: ") and sentence in done.stderr and done.stdout == ""
