"""Record repeats of the smoke matrix in small: what a night without a change looks like, over and over.

    python tests/bench/record_smoke_nights.py --repeats 24 --out tests/tasks/judge/data/smoke_nights.json

Each repeat measures everything anew (the full cache's logits, too). The file keeps one whole result a cache, and of every
repeat what the gate samples: mean KL and flips of each block, bytes, ratios of each round. It is written after each repeat,
so an interrupted recording is a shorter one. tests/tasks/judge/test_regression_recorded.py draws nights from it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from kivi.measure.cell import measure_cell
from kivi.measure.monitor import Monitor
from kivi.measure.reference import ReferenceStore
from kivi.measure.results import CellResult
from kivi.measure.settings import GenerationSettings, MeasureSettings, ScoreSettings, ThroughputSettings
from kivi.measure.speed.throughput import measure_throughput
from kivi.models import LoadedModel, load_model
from kivi.spec import CacheSpec
from tasks.config import NightlyConfig, load_config
from tasks.prompts.prompt_sets import PromptSet, load_prompt_set
from tasks.run.plan import resolve_specs

SMOKE = Path(__file__).parents[2] / "flows" / "configs" / "smoke.yaml"
# The smoke matrix's caches with a window of 32 tokens, so that short texts see as many quantised keys; timed in five rounds,
# since one says nothing about chance. A repeat takes half a minute on two quiet cores.
SPECS = ("full", "kivi-roundtrip:bits=4,residual=32")
MEASURE = MeasureSettings(
    score=ScoreSettings(sequences=1, length=288),
    generation=GenerationSettings(continuations=1, context=96, steps=4),
    throughput=ThroughputSettings(rounds=5, contexts=(96,), steps=4),
)


def repeat(model: LoadedModel, prompts: PromptSet, config: NightlyConfig, specs: tuple[CacheSpec, ...]) -> list[CellResult]:
    """Measure the matrix once."""
    texts = prompts.texts(model.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        references = ReferenceStore(Path(folder), 2_000_000_000)
        results = [
            measure_cell(
                model,
                texts,
                spec,
                config.measure,
                cell_key=spec.slug,
                prompt_set=prompts.name,
                prompt_sha256=prompts.sha256,
                references=references,
                monitor=Monitor(),
            )
            for spec in specs
        ]
    timings = measure_throughput(model, texts, specs, config.measure.throughput, monitor=Monitor(), seed=config.measure.seed)
    return [result.model_copy(update={"throughput": timings[result.spec.slug]}) for result in results]


def sampled(result: CellResult) -> dict[str, Any]:
    """Return what the gate samples of a result, and what shows whether the machine was quiet."""
    if result.throughput is None:
        raise RuntimeError(f"{result.spec.slug} was not timed")
    (context,) = result.throughput.contexts
    return {
        "sequence_kl": result.quality.sequence_kl,
        "sequence_flips": result.quality.sequence_flips,
        "resident_bytes": result.memory.resident_bytes,
        "tokens": result.memory.tokens,
        "peaks": [result.memory.peak_prefill_bytes, result.memory.peak_decode_bytes],
        "prefill_ratio": [round(ratio, 5) for ratio in context.prefill_ratio.rounds],
        "decode_ratio": [round(ratio, 5) for ratio in context.decode_ratio.rounds],
        "decode_tps": [round(rate, 4) for rate in context.decode_tps.rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    arguments = parser.parse_args()
    smoke = load_config(SMOKE)
    config = smoke.model_copy(update={"specs": tuple(map(CacheSpec.parse, SPECS)), "measure": MEASURE})
    specs, _ = resolve_specs(config)
    model, prompts = load_model(config.models[0].name), load_prompt_set(config.prompt_sets[0])
    nights: list[dict[str, Any]] = []
    whole: dict[str, Any] = {}
    for number in range(arguments.repeats):
        started = time.monotonic()
        results = repeat(model, prompts, config, specs)
        whole = whole or {result.spec.slug: result.model_dump(mode="json") for result in results}
        nights.append(
            {
                "seconds": round(time.monotonic() - started, 1),
                "load": round(os.getloadavg()[0], 1),  # processes that wanted a core during the last minute
                "cells": {result.spec.slug: sampled(result) for result in results},
            }
        )
        content = {"note": arguments.note, "whole": whole, "nights": nights}
        arguments.out.write_text(json.dumps(content, separators=(",", ":")) + "\n")
        print(f"{number + 1}/{arguments.repeats}: {nights[-1]['seconds']} s, load {nights[-1]['load']}", flush=True)


if __name__ == "__main__":
    main()
