"""The paper's headline at the shape of Llama-2-7B: tokens a second against batch size until memory ends.

    python tests/bench/llama7b.py --out llama7b.json

KIVI (arXiv:2402.02750, section 4.3) generates 338 tokens from prompts of 160 on Llama-2-7B. Speed and memory do not depend
on what the weights are, so they are random, in float16. Every row is a whole run: one batch of equal prompts prefilled in
calls of bounded size, then one token a step, greedily, fed back; as in mlx-lm's generation, a step is built while the device
runs the one before. Batches grow until MLX is out of memory; the last rows halve the step between the largest that ran and
the smallest that did not. Each cache runs in a process of its own, so that a failure ends that cache and nothing else. Rows
with ``--context 4096`` decode fewer steps and say how many.

During prefill MLX's memory limit may be lowered, for all caches alike: with more in use, MLX waits for what runs before it
starts more, so that what each layer needs for a moment does not add up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from timing import parser, report

from kivi import CacheSpec, make_prompt_cache

import mlx.core as mx  # isort: skip  (after kivi, which chooses the BLAS)
from mlx.utils import tree_map
from mlx_lm.models import llama

SHAPES = {
    "llama-2-7b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008, "num_attention_heads": 32},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 2},
}
SPECS = ("full", "kivi:bits=4", "kivi:bits=2")
CALL_TOKENS = 16_384  # prompt tokens of one call, over the batch: bounds the activations
WARM_UP_STEPS = 40  # a group of tokens leaves the window on the way


def build(shape: str) -> llama.Model:
    """Return a model of random float16 weights."""
    args = llama.ModelArgs(model_type="llama", vocab_size=32_000, rms_norm_eps=1e-5, tie_word_embeddings=False, **SHAPES[shape])
    model = llama.Model(args)
    model.update(tree_map(lambda weight: (mx.random.normal(weight.shape) * 0.02).astype(mx.float16), model.parameters()))
    mx.eval(model.parameters())
    return model


def run(
    model: llama.Model,
    spec: CacheSpec,
    batch: int,
    context: int,
    steps: int,
    *,
    call_tokens: int = CALL_TOKENS,
    prefill_limit: float | None = None,
) -> dict[str, Any]:
    """Prefill ``batch`` prompts of ``context`` tokens and decode ``steps`` tokens; return speeds and bytes."""
    mx.clear_cache()
    mx.reset_peak_memory()
    caches = make_prompt_cache(model, spec)
    prompts = mx.random.randint(0, 32_000, (batch, context))
    started = time.perf_counter()
    call = max(1, call_tokens // batch)
    with memory_limit(prefill_limit):
        for start in range(0, context, call):
            hidden = model.model(prompts[:, start : start + call], cache=caches)
            mx.eval([hidden, *(cache.state for cache in caches)])
    token = mx.argmax(model.lm_head(hidden[:, -1:]), axis=-1)
    mx.eval(token)
    prefilled = time.perf_counter()
    prefill_peak = mx.get_peak_memory()
    mx.reset_peak_memory()
    step_seconds = []
    before = prefilled
    for _ in range(steps):
        following = mx.argmax(model.lm_head(model.model(token, cache=caches)), axis=-1)
        mx.async_eval(following)
        mx.eval(token)
        token = following
        now = time.perf_counter()
        step_seconds.append(now - before)
        before = now
    mx.eval(token)
    decode_s = time.perf_counter() - prefilled
    return {
        "cache": spec.slug,
        "batch": batch,
        "context": context,
        "steps": steps,
        "prefill_s": prefilled - started,
        "decode_s": decode_s,
        "decode_tps": batch * steps / decode_s,
        "median_step_ms": sorted(step_seconds)[steps // 2] * 1e3,
        "generated_tps": batch * steps / (decode_s + prefilled - started),
        "peak_prefill_bytes": prefill_peak,
        "peak_decode_bytes": mx.get_peak_memory(),
        "cache_bytes": sum(cache.nbytes for cache in caches),
    }


@contextmanager
def memory_limit(gigabytes: float | None) -> Iterator[None]:
    """Give MLX another memory limit while the block runs, if one is given."""
    if gigabytes is None:
        yield
        return
    own = mx.set_memory_limit(int(gigabytes * 1e9))
    try:
        yield
    finally:
        mx.set_memory_limit(own)


def sweep(model: llama.Model, spec: CacheSpec, options: argparse.Namespace) -> None:
    """Print a JSON line a run; raise the batch until memory ends, then close in on the largest that fits."""
    # Compiles what the measured runs use; the second half of the prompt attends to the first.
    warm_up = options.batches[0]
    run(model, spec, warm_up, options.context, WARM_UP_STEPS, call_tokens=warm_up * options.context // 2)
    fits, fails = 0, None
    queue = list(options.batches)
    halvings = options.halvings
    while queue:
        batch = queue.pop(0)
        try:
            row = run(model, spec, batch, options.context, options.steps, prefill_limit=options.prefill_limit)
        except RuntimeError as error:
            row = {"cache": spec.slug, "batch": batch, "context": options.context, "failed": str(error)}
            fails, queue = batch, []
        else:
            fits = batch
        print(json.dumps(row), flush=True)
        if not queue and fails and halvings and fails - fits > max(8, fits // 16):
            halvings -= 1
            queue.append((fits + fails) // 2)


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    options_of.add_argument("--context", type=int, default=160)
    options_of.add_argument("--steps", type=int, default=338)
    options_of.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256, 512, 1024, 2048])
    options_of.add_argument("--halvings", type=int, default=2)
    options_of.add_argument(
        "--prefill-limit", type=float, help="GB in use from which MLX waits in prefill; its own if left out"
    )
    options_of.add_argument("--seconds", type=float, default=240, help="limit of each cache's process")
    options_of.add_argument("--specs", nargs="+", default=SPECS)
    options_of.add_argument("--one", help=argparse.SUPPRESS)
    options = options_of.parse_args()
    if options.one:
        mx.random.seed(0)
        sweep(build(options.shape), CacheSpec.parse(options.one), options)
        return
    rows: list[dict[str, Any]] = []
    for spec in options.specs:
        for row in lines_of([sys.executable, *sys.argv, "--one", spec], options.seconds):
            rows.append({"spec": spec, **row})
            report("llama7b", options, rows)  # after each row, so that a run that is stopped from outside loses none


def lines_of(command: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield what ``command`` prints, a JSON object a line, then how it ended; kill it after ``seconds``."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(seconds, process.kill)
        limit.start()
        for line in process.stdout or ():
            yield json.loads(line)
        limit.cancel()
    yield {"exit_code": process.returncode, "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main()
