"""What fits: bytes equal those of live arrays, the estimate of a peak follows MLX's meter, what has no answer is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from kivi import CacheSpec, make_prompt_cache
from kivi.fit import FitError, Sizes, fit, read_bytes
from kivi.measure.memory import held_bytes, settled_memory

SPECS = [
    "full",
    "mlx-quantized:bits=4",
    "kivi-roundtrip:bits=4",
    "kivi:bits=2,residual=0",
    "kivi:key_bits=4,value_bits=3,group=64,sinks=64,rotate=both",
    "kivi:bits=8,group=128,params=float32",
]
LENGTHS = [1, 2, 33, 257, 2048, 2049, 2305, 4200]


@pytest.fixture
def save_config(tmp_path: Path) -> Callable[..., str]:
    """Save the config of a model, and nothing else; return the folder."""

    def save(model: Any, **changes: Any) -> str:
        config = {name: value for name, value in vars(model.args).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32", **changes}))
        return str(tmp_path)

    return save


def prefill(model: Any, spec: str, tokens: int, batch: int = 1) -> list[Any]:
    """Prefill as mlx-lm does: in calls of 2,048 tokens, the last token alone."""
    cache = make_prompt_cache(model, CacheSpec.parse(spec))
    prompt = mx.broadcast_to(mx.arange(tokens) % 90, (batch, tokens))
    for start in range(0, tokens - 1, 2048):
        model(prompt[:, start : min(start + 2048, tokens - 1)], cache=cache)
        mx.eval([layer.state for layer in cache if not layer.empty()])
    mx.eval(model(prompt[:, -1:], cache=cache))
    mx.eval([layer.state for layer in cache if not layer.empty()])
    return cache


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_bytes_of_a_cache_are_those_of_its_live_arrays(
    make_model: Callable[..., Any], save_config: Callable[..., str], spec: str, batch: int
) -> None:
    model = make_model("llama", head_dim=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    sizes = Sizes(save_config(model))
    for tokens in LENGTHS if batch == 1 else (257, 2305):
        cache = prefill(model, spec, tokens, batch)
        assert sizes.cache_bytes(CacheSpec.parse(spec), tokens, batch) == sum(map(held_bytes, cache)), tokens


@pytest.mark.parametrize(
    "name",
    ["gpt_oss", "qwen3", "gemma2", "gemma4_text", "deepseek_v2", "deepseek_v3", "iquestloopcoder", "afm7", "mamba", "phi3"],
)
def test_layers_that_keep_their_own_cache_are_counted_too(
    make_model: Callable[..., Any], save_config: Callable[..., str], name: str
) -> None:
    model = make_model(name)
    sizes = Sizes(save_config(model))
    for spec in ("full", "kivi:bits=4") if name in ("gpt_oss", "qwen3") else ("full",):
        for tokens in (2, 15, 40, 300, *[2100] * (name == "gpt_oss")):
            cache = prefill(model, spec, tokens)
            assert sizes.cache_bytes(CacheSpec.parse(spec), tokens) == sum(map(held_bytes, cache)), (spec, tokens)


@pytest.mark.parametrize("spec", ["full", "mlx-quantized:bits=8,group=64", "kivi:key_bits=4,value_bits=3,group=64,sinks=64"])
def test_the_estimate_of_a_peak_follows_mlxs_meter(
    make_model: Callable[..., Any], save_config: Callable[..., str], spec: str
) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = make_model("llama", **shape)
    sizes = Sizes(save_config(model, max_position_embeddings=8192), device="cpu")
    assert sizes.weight_bytes == sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))
    for tokens in (1500, 3000):
        others = settled_memory() - sizes.weight_bytes
        mx.reset_peak_memory()
        cache = make_prompt_cache(model, CacheSpec.parse(spec))
        next(generate_step(mx.arange(tokens) % 90, model, prompt_cache=cache))
        assert sizes.peak_bytes(CacheSpec.parse(spec), tokens) == pytest.approx(mx.get_peak_memory() - others, rel=0.1)


def test_a_gpu_needs_no_scores_but_for_mlx_lms_quantised_cache() -> None:
    specs = [CacheSpec.parse(spec) for spec in ("full", "kivi:bits=4,group=64", "mlx-quantized:bits=4,group=64")]
    on = {device: fit("embedded", 10**10, specs, context=8192, device=device) for device in ("cpu", "gpu")}
    scores = 9 * 2047 * 8191 * 2
    saved = [cpu.peak_bytes - gpu.peak_bytes for cpu, gpu in zip(on["cpu"].rows, on["gpu"].rows, strict=True)]
    assert saved == [scores, scores, 0]


def test_the_longest_context_is_the_last_that_fits(make_model: Callable[..., Any], save_config: Callable[..., str]) -> None:
    folder = save_config(make_model("llama"), max_position_embeddings=100_000)
    sizes = Sizes(folder)
    full, packed = CacheSpec(kind="full"), CacheSpec.parse("kivi:bits=2")
    memory = sizes.peak_bytes(full, 20_000)
    answer = fit(folder, memory, [full, packed], context=20_000)
    assert [row.fits for row in answer.rows] == [True, True]
    for row in answer.rows:
        assert sizes.peak_bytes(row.spec, row.longest_context) <= memory < sizes.peak_bytes(row.spec, row.longest_context + 1)
    assert 20_000 <= answer.rows[0].longest_context < answer.rows[1].longest_context
    assert sizes.longest_context(full, 10**13) == 100_000  # the model's own
    tight = fit(folder, sizes.weight_bytes, [full], context=20_000).rows[0]
    assert (tight.fits, tight.longest_context) == (False, 0)
    twice = fit(folder, memory, [full], context=20_000, batch=2).rows[0]
    assert not twice.fits and twice.cache_bytes == 2 * answer.rows[0].cache_bytes
    assert twice.bytes_per_token == answer.rows[0].bytes_per_token == twice.cache_bytes / 40_000


@pytest.mark.parametrize(
    ("changes", "memory", "message"),
    [
        ({}, 1000, r"memory=0.0 MB: the weights of .* alone take 0.5 MB"),
        ({"num_attention_heads": None}, 10**9, "cannot be built from its config"),
    ],
)
def test_what_has_no_answer_is_one_sentence(
    make_model: Callable[..., Any], save_config: Callable[..., str], changes: dict[str, Any], memory: int, message: str
) -> None:
    folder = save_config(make_model("llama"), **changes)
    with pytest.raises(Exception, match=message):
        fit(folder, memory, [CacheSpec(kind="full")])


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("16 GiB", 16 * 2**30), ("1.5g", 15 * 10**8), ("512MB", 512 * 10**6), ("4096", 4096)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "big", "24XB", "-3GB", "0", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(FitError, match="expected a size such as 24GB or 16GiB"):
        read_bytes(text)
