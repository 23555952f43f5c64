"""A sensitivity, measured in one call, is what decoding with that one side as codes comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kivi.build import make_prompt_cache
from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.measure import MeasureError
from kivi.measure.arms import FULL, Arm, batch
from kivi.measure.quality import divergence
from kivi.measure.sensitivity import SIDES, SensitivityProbe, Side
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  after kivi, which loads OpenBLAS first

Tiny = Callable[..., LoadedModel]
BASE = CacheSpec.parse("kivi:group=32,sinks=32,residual=32,backend=mlx")
FIRST = 95  # sinks, window and a group, less one


def tokens(count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, 256, count)]


class OneSided(RoundTripKIVICache):
    """The round-trip cache, which forgets what it did to the other side."""

    side: Side

    def _roundtrip(self, start: int, stop: int) -> None:
        other = "values" if self.side == "keys" else "keys"
        kept = mx.array(getattr(self, other))
        super()._roundtrip(start, stop)
        setattr(self, other, kept)


def decoded(model: LoadedModel, read: list[int], layer: int, side: Side, bits: int, rotated: bool) -> float:
    """Return the mean KL with the model's tokens fed one at a time."""
    fields = {**BASE.model_dump(), "kind": "kivi-roundtrip", f"{side[:-1]}_bits": bits}
    caches = make_prompt_cache(model.model, FULL)
    caches[layer] = OneSided(CacheSpec.checked({**fields, "rotate": side if rotated else "none"}))
    caches[layer].side = side
    full = Arm(model, FULL)
    kl = []
    for position, token in enumerate(read):
        one = batch([[token]])
        observed, exact = model.model(one, cache=caches)[0, -1], full.step(one)[0]
        if position >= FIRST:
            kl.append(divergence(exact[None], observed[None]).item())
    return float(np.mean(kl))


@pytest.mark.parametrize(
    ("architecture", "layer"), [("llama", 0), ("llama", 2), ("mistral", 1), ("qwen3", 1), ("gpt_oss", 1), ("gemma", 2)]
)
@pytest.mark.parametrize("side", SIDES)
def test_a_measurement_is_what_decoding_token_by_token_gives(tiny: Tiny, architecture: str, layer: int, side: Side) -> None:
    model, read = tiny(architecture), tokens(150)
    rotated = architecture == "llama"
    measured = SensitivityProbe(model, read, BASE).measure(layer, side, 2, rotated)
    expected = decoded(model, read, layer, side, 2, rotated)
    assert expected > 1e-8 and measured == pytest.approx(expected, rel=0.02)


def test_layers_before_the_measured_one_are_not_computed_again(tiny: Tiny) -> None:
    model = tiny()
    probe = SensitivityProbe(model, tokens(150), BASE)
    calls = []
    for number, layer in enumerate(model.model.layers):
        own = type(layer).__call__

        def counted(*args: Any, own: Any = own, number: int = number, **kwargs: Any) -> Any:
            calls.append(number)
            return own(*args, **kwargs)

        layer.__class__ = type(f"Counted{number}", (type(layer),), {"__call__": counted})
    whole = list(model.model.layers)
    probe.measure(2, "keys", 2, False)
    assert calls == [2] and model.model.layers == whole


def test_every_position_and_every_fourth_agree_roughly_and_count_what_they_compare(tiny: Tiny) -> None:
    model, read = tiny(), tokens(400)
    every, fourth = (SensitivityProbe(model, read, BASE, stride=stride) for stride in (1, 4))
    assert (every.positions, fourth.positions) == (400 - FIRST, -(-(400 - FIRST) // 4))
    one, other = (probe.measure(1, "keys", 2, False) for probe in (every, fourth))
    assert other == pytest.approx(one, rel=0.5)


def test_a_text_without_codes_is_refused(tiny: Tiny) -> None:
    with pytest.raises(MeasureError, match=r"95 tokens: .* first codes at position 95"):
        SensitivityProbe(tiny(), tokens(FIRST), BASE)
