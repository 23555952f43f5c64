"""The embedded model, once a session; tiny models with a real byte-level tokenizer for everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kivi.measure.monitor import Monitor
from kivi.measure.reference import ReferenceStore
from kivi.measure.settings import GenerationSettings, MeasureSettings, ScoreSettings, ThroughputSettings
from kivi.models import LoadedModel, load_model

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="session")
def embedded() -> LoadedModel:
    """SmolLM2-135M-Instruct, float32 on a CPU."""
    return load_model("embedded")


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 tokens, a byte each."""
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def tiny(make_model: Callable[..., Any], byte_tokenizer: PreTrainedTokenizerFast) -> Callable[..., LoadedModel]:
    """Build a tiny loaded model of random weights, 256 tokens: ``tiny()``, ``tiny("qwen3", seed=1)``."""

    def build(architecture: str = "llama", **changes: Any) -> LoadedModel:
        model = make_model(architecture, vocab_size=len(ALPHABET), **changes)
        digest = f"{architecture} {sorted(changes.items())}"
        return LoadedModel(model, byte_tokenizer, architecture, "none", digest, "float32", {"vocab_size": len(ALPHABET)})

    return build


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Plain English and code written for these tests: 5,600 bytes."""
    return (Path(__file__).parent / "texts.txt").read_text(encoding="utf-8").split("\n----\n")


@pytest.fixture
def references(tmp_path: Path) -> ReferenceStore:
    """An empty store with room for everything."""
    return ReferenceStore(tmp_path / "references", 10**9)


@pytest.fixture
def monitor() -> Monitor:
    """Neither report nor deadline."""
    return Monitor()


@pytest.fixture
def small() -> MeasureSettings:
    """Settings for tiny models: 128 scored tokens, 2 continuations of 6 tokens, 2 rounds."""
    return MeasureSettings(
        score=ScoreSettings(sequences=1, length=128),
        generation=GenerationSettings(continuations=2, context=80, steps=6),
        throughput=ThroughputSettings(rounds=2, contexts=(32, 64), steps=3),
    )
