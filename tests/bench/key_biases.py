"""What outlying key channels and head dimensions do to each setting: perplexity and KL beside the full cache.

    python tests/bench/key_biases.py --out key_biases.json

Two parts. Keys of Qwen2's boundary layers have biases with norms of 600 to 900 where others have 22 (llama.cpp issue 21385).
``biases`` plants such in the embedded model: a bias of norm NORM on the keys of its first and last layers, in the channels that
rotary embeddings turn the slowest, where Qwen2 has them and where they change the full cache's output the least. ``dims``
scores tiny llamas with random weights and head dimensions of 64 to 256, with and without such a bias in every layer.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from equal_memory import FIRST_QUANTIZED, Dequantized, humaneval, parse
from timing import parser, report

from kivi.measure.arms import Arm
from kivi.measure.quality import divergence
from kivi.measure.reference import ReferenceStore
from kivi.measure.schedule import reference_blocks
from kivi.measure.sequences import TokenStream
from kivi.models import LoadedModel, load_model
from kivi.rotation import RotationError
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  (after kivi, which chooses the BLAS)
from mlx.utils import tree_map
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.llama import Model, ModelArgs

NORM = 700.0
SLOWEST = 4  # channel pairs of a head that carry the bias
SPECS = (
    "full",
    *(f"mlx-quantized:bits={bits},group=32" for bits in (2, 3, 4, 8)),
    *(
        f"kivi:key_bits={keys},value_bits={values},group=64,residual=32,sinks=64,rotate={rotate}"
        for keys, values in ((2, 2), (3, 2), (4, 3), (4, 4))
        for rotate in ("none", "values", "both")
    ),
)
DIMS = (64, 80, 96, 128, 256)


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--length", type=int, default=1024)
    options_of.add_argument("--specs", nargs="+", default=SPECS)
    options_of.add_argument("--dims", type=int, nargs="*", default=DIMS)
    options_of.add_argument("--backend", default="auto", help="of the packed caches")
    options_of.add_argument("--texts", help="file with a JSON list of texts; HumanEval by default")
    options = options_of.parse_args()
    rows: list[dict[str, Any]] = []
    model = load_model(dtype="float32")
    texts = json.loads(Path(options.texts).read_text()) if options.texts else humaneval(model)
    tokens = TokenStream(model.tokenizer, texts).pack(1, options.length + 1)[0]
    for name, norm in (("embedded", 0.0), ("embedded", NORM)):
        layers = model.model.model.layers
        plant([layers[0], layers[-1]], norm)
        rows += score({"part": "biases", "model": name, "norm": norm}, model, tokens, options)
    for dim in options.dims:
        for norm in (0.0, NORM):
            tiny = random_llama(model, dim)
            plant(tiny.model.model.layers, norm)
            facts = {"part": "dims", "model": f"llama, head_dim {dim}", "norm": norm}
            rows += score(facts, tiny, [token % tiny.model.args.vocab_size for token in tokens], options)
            report("key_biases", options, {"rows": rows})


def plant(layers: Sequence[Any], norm: float) -> None:
    """Give the keys of ``layers`` a bias of ``norm`` over all heads, in the slowest channels of each."""
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        heads = attention.n_kv_heads
        dim = attention.k_proj.weight.shape[0] // heads
        drawn = np.random.default_rng(index).choice([-1.0, 1.0], (heads, 2, SLOWEST))
        bias = np.zeros((heads, 2, dim // 2))  # a rotary pair is a channel and the one half a head later
        bias[..., -SLOWEST:] = drawn * norm / math.sqrt(heads * 2 * SLOWEST)
        attention.k_proj.bias = mx.array(bias.reshape(-1), mx.float32)


def random_llama(like: LoadedModel, dim: int) -> LoadedModel:
    """Return a llama of three layers with random weights, drawn so that attention matters, and long-range rotary embeddings."""
    args = ModelArgs(
        model_type="llama",
        hidden_size=4 * dim,
        num_hidden_layers=3,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=dim,
        rms_norm_eps=1e-5,
        vocab_size=512,
        rope_theta=1e6,
    )
    mx.random.seed(dim)
    model = Model(args)
    model.update(tree_map(draw, model.parameters()))
    mx.eval(model.parameters())
    return LoadedModel(**{**vars(like), "model": model, "name": f"random-{dim}"})


def draw(weight: mx.array) -> mx.array:
    """Return new values for a weight of a random model."""
    return mx.ones(weight.shape) if weight.ndim < 2 else mx.random.normal(weight.shape) * 1.5 * weight.shape[-1] ** -0.5


def score(
    facts: dict[str, Any], model: LoadedModel, tokens: Sequence[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Score every spec on one sequence; return a row a spec, whose perplexity is over the positions with quantised keys."""
    rows = []
    read, following = tokens[:-1], np.array(tokens[1:])
    with tempfile.TemporaryDirectory() as folder:
        references = ReferenceStore(Path(folder), 4_000_000_000)
        for text in options.specs:
            row = {**facts, "spec": text}
            try:
                row |= compare(model, read, following, parse(text, options.backend), references)
            except (RotationError, ValueError) as error:
                row["refused"] = str(error)
            rows.append(row)
    return rows


def compare(
    model: LoadedModel, read: Sequence[int], following: np.ndarray, spec: CacheSpec, references: ReferenceStore
) -> dict[str, float]:
    """Return KL, perplexity and that of the full cache over the positions from FIRST_QUANTIZED on."""
    arm = Arm(model, spec, control=spec.kind == "kivi")
    arm.caches = [Dequantized(cache) if type(cache) is QuantizedKVCache else cache for cache in arm.caches]
    kl, loss, loss_full = [], [], []
    for (start, stop), full in zip(reference_blocks(len(read)), references.logits(model, read), strict=True):
        observed = arm.score(read, stop)
        kl.append(np.array(divergence(full, observed)))
        chosen = mx.array(following[start:stop])[:, None]
        for logits, losses in ((observed, loss), (full, loss_full)):
            logits = logits.astype(mx.float32)
            picked = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, chosen, axis=-1)[:, 0]
            losses.append(np.array(picked))
    seen = slice(FIRST_QUANTIZED, None)
    perplexity, perplexity_full = (float(np.exp(np.mean(np.concatenate(part)[seen]))) for part in (loss, loss_full))
    return {
        "kl_quantized": float(np.mean(np.concatenate(kl)[seen])),
        "perplexity": perplexity,
        "perplexity_full": perplexity_full,
        "perplexity_ratio": perplexity / perplexity_full,
    }


if __name__ == "__main__":
    main()
