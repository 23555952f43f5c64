"""Tiny models with random weights: mlx-lm's own classes, a few thousand parameters, float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, models, pre_tokenizers

# A property's time says how busy the machine is, not whether the law holds.
settings.register_profile("kivi", deadline=None)
settings.load_profile("kivi")

VOCABULARY = 97

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
GEMMA = {**LLAMA, "head_dim": 32, "num_key_value_heads": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "head_dim": 32},
    "mistral": {**LLAMA, "num_key_value_heads": 4},  # head_dim 16: ragged value groups
    "qwen2": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 48, "max_position_embeddings": 4096, "tie_word_embeddings": True, "rope_theta": 1e4},
    "gemma": GEMMA,
    "phi3": {**LLAMA, "hidden_size": 128},
    "gpt_oss": {
        **LLAMA,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "deepseek_v2": {
        **LLAMA,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 24,
        "n_routed_experts": None,
        "rope_scaling": {"type": "yarn", "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gemma2": GEMMA,
    "gemma4_text": {
        **LLAMA,
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 2,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "iquestloopcoder": {**LLAMA, "head_dim": 32},
    "deepseek_v3": {
        **LLAMA,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": None,
    },
    "afm7": {
        "vocab_size": VOCABULARY,
        "hidden_dim": 64,
        "num_layers": 3,
        "num_kv_reuse_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "mamba": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 4,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 2,
    },
}


def build_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return mlx-lm's model ``name``, weights drawn anew so that attention matters: none is left at 0 or 1."""
    config = {"model_type": name, **CONFIGS[name], **changes}
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))

    def draw(weight: mx.array) -> mx.array:
        scale = 1.0 if weight.ndim < 2 else 1.5 * weight.shape[-1] ** -0.5
        return mx.random.normal(weight.shape) * scale

    model.update(tree_map(draw, model.parameters()))
    mx.eval(model.parameters())
    return model


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Build a tiny model: ``make_model("llama", seed=0, num_hidden_layers=2)``."""
    return build_model


def save_model(model: Any, folder: Path) -> Path:
    """Save a tiny llama and a tokenizer of 97 words as an ordinary mlx-lm folder."""
    folder.mkdir()
    config = {name: value for name, value in vars(model.args).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    vocabulary = {f"w{token}": token for token in range(97)} | {"</s>": 97}  # the model never says </s>
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))  # noqa: S106  not a secret
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "w0"})
    )
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny random llama of three layers, saved."""
    return save_model(build_model("llama"), tmp_path / "model")


@pytest.fixture
def draft_folder(tmp_path: Path) -> Path:
    """Another, of two layers."""
    return save_model(build_model("llama", seed=1, num_hidden_layers=2), tmp_path / "draft")


@pytest.fixture(autouse=True)
def _no_dispatch_left() -> Iterator[None]:
    """Give every test mlx-lm as it was imported: no module keeps the dispatch of an earlier test."""
    yield
    from kivi import attention

    with attention._lock:
        attention.release_attention(attention._installed)
        attention._installed.clear()
    assert not attention._holders
