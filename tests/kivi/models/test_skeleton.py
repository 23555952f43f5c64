"""A model that is all shapes weighs what the loaded one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from kivi.models import ModelError
from kivi.models import load_model as load_by_name
from kivi.models.skeleton import build_skeleton


def weigh(model: Any) -> int:
    return sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))


@pytest.mark.parametrize("dtype", ["stored", "float32"])
def test_the_embedded_model_weighs_what_is_loaded(dtype: str) -> None:
    assert build_skeleton("embedded", dtype=dtype).weight_bytes == weigh(load_by_name(dtype=dtype).model)


@pytest.mark.parametrize("changes", [{}, {"quantization": {"model.embed_tokens": {"group_size": 32, "bits": 8}}}])
def test_quantised_weights_have_the_shapes_that_the_converter_gives_them(model_folder: Path, changes: dict[str, Any]) -> None:
    model, config = load_model(model_folder)
    model.set_dtype(mx.bfloat16)
    own = changes.get("quantization", {})
    model, config = quantize_model(model, config, 64, 4, quant_predicate=lambda path, _: own.get(path, True))
    config = {**config, "dtype": "bfloat16"}
    mx.save_safetensors(str(model_folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (model_folder / "config.json").write_text(json.dumps(config))
    loaded, _ = load_model(model_folder)
    skeleton = build_skeleton(str(model_folder), dtype="stored")
    assert skeleton.weight_bytes == weigh(loaded)
    mlp = skeleton.model.model.layers[0].mlp
    assert (mlp.gate_proj.bits, hasattr(mlp.down_proj, "bits")) == (4, False)  # 96 columns are no groups of 64
    assert skeleton.weight_bytes < build_skeleton(str(model_folder), dtype="bfloat16").weight_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "its config names no dtype; say which its weights have"),
        ({"torch_dtype": "float8_e4m3fn"}, "its config names dtype 'float8_e4m3fn'"),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}, "does not say which weights 'awq' quantised"),
        ({"model_type": "unheard-of"}, "mlx-lm knows no model_type 'unheard-of'"),
        ({"hidden_size": "wide"}, "cannot be built from its config: TypeError"),
    ],
)
def test_a_config_that_does_not_tell_is_refused(model_folder: Path, changes: dict[str, Any], message: str) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**config, **changes}))
    (model_folder / "model.safetensors").unlink()  # only the config is read
    with pytest.raises(ModelError, match=message):
        build_skeleton(str(model_folder), dtype="stored")
