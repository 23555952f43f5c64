"""The plan: which cells, under which keys, and what is skipped and why."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from kivi.backends import BackendError, available
from kivi.measure.settings import MeasureSettings
from kivi.spec import CacheSpec, SpecError
from tasks.config import ConfigError, ModelConfig, NightlyConfig
from tasks.prompts.prompt_sets import PromptSet, digest
from tasks.run.plan import ModelIdentity, cell_key, check_thresholds, code_version, plan, resolve_specs

ROWS: tuple[dict[str, Any], ...] = ({"text": "one"}, {"text": "two"})
SPECS = ("full", "kivi:bits=2,backend=mlx", "mlx-quantized:bits=4")
SETS = ({"source": "p.jsonl", "column": "text"}, {"source": "q.jsonl", "column": "text", "score": {"length": 2048}})


def identity(name: str = "embedded", **fields: Any) -> ModelIdentity:
    known = {"revision": "v1", "weights_digest": "feed", "dtype": "float32", "layers": 2, "chat_template": "", "digest": "beef"}
    return ModelIdentity(config=ModelConfig(name=name), **{**known, **fields})


def prompts(name: str = "p", rows: tuple[dict[str, Any], ...] = ROWS) -> PromptSet:
    return PromptSet(name=name, rows=rows, source=name, revision=None, split="train", sha256=digest(rows), note="")


def key(**changes: Any) -> str:
    given = {"model": identity(), "prompts": prompts(), "spec": CacheSpec.parse(SPECS[1]), "night": "2026-11-29"}
    settings = changes.pop("settings", {})
    given |= changes
    measure = MeasureSettings.model_validate(settings)
    return cell_key(given["model"], given["prompts"], given["spec"], measure, night=given["night"])


def test_cells_are_the_product_of_models_prompt_sets_and_specs() -> None:
    models = [identity("a"), identity("b")]
    planned = plan(NightlyConfig(specs=SPECS, prompt_sets=SETS), [prompts("p"), prompts("q")], models)
    assert len(planned.cells) == 2 * 2 * 3
    assert len({cell.key for cell in planned.cells}) == 12
    assert planned.cells[1].label == "kivi-k2v2-g32-r128-mlx on a × p"
    assert [len(group) for group in planned.groups] == [3, 3, 3, 3]
    assert {cell.prompt_set for cell in planned.groups[1]} == {"q"}
    assert [group[0].settings.score.length for group in planned.groups] == [1024, 2048, 1024, 2048]


def test_a_layer_that_a_model_lacks_is_an_error_before_anything_is_measured() -> None:
    config = NightlyConfig(specs=({"kind": "kivi", "layers": {2: {"kind": "full"}}},), prompt_sets=SETS[:1])
    assert plan(config, [prompts()], [identity(layers=3)]).cells
    with pytest.raises(SpecError, match=r"layers\[2\]: the model has 2 layers, 0 to 1"):
        plan(config, [prompts()], [identity(layers=3), identity(layers=2)])


def test_auto_is_resolved_so_that_keys_and_names_hold_the_real_backend() -> None:
    specs, skipped = resolve_specs(NightlyConfig(specs=("kivi:bits=2",)))
    assert specs[0].backend in {"mlx", "metal", "cuda"} and not skipped


def test_backends_expand_kivi_caches_and_skip_what_is_missing_with_the_reason() -> None:
    specs, skipped = resolve_specs(NightlyConfig(specs=SPECS, backends=("mlx", "metal")))
    reason = available("metal")
    names = [spec.slug for spec in specs]
    if reason.ok:
        assert names == ["full", "kivi-k2v2-g32-r128-mlx", "kivi-k2v2-g32-r128-metal", "mlx-quantized-k4v4-g32"]
    else:
        assert names == ["full", "kivi-k2v2-g32-r128-mlx", "mlx-quantized-k4v4-g32"]
        assert skipped[0].what == "kivi-k2v2-g32-r128-metal"
        assert skipped[0].why == f"backend metal: {reason.reason}"


def test_a_backend_that_a_spec_names_is_required() -> None:
    missing = next(name for name in ("metal", "cuda") if not available(name).ok)
    with pytest.raises(BackendError, match=f"backend={missing}: "):
        resolve_specs(NightlyConfig(specs=(f"kivi:bits=2,backend={missing}",)))


def test_the_same_cache_is_planned_once() -> None:
    specs, skipped = resolve_specs(NightlyConfig(specs=("full", "full", "kivi:bits=2,backend=mlx", SPECS[1])))
    assert len(specs) == 2
    assert [entry.why for entry in skipped] == [
        "the same cache as full, which is planned already",
        "the same cache as kivi-k2v2-g32-r128-mlx, which is planned already",
    ]


def test_the_same_cell_is_planned_once() -> None:
    again = identity().model_copy(update={"config": ModelConfig(dtype="float32")})
    made = plan(NightlyConfig(specs=("full",)), [prompts("humaneval")], [identity(), again])
    assert len(made.cells) == 1
    assert [entry.why for entry in made.skipped] == ["the same as full on embedded × humaneval, which is planned already"]


@pytest.mark.parametrize("pattern", ["full", "kivi*", "kivi-k2v2-g32-r128-metal", "kivi-k2v2-*-mlx", "*"])
def test_a_limit_may_be_for_a_backend_that_is_not_here(pattern: str) -> None:
    check_thresholds(NightlyConfig(specs=("full", "kivi:bits=2"), thresholds={pattern: {"kl_mean": 1.0}}))


@pytest.mark.parametrize("pattern", ["kivi:bits=2", "kivi-k4v4-*", "kivi-*-auto", "FULL", ""])
def test_a_limit_for_no_cache_is_refused(pattern: str) -> None:
    config = NightlyConfig(specs=("full", "kivi:bits=2"), thresholds={"full": {"kl_mean": 1.0}, pattern: {"kl_mean": 1.0}})
    with pytest.raises(ConfigError, match=re.escape(f"thresholds: {pattern!r} matches no cache of this matrix")):
        check_thresholds(config)


def test_the_key_holds_everything_that_changes_a_result() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"model": identity("other")},
        {"model": identity(revision="v2")},
        {"model": identity(digest="cafe")},
        {"model": identity(dtype="float16")},
        {"prompts": prompts(rows=({"text": "one"}, {"text": "twO"}))},
        {"spec": CacheSpec.parse("kivi:bits=2,sinks=32,backend=mlx")},
        {"spec": CacheSpec.parse("kivi:bits=4,backend=mlx")},
        {"settings": {"score": {"length": 2048}}},
        {"settings": {"generation": {"steps": 25}}},
        {"settings": {"seed": 1}},
        {"night": "2026-11-30"},
    ]
    keys = [key(**change) for change in changes]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key()


def test_the_deadline_changes_no_result_and_no_key() -> None:
    assert key(settings={"deadline_s": 5}) == key()


def test_a_chat_template_matters_to_chats_alone() -> None:
    chats = prompts(rows=({"messages": [{"role": "user", "content": "hi"}]},))
    assert key(prompts=chats) != key(prompts=chats, model=identity(chat_template="{{ x }}"))
    assert key() == key(model=identity(chat_template="{{ x }}"))
    asked = [{"answers": {"scorer": "planted_fact", "chat": chat}} for chat in (False, True)]
    templates = [identity(), identity(chat_template="{{ x }}")]
    assert [len({key(model=model, settings=settings) for model in templates}) for settings in asked] == [1, 2]


def test_another_package_version_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr("kivi.machine.packages", lambda: {"mlx-lm": "9.9"})
    assert key() != before


def test_another_code_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(code_version()) == 64
    before = key()
    monkeypatch.setattr("tasks.run.plan.code_version", lambda: "0" * 64)
    assert key() != before


def test_specs_are_read_from_strings_and_mappings_and_survive_json() -> None:
    config = NightlyConfig(specs=("kivi:key_bits=4,value_bits=2,sinks=32", {"kind": "kivi", "layers": {0: {"kind": "full"}}}))
    assert config.specs[0].sink_length == 32
    assert NightlyConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"specs": ["kivi:bits=5"]}, "KIVI codes have 2, 3, 4 or 8 bits"),
        ({"specs": ["kivi:bots=2"]}, "bots: no such option"),
        ({"specs": []}, "at least 1 item"),
        ({"specs": ["full"], "prompt_sets": ["humaneval", "humaneval"]}, "two prompt sets are called 'humaneval'"),
        ({"specs": ["full"], "colour": 1}, "Extra inputs"),
        ({"specs": ["full"], "measure": {"answers": {"scorer": "planted_fact"}}}, "questions belong to a prompt set"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        NightlyConfig.model_validate(fields)


def test_strings_stand_for_models_and_prompt_sets() -> None:
    config = NightlyConfig(specs=("full",), models=("org/model@" + "a" * 40, "embedded"), prompt_sets=("retrieval",))
    assert config.models[0] == ModelConfig(name="org/model", revision="a" * 40)
    assert config.models[1] == ModelConfig()
    assert config.prompt_sets[0].name == "retrieval"


def test_thresholds_come_from_the_pattern_that_matches_and_the_last_one_wins() -> None:
    config = NightlyConfig(
        specs=("full",), thresholds={"kivi-k2v2-*": {"kl_mean": 0.25}, "kivi-k2v2-g32-r32-*": {"kl_mean": 0.4}}
    )
    assert config.thresholds_for("kivi-k2v2-g32-r128-mlx").kl_mean == 0.25
    assert config.thresholds_for("kivi-k2v2-g32-r32-mlx").kl_mean == 0.4
    assert (
        config.thresholds_for("kivi-k2v2-g32-r32-mlx").flip_rate
        == config.thresholds_for("kivi-roundtrip-k2v2-g32-r32-mlx").flip_rate
    )
