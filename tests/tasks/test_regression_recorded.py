"""How often the gate against history errs, on nights drawn from real repeats of the smoke matrix.

``data/smoke_nights.json`` was recorded by tests/bench/record_smoke_nights.py; its note says on what. Quality and bytes repeat
exactly on a processor, so planted changes in them are all that can be seen; speeds were recorded on a machine that was
busy with other work, which is the worst that a night can meet. What quieter machines can detect is calculated from noise of
a stated spread. docs/history.md has the table.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kivi.measure.results import CellResult
from tasks.config import Tolerances
from tasks.regression import Pair, compare

RECORDED = json.loads((Path(__file__).parent / "data" / "smoke_nights.json").read_text())
NIGHTS = RECORDED["nights"]
KIVI = next(slug for slug in RECORDED["whole"] if slug != "full")
KL, BYTES, DECODE = "quality.kl_mean", "memory.bytes_per_token", "throughput.decode_ratio"
WHOLE = {slug: CellResult.model_validate(whole) for slug, whole in RECORDED["whole"].items()}
DRAWS = 200
TOLERANCES = Tolerances()


def cell(night, slug=KIVI, rounds=None, kl=None, more_bytes=0):
    """Return a cell of a recorded night: the whole result of the first, with that night's samples."""
    sampled, whole = night["cells"][slug], WHOLE[slug]
    (context,) = whole.throughput.contexts
    ratios = {
        name: getattr(context, name).model_copy(update={"rounds": (rounds or sampled)[name]})
        for name in ("prefill_ratio", "decode_ratio")
    }
    quality = {"sequence_kl": kl or sampled["sequence_kl"], "sequence_flips": sampled["sequence_flips"]}
    memory = {"resident_bytes": sampled["resident_bytes"] + more_bytes, "tokens": sampled["tokens"]}
    return whole.model_copy(
        update={
            "quality": whole.quality.model_copy(update=quality),
            "memory": whole.memory.model_copy(update=memory),
            "throughput": whole.throughput.model_copy(update={"contexts": [context.model_copy(update=ratios)]}),
        }
    )


def regressions(now, before):
    """Return the metrics that the gate calls regressions in a night of the smoke matrix."""
    full = cell(NIGHTS[0], "full")
    comparison = compare([Pair("full", "before", full, full), Pair("kivi", "before", now, before)], TOLERANCES)
    return {change.metric.partition("@")[0] for change in comparison.regressions}


def draw(generator):
    """Return two different recorded nights."""
    now, before = generator.choice(len(NIGHTS), size=2, replace=False)
    return NIGHTS[now], NIGHTS[before]


def rate(found):
    found = list(found)
    return sum(found) / len(found)


def test_there_are_twenty_repeats_and_quality_and_bytes_are_the_same_in_all():
    assert len(NIGHTS) >= 20
    for slug in WHOLE:
        for name in ("sequence_kl", "sequence_flips", "resident_bytes", "tokens"):
            assert all(night["cells"][slug][name] == NIGHTS[0]["cells"][slug][name] for night in NIGHTS), (slug, name)


def test_false_alarms_of_a_smoke_night_are_below_one_in_a_hundred():
    """Every recorded night as tonight, beside every other as the last good one."""
    pairs = [(now, before) for now in NIGHTS for before in NIGHTS if now is not before]
    assert rate(bool(regressions(cell(now), cell(before))) for now, before in pairs) < 0.01


def test_false_alarms_of_a_night_of_ten_caches_are_below_one_in_a_hundred():
    """As many caches as the standard matrix times, each drawn as a pair of recorded nights; compared with a pin, too."""
    generator = np.random.default_rng(0)

    def alarm():
        pairs = [Pair(f"cache {index // 2}", "before", *map(cell, draw(generator))) for index in range(20)]
        return bool(compare(pairs, TOLERANCES).regressions)

    assert rate(alarm() for _ in range(DRAWS // 2)) < 0.01


def planted_kl(generator, kl, spread):
    """Return the mean KL by block, each raised by its own factor, the mean of all by 20 %."""
    raised = kl * generator.lognormal(0, spread, size=kl.size)
    return (raised * 1.2 * kl.mean() / raised.mean()).tolist()


@pytest.mark.parametrize(
    ("blocks", "spread", "least", "most"),
    [(7, 0.0, 1.0, 1.0), (7, 0.1, 0.9, 1.0), (7, 0.2, 0.2, 0.6), (28, 0.2, 0.96, 1.0)],
)
def test_a_kl_that_rose_by_a_fifth_is_detected(blocks, spread, least, most):
    """Always, when it rose evenly. Where some blocks rise and others fall, by ``spread``, it takes more than seven blocks."""
    generator = np.random.default_rng(1)
    kl = np.resize(NIGHTS[0]["cells"][KIVI]["sequence_kl"], blocks)
    before = cell(NIGHTS[0], kl=kl.tolist())
    found = rate(KL in regressions(cell(NIGHTS[0], kl=planted_kl(generator, kl, spread)), before) for _ in range(DRAWS))
    assert least <= found <= most


def test_one_byte_more_a_token_is_always_detected():
    before = cell(NIGHTS[0])
    for night in NIGHTS:
        assert BYTES in regressions(cell(night, more_bytes=night["cells"][KIVI]["tokens"]), before)


def slowed(night):
    """Return a night's rounds with every decode 15 % slower."""
    sampled = night["cells"][KIVI]
    return {**sampled, "decode_ratio": [0.85 * ratio for ratio in sampled["decode_ratio"]]}


def test_on_the_busy_machine_of_the_recording_a_slower_decode_is_not_detected():
    """An honest figure: its ratios differ by more than half from round to round, so 15 % is nothing there."""
    logs = np.log([ratio for night in NIGHTS for ratio in night["cells"][KIVI]["decode_ratio"]])
    assert logs.std() > 0.3
    pairs = [(now, before) for now in NIGHTS for before in NIGHTS if now is not before]
    assert rate(DECODE in regressions(cell(now, rounds=slowed(now)), cell(before)) for now, before in pairs) < 0.1


@pytest.mark.parametrize(
    ("spread", "rounds", "least"),
    [(0.02, 5, 0.99), (0.03, 5, 0.95), (0.05, 10, 0.97), (0.10, 20, 0.90)],
)
def test_a_decode_slower_by_fifteen_percent_is_detected_where_rounds_are_steady(spread, rounds, least):
    """Calculated, not recorded: ratios whose logarithms have a standard deviation of ``spread``."""
    generator = np.random.default_rng(3)

    def steady(middle):
        logs = generator.normal(np.log(middle), spread, size=(2, rounds))
        return dict(zip(("prefill_ratio", "decode_ratio"), np.exp(logs).tolist(), strict=True))

    def night(slower):
        drawn = steady(0.9)
        return cell(NIGHTS[0], rounds={**drawn, "decode_ratio": [slower * ratio for ratio in drawn["decode_ratio"]]})

    pairs = [(night(0.85), night(1.0), night(1.0)) for _ in range(DRAWS)]
    detected = rate(DECODE in regressions(slow, before) for slow, before, _ in pairs)
    false = rate(bool(regressions(same, before)) for _, before, same in pairs)
    assert detected >= least
    assert false < 0.01
