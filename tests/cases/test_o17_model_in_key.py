"""O17: a result cache must not forget the model: another model is a miss."""

from __future__ import annotations

from typing import Any

from kivi.measure.results import CellResult
from kivi.spec import CacheSpec
from tasks.config import ModelConfig, NightlyConfig
from tasks.prompts.prompt_sets import PromptSet, digest
from tasks.run.plan import ModelIdentity, plan
from tasks.run.result_files import ResultStore


def test_two_models_and_one_store_is_a_miss(tmp_path: Any, make_result: Any) -> None:
    rows: tuple[dict[str, Any], ...] = ({"text": "one"},)
    prompts = PromptSet(name="p", rows=rows, source="p", revision=None, split="train", sha256=digest(rows), note="")
    config = NightlyConfig(specs=(CacheSpec.parse("full"),), prompt_sets=({"source": "p.jsonl", "column": "text"},))
    same: dict[str, Any] = {"revision": "v1", "dtype": "float32", "layers": 2, "chat_template": ""}
    models = [
        ModelIdentity(config=ModelConfig(name="org/model"), weights_digest="a", digest="1", **same),
        ModelIdentity(config=ModelConfig(name="org/model"), weights_digest="b", digest="2", **same),  # same name, other weights
        ModelIdentity(config=ModelConfig(name="org/other"), weights_digest="a", digest="1", **same),
    ]
    cells = plan(config, [prompts], models).cells
    store = ResultStore(tmp_path)
    store.write(make_result(key=cells[0].key))
    assert [store.read(cell.key, CellResult) is not None for cell in cells] == [True, False, False]
