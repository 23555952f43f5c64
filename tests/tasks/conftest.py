"""A tiny model as a folder on disk, so that tasks load it as they load any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kivi  # noqa: F401  first: it loads OpenBLAS before MLX

# isort: split
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tasks.config import ModelConfig
from tasks.prompts import PromptSet, digest

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, seed: int) -> Path:
    """Write a llama of random weights whose tokens are bytes, in mlx-lm's form."""
    folder.mkdir()
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ModelConfig]:
    """Return the configuration of the tiny model of a seed, written when it is asked for first."""
    root = tmp_path_factory.mktemp("models")

    def provide(seed: int) -> ModelConfig:
        folder = root / f"tiny-{seed}"
        return ModelConfig(name=str(folder if folder.exists() else write_model(folder, seed)))

    return provide


@pytest.fixture(scope="session")
def story() -> PromptSet:
    """A prompt set of plain sentences, 4,000 bytes in all."""
    rows: tuple[dict[str, Any], ...] = tuple({"text": f"Sentence {n} says that {n * n} is a square. " * 2} for n in range(50))
    return PromptSet(name="story", rows=rows, source="story", revision=None, split="train", sha256=digest(rows), note="")
