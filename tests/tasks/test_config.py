"""Configurations: those that come with the project, and the sentence for each that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kivi.measure.sequences import TokenStream
from kivi.models import load_model
from tasks.config import ConfigError, NightlyConfig, load_config
from tasks.prompts.prompt_sets import load_prompt_set
from tasks.run.plan import resolve_specs

CONFIGS = Path(__file__).parents[2] / "flows" / "configs"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_model().tokenizer


def test_a_folder_that_exists_is_a_folder_whatever_its_path_holds(tmp_path):
    folder = tmp_path / "model@v1"
    folder.mkdir()
    config = NightlyConfig(specs=["full"], models=[str(folder), "org/name@abc"])
    assert [(model.name, model.revision) for model in config.models] == [(str(folder), None), ("org/name", "abc")]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_loads_and_its_texts_are_long_enough(path: Path, tokenizer: Any) -> None:
    config = load_config(path)
    assert config.name == path.stem
    for prompts in config.prompt_sets:
        stream = TokenStream(tokenizer, load_prompt_set(prompts).texts(tokenizer))
        measure = config.settings_for(prompts)
        assert len(stream.pack(measure.score.sequences, measure.score.length + 1)) == measure.score.sequences
        assert stream.windows(measure.generation.continuations, measure.generation.context)
        assert stream.windows(measure.throughput.rounds, max(measure.throughput.contexts))
    assert resolve_specs(config)[0][0].kind == "full"


def test_the_standard_matrix_keeps_its_minima() -> None:
    config = load_config(CONFIGS / "nightly.yaml")
    kinds = {spec.kind for spec in config.specs}
    assert kinds == {"full", "kivi", "kivi-roundtrip", "mlx-quantized"}
    assert all(config.thresholds_for(spec.slug).limits for spec in config.specs)
    measure = config.measure
    assert measure.score.sequences * measure.score.length >= 1024 and measure.score.length >= 1024
    assert measure.generation.continuations >= 4 and measure.generation.steps >= 24 and measure.generation.context >= 512
    assert measure.throughput.rounds >= 3 and min(measure.throughput.contexts) >= 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("specs: [full", "not YAML: while parsing a flow sequence"),
        ("- full", "expected a mapping with models, prompt_sets and specs, got list"),
        ("", "expected a mapping with models, prompt_sets and specs, got NoneType"),
        ("name: x", "specs: is missing"),
        ("specs: [full]\ncolour: red", "colour: no such field"),
        ("specs: [full, 'kivi:bits=5']", r"specs\[1\]: key_bits=5: KIVI codes have 2, 3, 4 or 8 bits"),
        (
            "specs: [full]\nmeasure: {score: {length: 10}}",
            "measure.score.length: 10: expected greater than or equal to 64",
        ),
        (
            "specs: [full]\nprompt_sets: [{source: a.jsonl}]",
            r"prompt_sets\[0\]: source='a.jsonl' needs column, template or messages",
        ),
        (
            "specs: [full]\nthresholds: {full: {flip_rate: 2}}",
            "thresholds.full.flip_rate: 2: expected less than or equal",
        ),
        ("specs: [full]\nmodels: [embedded, embedded]", "models: 'embedded' is there twice"),
        ("specs: [full]\nname: a\nname: b", "not YAML: 'name' is there twice in .* line 3"),
        ("specs: [full]\nmeasure: {deadline_s: .inf}", "measure.deadline_s: inf: expected a finite number"),
        (f"specs: [full]\nmodels: [{{dtype: {90 * 'x'}}}]", r"models\[0\].dtype: 'x{76}\.\.\.: expected 'auto', 'stored'"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")


def test_every_field_of_the_form_is_described() -> None:
    schema = NightlyConfig.model_json_schema()
    models = [schema, *schema["$defs"].values()]
    undescribed = [
        f"{model.get('title')}.{name}"
        for model in models
        for name, field in model.get("properties", {}).items()
        if "description" not in field and "$ref" not in field and model["title"].endswith(("Config", "Thresholds", "Settings"))
    ]
    assert undescribed == []


def test_brackets_without_end_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("specs: " + "[" * 3000 + "]" * 3000)
    with pytest.raises(ConfigError, match="not YAML: maximum recursion depth"):
        load_config(path)
