r"""What tunings came to: allocations by layer beside uniform settings, a third text, and another seed.

    kivi tune embedded
    kivi tune embedded --seed 1
    python tests/bench/tune.py mlruns/reports/tune-A/tuning.json --other mlruns/reports/tune-B/tuning.json \
        --texts prose.json --out tune.json

``sizes`` has, for each allocation by layer with the long window, the best uniform setting of no fewer bits with the same
window, and the bits that a uniform setting would need for the same KL, on the straight line in log KL between its neighbours.
``third`` judges the recommended caches on a text that is neither calibration nor judged, and says whether they keep the tier
that they were recommended for. ``seeds`` compares the recommended bytes of two tunings.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from timing import parser, report

from kivi.measure.candidate import Candidate, judge_candidate
from kivi.measure.monitor import Monitor
from kivi.measure.pareto import pareto
from kivi.measure.reference import ReferenceStore
from kivi.measure.sequences import TokenStream
from kivi.models import load_model
from kivi.spec import CacheSpec
from tasks.judge.gate import standing
from tasks.tune.answer import BOUNDS, Tuning
from tasks.tune.config import EFFORTS
from tasks.tune.subject import WINDOW


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("tuning", type=Path, help="what `kivi tune` wrote")
    options_of.add_argument("--other", type=Path, help="the same with another seed")
    options_of.add_argument("--texts", type=Path, help="file with a JSON list of texts, the third text")
    options = options_of.parse_args()
    tuning = read(options.tuning)
    results: dict[str, Any] = {
        "tuning": {
            **tuning.model_dump(mode="json", include={"model", "model_dtype", "calibration", "judged", "seconds"}),
            "recommendations": [one.sentence for one in tuning.recommendations],
        },
        "candidates": [row(one) for one in sorted(tuning.candidates, key=lambda one: one.bytes_per_token)],
        "sizes": sizes(tuning),
    }
    if options.other:
        other = read(options.other)
        results["seeds"] = seeds(tuning, other)
        options.other = other.digest
    if options.texts:
        content = options.texts.read_bytes()
        results["third"] = third(tuning, json.loads(content))
        options.texts = hashlib.sha256(content).hexdigest()
    options.tuning = tuning.digest  # what was read, not where it lay
    report("tune", options, results)


def read(path: Path) -> Tuning:
    """Read the tuning that ``kivi tune`` wrote."""
    return Tuning.model_validate_json(path.read_text())


def row(one: Candidate) -> dict[str, Any]:
    quality = one.quality
    return {
        "spec": one.spec.slug,
        "family": one.family,
        "bits": one.bits,
        "bytes_per_token": one.bytes_per_token,
        "kl_mean": quality.kl_mean,
        "kl_interval": [quality.kl_interval.low, quality.kl_interval.high] if quality.kl_interval else None,
        "flip_rate": quality.flip_rate,
        "seconds": one.seconds,
    }


def sizes(tuning: Tuning) -> list[dict[str, Any]]:
    """Return each allocation beside the uniform settings with the same window and groups."""
    long = [one for one in tuning.candidates if one.spec.residual_length == WINDOW and one.spec.sink_length]
    uniform = sorted((one for one in long if one.family == "uniform"), key=lambda one: one.bits)
    rows = []
    for one in sorted((one for one in long if one.family == "by layer"), key=lambda one: one.bits):
        kl = one.quality.kl_mean
        same = [other for other in uniform if abs(other.bits - one.bits) < 0.01]
        best = min(same, key=lambda other: other.quality.kl_mean, default=None)
        curve = pareto(uniform, lambda one: (one.bits, one.quality.kl_mean))
        bits = np.interp(-np.log(kl), [-np.log(other.quality.kl_mean) for other in curve], [other.bits for other in curve])
        rows.append(
            {
                "bits": one.bits,
                "kl_by_layer": kl,
                "kl_uniform": best.quality.kl_mean if best else None,
                "uniform": best.spec.slug if best else None,
                "uniform_bits_at_equal_kl": float(bits),
                "fewer_bits": 1 - one.bits / float(bits),
            }
        )
    return rows


def seeds(tuning: Tuning, other: Tuning) -> list[dict[str, Any]]:
    """Return the recommended bytes of two tunings, by aim."""
    found = {one.aim: other.candidate(one.slug).bytes_per_token for one in other.recommendations}
    rows = []
    for one in tuning.recommendations:
        mine = tuning.candidate(one.slug).bytes_per_token
        theirs = found.get(one.aim)
        rows.append({"aim": one.aim, "bytes": mine, "other": theirs, "differ": theirs and abs(theirs - mine) / mine})
    return rows


def third(tuning: Tuning, texts: list[str]) -> list[dict[str, Any]]:
    """Judge the recommended caches on ``texts``."""
    model = load_model(tuning.model)
    score = EFFORTS[tuning.config.effort].score
    sequences = TokenStream(model.tokenizer, texts).pack(score.sequences, score.length + 1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        references = ReferenceStore(Path(folder), 4_000_000_000)
        for recommended in tuning.recommendations:
            known = tuning.candidate(recommended.slug)
            fields = known.model_dump(include={"cell_key", "family", "bits", "bytes_per_token", "context"})
            spec = CacheSpec.model_validate(known.spec.model_dump())
            start = score.length - known.quality.positions // score.sequences
            judged = judge_candidate(
                model, sequences, spec, start=start, seed=0, references=references, monitor=Monitor(), **fields
            )
            rows.append({"aim": recommended.aim, "tier": standing(judged.quality, BOUNDS).tier, **row(judged)})
    return rows


if __name__ == "__main__":
    main()
