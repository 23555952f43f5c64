"""The peak of a prefill that ``kivi fit`` predicts, beside MLX's meter.

A model is built from its config with random weights and prefilled as mlx-lm does it: MLX's peak of active memory, weights
included, against the estimate. Memory does not depend on the numbers, so a config is enough for any shape.
"""

from __future__ import annotations

import kivi  # noqa: F401  # isort: skip  it loads OpenBLAS before MLX

import time

import mlx.core as mx
from mlx_lm.generate import generate_step
from timing import parser, report

from kivi.build import make_prompt_cache
from kivi.fit import Sizes
from kivi.measure.memory import settled_memory
from kivi.models.skeleton import DTYPES, build_skeleton
from kivi.spec import CacheSpec

SPECS = ["full", "kivi:key_bits=4,value_bits=3,group=64,sinks=64,rotate=both", "mlx-quantized:bits=4,group=64"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="embedded", help="a folder with a config.json, a Hugging Face id, or embedded")
    options.add_argument("--dtype", choices=("stored", *DTYPES), default="float32")
    options.add_argument("--prompt", type=int, default=4096)
    options.add_argument("--specs", nargs="+", default=SPECS)
    chosen = options.parse_args()

    sizes = Sizes(chosen.model, dtype=chosen.dtype)
    model = build_skeleton(chosen.model, dtype=chosen.dtype).model
    mx.eval(model.parameters())
    weights = settled_memory()
    rows = {}
    for text in chosen.specs:
        spec = CacheSpec.parse(text)
        caches = make_prompt_cache(model, spec)
        settled_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        next(generate_step(mx.arange(chosen.prompt) % 1000, model, prompt_cache=caches))
        peak = mx.get_peak_memory()
        predicted = sizes.peak_bytes(spec, chosen.prompt)
        seconds = round(time.perf_counter() - started, 1)
        rows[text] = {"predicted_peak": predicted, "measured_peak": peak, "ratio": predicted / peak, "seconds": seconds}
        del caches
    report("fit", chosen, {"device": sizes.device, "weights": weights, "predicted_weights": sizes.weight_bytes, "rows": rows})


if __name__ == "__main__":
    main()
