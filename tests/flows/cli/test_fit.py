"""``kivi fit`` at the terminal: its table, its JSON, its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.cli.app import app
from flows.cli.fit import USUAL
from kivi.spec import CacheSpec

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
PARAMETERS = 8_030_261_248  # of Llama 3 8B


def call(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["fit", *map(str, arguments)])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with the config of an 8B model, and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def answer(*arguments: object) -> dict[str, Any]:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_config_is_enough(llama: Path) -> None:
    found = answer(llama, "--memory", "24GB", "--device", "gpu")
    assert found["weight_bytes"] == 2 * PARAMETERS
    assert (found["context"], found["model_context"], found["batch"]) == (32_768, 131_072, 1)
    rows = {CacheSpec(**row["spec"]).slug: row for row in found["rows"]}
    assert list(rows) == [CacheSpec.parse(spec).slug for spec in USUAL] and not found["refused"]
    assert rows["full"]["bytes_per_token"] == 32 * 8 * 128 * 2 * 2
    recommended = rows["kivi-k4v3-g64-r128-s64-hkv-auto"]
    assert recommended["longest_context"] > rows["full"]["longest_context"]
    assert rows["full"]["peak_bytes"] > recommended["peak_bytes"] > found["weight_bytes"] + recommended["cache_bytes"]


def test_readme_says_the_bytes_that_are_counted(llama: Path) -> None:
    rows = answer(llama, "--memory", "24GB", "--context", 32_768)["rows"]
    counted = {CacheSpec(**row["spec"]).text: f"{row['cache_bytes'] / 1e9:.2f}" for row in rows}
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    listed = re.findall(r"^\| [a-z ]+ \| `(kivi:\S+)` \| ([\d.]+) \|", readme, re.MULTILINE)
    assert len(listed) == 3 and listed == [(text, counted[text]) for text, _ in listed]
    assert f"The full cache takes {counted['full']} GB." in readme


def test_the_table_fits_80_columns_and_says_what_does_not_fit(llama: Path) -> None:
    done = call(llama, "--memory", "20GB", "--device", "gpu", "--context", 40_000)
    assert done.exit_code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith("/")) <= 80
    assert "weights 16.06 GB of 20.00 GB" in done.stdout and "1 sequence of 40,000 tokens" in done.stdout
    assert "\nkivi:k4v3,g64,s64,hkv " in done.stdout  # names are not folded
    assert "does not fit: full" in done.stdout and "131,072 tokens is the model's own limit" not in done.stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--memory", "16GB"], 2, "kivi: memory=16.00 GB: the weights of {} alone take 16.06 GB\n"),
        (["--memory", "lots"], 2, "kivi: 'lots': expected a size such as 24GB or 16GiB\n"),
        (["--memory", "24GB", "--spec", "kivi:bits=5"], 2, "kivi: key_bits=5: KIVI codes have 2, 3, 4 or 8 bits\n"),
        (["--memory", "24GB", "--device", "tpu"], 2, "kivi: device='tpu': expected one of cpu, gpu\n"),
        (
            ["--memory", "24GB", "--dtype", "int8"],
            2,
            "kivi: dtype='int8': expected one of stored, float32, float16, bfloat16\n",
        ),
        (["--memory", "17GB", "--context", "100000", "--spec", "full"], 1, ""),
        (["--memory", "17GB", "--context", "100", "--spec", "full"], 0, ""),
    ],
)
def test_exit_codes_and_sentences(llama: Path, options: list[str], code: int, message: str) -> None:
    done = call(llama, *options)
    assert (done.exit_code, done.stderr) == (code, message.format(llama))


def test_a_cache_that_the_model_cannot_take_is_named(llama: Path) -> None:
    (llama / "config.json").write_text(json.dumps({**LLAMA_8B, "head_dim": 72}))
    done = call(llama, "--memory", "24GB", "--device", "gpu")
    assert done.exit_code == 0
    assert "kivi:k4v3,g64,s64,hkv: rotate=both on llama" in done.stdout and "\nfull " in done.stdout
    given = call(llama, "--memory", "24GB", "--spec", "kivi:bits=4,rotate=both")
    assert given.exit_code == 2 and given.stderr.startswith("kivi: rotate=both on llama")
