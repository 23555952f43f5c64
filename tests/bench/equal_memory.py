"""Quality at equal memory: KL against end-to-end bytes a token, a curve for each family of caches.

    python tests/bench/equal_memory.py --out equal_memory.json

One sequence of the longest length is scored once a spec, teacher-forced. Codes are dequantised for standard attention, which
gives what attention on codes gives up to the noise of floats (`quality.kernel_kl_mean` of a night) in a fifth of the time on a
CPU. A position sees nothing that comes after it, so the first 1,024 positions of 4,096 are those of a sequence of 1,024. KL is
the mean over *all* positions of a length, those included that see no quantised key yet, so that every spec is judged on the
same positions; ``kl_quantized`` leaves out the first 160, which see no quantised key. Bytes are those of live arrays,
window, sinks, parameters and spare capacity included, in the dtype that was run: a layer's cache is filled with tokens of
the model's shape and weighed. A family's curve holds the specs that no other of the family beats in both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from timing import parser, report

from kivi.build import make_prompt_cache
from kivi.measure.arms import Arm
from kivi.measure.intervals import bootstrap_interval, samples
from kivi.measure.memory import cache_bytes
from kivi.measure.quality import divergence
from kivi.measure.reference import ReferenceStore
from kivi.measure.schedule import reference_blocks
from kivi.measure.sequences import TokenStream
from kivi.models import EMBEDDED, LoadedModel, load_model
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  (after kivi, which chooses the BLAS)
from mlx_lm.models.cache import QuantizedKVCache

SPECS = (
    *(f"mlx-quantized:bits={bits},group=32" for bits in (2, 3, 4, 6, 8)),
    # The settings of README and of docs/cache.md, by size.
    "kivi:bits=2,group=64,residual=0,rotate=both",
    "kivi:bits=2,group=64,residual=0,sinks=64,rotate=both",
    "kivi:bits=2,group=64,residual=32,sinks=64,rotate=both",
    "kivi:bits=2,group=64,residual=128,sinks=64,rotate=both",
    "kivi:key_bits=3,value_bits=2,group=64,residual=0,rotate=both",
    "kivi:key_bits=3,value_bits=2,group=64,residual=0,sinks=64,rotate=both",
    "kivi:key_bits=3,value_bits=2,group=64,residual=32,sinks=64,rotate=both",
    "kivi:key_bits=3,value_bits=2,group=64,residual=128,sinks=64,rotate=both",
    "kivi:bits=3,group=64,residual=128,sinks=64,rotate=both",
    "kivi:key_bits=4,value_bits=2,group=64,residual=128,sinks=64,rotate=both",
    "kivi:key_bits=4,value_bits=3,group=64,residual=0,sinks=64,rotate=both",
    "kivi:key_bits=4,value_bits=3,group=64,residual=32,sinks=64,rotate=both",
    "kivi:key_bits=4,value_bits=3,group=64,residual=64,sinks=64,rotate=both",
    "kivi:key_bits=4,value_bits=3,group=64,residual=128,sinks=64,rotate=both",
    "kivi:key_bits=4,value_bits=3,group=64,residual=128,rotate=both",
    "kivi:bits=4,group=64,residual=32,sinks=64,rotate=both",
    "kivi:bits=4,group=64,residual=128,sinks=64,rotate=both",
    "kivi:key_bits=8,value_bits=4,group=64,residual=32,sinks=64,rotate=both",
    "kivi:bits=8,group=64,residual=0,rotate=both",
    "kivi:bits=8,group=64,residual=0",
    "kivi:bits=8,residual=32",
    # Small groups need small windows, which counts at short lengths.
    "kivi:bits=2,residual=0,rotate=both",
    "kivi:key_bits=3,value_bits=2,residual=0,sinks=32,rotate=both",
    "kivi:key_bits=4,value_bits=3,residual=0,sinks=32,rotate=both",
    "kivi:bits=4,residual=32,sinks=32,rotate=both",
    "kivi:key_bits=8,value_bits=4,residual=0,sinks=32,rotate=both",
    "kivi:key_bits=8,value_bits=4,residual=32,sinks=32,rotate=both",
    "kivi:bits=8,residual=0,rotate=both",
    # What rotation, bits and groups are compared with.
    "kivi:bits=2,residual=128,sinks=32",
    "kivi:bits=2,residual=128,sinks=32,rotate=both",
    "kivi:key_bits=3,value_bits=2,residual=128,sinks=32",
    "kivi:key_bits=3,value_bits=2,group=64,residual=128,sinks=64",
    "kivi:key_bits=3,value_bits=2,group=64,residual=128,sinks=64,rotate=keys",
    "kivi:key_bits=3,value_bits=2,group=64,residual=128,sinks=64,rotate=values",
    "kivi:key_bits=4,value_bits=2,residual=128,sinks=32",
    "kivi:key_bits=4,value_bits=3,residual=128,sinks=32",
    "kivi:key_bits=4,value_bits=3,group=64,residual=128,sinks=64",
)
FIRST_QUANTIZED = 160  # position from which every spec with a window of 128 or less and 32 sinks has quantised keys


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    options_of.add_argument("--specs", nargs="+", default=SPECS)
    options_of.add_argument("--backend", default="auto", help="of the packed caches")
    options_of.add_argument("--model", default=EMBEDDED, help="embedded, or a folder in mlx-lm's form")
    options_of.add_argument("--dtype", default="auto", help="of the model: float32, float16, bfloat16, stored or auto")
    options_of.add_argument("--texts", help="file with a JSON list of texts; HumanEval by default")
    options = options_of.parse_args()
    model = load_model(options.model, dtype=options.dtype)
    texts = json.loads(Path(options.texts).read_text()) if options.texts else humaneval(model)
    options.texts_sha256 = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    tokens = TokenStream(model.tokenizer, texts).pack(1, max(options.lengths) + 1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        references = ReferenceStore(Path(folder), 4_000_000_000)
        for text in options.specs:
            rows += measure(model, tokens, parse(text, options.backend), options, references)
            report("equal_memory", options, {"model_dtype": model.dtype, "rows": rows, "curves": curves(rows)})


def parse(text: str, backend: str) -> CacheSpec:
    """Read a spec; packed caches run on ``backend``."""
    return CacheSpec.parse(f"{text},backend={backend}" if text.startswith("kivi") else text)


def humaneval(model: LoadedModel) -> Sequence[str]:
    """Return HumanEval's prompts as the nightly reads them."""
    from tasks.config import PromptSetConfig  # wants datasets, which a machine that only measures need not have
    from tasks.prompts.prompt_sets import load_prompt_set

    return load_prompt_set(PromptSetConfig(source="humaneval")).texts(model.tokenizer)


