"""Decode at batch 1: steps of a packed cache beside the full cache's, and the host's time to build a step's graph.

    python tests/bench/decode_batch1.py --out tests/bench/results/decode_batch1_h200.json

Models of Llama's shapes with grouped queries and random weights in 4 bits. Each cache holds a history of random tokens. Steps
are built one ahead, as mlx-lm's generation does: step n + 1 is built while the device runs step n. Arms run in random order
within a round, and a round's ratio pairs an arm with the full cache's run of the same round. ``host_ms`` is the time from the
call of the model to the lazy token; ``ratio`` is the full cache's step over the arm's.

With ``--host-only`` nothing of the model is evaluated and no kernel runs, so any machine does, and ``host_ms`` alone is
measured, by the thread's clock: kernels give zeros, and each of mx.fast's operations is one operation, as on a GPU, where a
CPU builds many. What ``mx.fast.cuda_kernel`` itself takes is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from timing import parser, report

from kivi.backends.cuda import CudaTarget
from kivi.backends.kernels.program import Launch, Program
from kivi.backends.kernels.tensor_attention import TensorBackend
from kivi.build import make_prompt_cache
from kivi.cache import packed
from kivi.measure.speed.timing import in_turns
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  (after kivi, which chooses the BLAS)
import mlx.nn as nn
from mlx_lm.models.llama import Model, ModelArgs

VOCABULARY = 2048
SHAPES = {
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "head_dim": 128},
}
SPECS = (
    "full",
    "kivi:bits=2",
    "kivi:bits=4",
    "kivi:bits=3,group=64,sinks=64",
    "kivi:bits=3,group=64,sinks=64,rotate=both",
    "kivi:key_bits=4,value_bits=3,group=64,sinks=64,rotate=both",
)
WARM = 4  # steps before those that are timed


class Run(NamedTuple):
    """Milliseconds a step of one arm in one round: in all (None if nothing ran), and the host's to build its graph."""

    step: float | None
    host: float


class Unrun(CudaTarget):
    """A target whose programs are never compiled: each output is one operation on zeros, lazily."""

    shared_limit = 227 * 1024

    def build(self, program: Program) -> Launch:  # noqa: ARG002
        def launch(*, output_shapes: Any, output_dtypes: Any, **_: object) -> list[mx.array]:
            return [mx.abs(_zeros(tuple(shape), dtype)) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch


@lru_cache
def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.zeros(shape, dtype)


def run_nothing() -> None:
    """Let kernels, and what MLX would build of many operations on a CPU, be one operation each."""
    unrun = TensorBackend(Unrun())
    packed._backend = lambda _: unrun
    for name in ("rope", "rms_norm", "scaled_dot_product_attention"):
        setattr(mx.fast, name, lambda x, *_, **__: mx.abs(x))


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--shapes", nargs="+", default=list(SHAPES))
    options_of.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    options_of.add_argument("--specs", nargs="+", default=SPECS)
    options_of.add_argument("--rounds", type=int, default=5)
    options_of.add_argument("--steps", type=int, default=40)
    options_of.add_argument("--host-only", action="store_true")
    options = options_of.parse_args()
    if options.host_only:
        run_nothing()
    rows: list[dict[str, Any]] = []
    for name in options.shapes:
        model = random_llama(name)
        if not options.host_only:
            mx.eval(model.parameters())
        for context in options.contexts:
            rows += measure(model, name, context, options)
            report("decode_batch1", options, {"rows": rows})


def random_llama(name: str) -> Model:
    """Return a llama with random 4-bit weights in float16, lazily."""
    args = ModelArgs(
        model_type="llama",
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        **SHAPES[name],
    )
    model = Model(args)
    model.set_dtype(mx.float16)
    nn.quantize(model, group_size=64, bits=4)
    return model


def measure(model: Model, name: str, context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every spec at one context; return a row a spec."""
    arms: dict[str, Callable[[int], Run]] = {}
    for text in options.specs:
        spec = CacheSpec.parse(text)
        if options.host_only:
            arms[text] = partial(build, model, spec, context, options.steps)
        else:
            caches = fill(model, spec, context)
            for cache in caches:
                mx.eval(cache.state)
            decode(model, caches, WARM, 0)
            arms[text] = partial(decode, model, caches, options.steps)
    timed = in_turns(arms, options.rounds)
    full = timed["full"]
    rows = []
    for text, runs in timed.items():
        row: dict[str, Any] = {"shape": name, "context": context, "spec": text}
        steps, base = [run.step for run in runs if run.step], [run.step for run in full if run.step]
        if steps:
            ratios = [b / step for b, step in zip(base, steps, strict=True)]
            row |= {
                "ratio": statistics.median(ratios),
                "ratio_rounds": ratios,
                "step_ms": statistics.median(steps),
                "step_ms_rounds": steps,
            }
        host_ratios = [run.host / b.host for b, run in zip(full, runs, strict=True)]
        row |= {
            "host_ms": statistics.median(run.host for run in runs),
            "host_ms_full": statistics.median(run.host for run in full),
            "host_ratio": statistics.median(host_ratios),
            "host_ratio_rounds": host_ratios,
        }
        rows.append(row)
    return rows


def fill(model: Model, spec: CacheSpec, context: int) -> list[Any]:
    """Return the caches of a model with a history of ``context`` random tokens, lazily."""
    caches = make_prompt_cache(model, spec)
    shape = (1, model.args.num_key_value_heads, context, model.args.head_dim)
    for cache in caches:
        cache.update_and_fetch(*(mx.random.normal(shape, mx.float16) for _ in range(2)))
    return caches


def decode(model: Model, caches: list[Any], steps: int, _: int) -> Run:
    """Decode greedily, a step built while the one before runs."""
    token = mx.array([1])
    mx.eval(token)
    host = 0.0
    begun = time.perf_counter()
    for _ in range(steps):
        built = time.perf_counter()
        following = mx.argmax(model(token[None], cache=caches)[:, -1, :], axis=-1)
        host += time.perf_counter() - built
        mx.async_eval(following)
        mx.eval(token)
        token = following
    mx.eval(token)
    return Run((time.perf_counter() - begun) / steps * 1e3, host / steps * 1e3)


def build(model: Model, spec: CacheSpec, context: int, steps: int, _: int) -> Run:
    """Build the graphs of steps on new caches, since graphs that nothing evaluates grow."""
    caches, token = fill(model, spec, context), mx.array([1])
    model(token[None], cache=caches)
    begun = time.thread_time()
    for _ in range(steps):
        token = mx.argmax(model(token[None], cache=caches)[:, -1, :], axis=-1)
    return Run(None, (time.thread_time() - begun) / steps * 1e3)


if __name__ == "__main__":
    main()