class Dequantized:
    """mlx-lm's quantised cache, which gives out what it holds as exact numbers."""

    def __init__(self, cache: QuantizedKVCache) -> None:
        self._cache = cache

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        rules = {"group_size": self._cache.group_size, "bits": self._cache.bits}
        return [mx.dequantize(*packed, **rules) for packed in self._cache.update_and_fetch(keys, values)]

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self._cache.make_mask(*args, **kwargs)

    @property
    def offset(self) -> int:
        return self._cache.offset


def measure(
    model: LoadedModel,
    tokens: Sequence[Sequence[int]],
    spec: CacheSpec,
    options: argparse.Namespace,
    references: ReferenceStore,
) -> list[dict[str, Any]]:
    """Score one spec; return a row a length."""
    started = time.perf_counter()
    read = tokens[0][:-1]
    arm, parts = Arm(model, spec, control=True), []
    arm.caches = [Dequantized(cache) if type(cache) is QuantizedKVCache else cache for cache in arm.caches]
    for (_, stop), full in zip(reference_blocks(len(read)), references.logits(model, read), strict=True):
        parts.append(np.array(divergence(full, arm.score(read, stop))))
    kl = np.concatenate(parts)
    seconds = time.perf_counter() - started
    return [
        {
            "spec": spec.slug,
            "family": spec.kind,
            "tokens": length,
            "kl_mean": float(np.mean(kl[:length])),
            "kl_quantized": float(np.mean(kl[FIRST_QUANTIZED:length])),
            "kl_quantized_interval": interval(kl[FIRST_QUANTIZED:length]),
            "bits_a_number": bits_a_number(spec),
            "bytes_per_token": bytes_per_token(model, spec, length),
            "seconds": seconds,
        }
        for length in options.lengths
    ]


def interval(kl: np.ndarray) -> list[float] | None:
    """Return the 95 % interval of the mean, by a bootstrap over blocks of positions."""
    found = bootstrap_interval(*samples([kl]), seed=0)
    return None if found is None else [found.low, found.high]


def bits_a_number(spec: CacheSpec) -> float | None:
    """Return the bits of a number in the codes of a packed cache, scales and zeros included."""
    if spec.kind != "kivi":
        return None
    tokens, channels = spec.group_size, 4 * spec.group_size
    return (
        sum(codec.code_bytes(tokens, channels) + codec.param_bytes(tokens, channels) for codec in spec.codecs)
        * 8
        / (2 * tokens * channels)
    )


def bytes_per_token(model: LoadedModel, spec: CacheSpec, tokens: int) -> float:
    """Fill one layer's cache with random tokens of the model's shape and weigh it; return bytes a token, all layers."""
    args = model.model.args
    dtype = mx.float32 if model.dtype == "float32" else mx.float16
    caches = make_prompt_cache(model.model, spec)
    channels = args.hidden_size // args.num_attention_heads
    keys, values = mx.random.normal((2, 1, args.num_key_value_heads, tokens, channels)).astype(dtype)
    caches[0].update_and_fetch(keys, values)
    mx.eval(caches[0].state)
    return cache_bytes(caches[0]).resident * len(caches) / tokens


def curves(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return, for each length and family, the specs that no other of the family beats in both bytes and KL."""
    best: dict[str, list[str]] = {}
    for row in rows:
        rivals = [other for other in rows if (other["tokens"], other["family"]) == (row["tokens"], row["family"])]
        beaten = any(
            other["bytes_per_token"] <= row["bytes_per_token"] and other["kl_mean"] < row["kl_mean"] for other in rivals
        )
        if not beaten:
            best.setdefault(f"{row['family']} at {row['tokens']}", []).append(row["spec"])
    return best


if __name__ == "__main__":
    main()
