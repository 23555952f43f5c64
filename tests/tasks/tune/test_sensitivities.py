"""Errors of bits that were not measured follow from the nearest that were; allocations become specs by layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from kivi.footprint import KeyValues
from kivi.measure.candidate import bits_a_number
from kivi.measure.sensitivity import SIDES, Sensitivity
from kivi.spec import CacheSpec
from tasks.tune.candidates import PAIRS, by_layer, plan_candidates
from tasks.tune.sensitivity import Sensitivities
from tasks.tune.subject import WINDOW, Subject

SHAPE = KeyValues(2, 64, 64, mx.float16, mx.float16)


def measured(layer: int, side: str, bits: int, rotated: bool, kl: float) -> Sensitivity:
    fields: dict[str, Any] = {"cell_key": "k", "layer": layer, "side": side, "bits": bits, "rotated": rotated}
    return Sensitivity(**fields, kl_mean=kl, positions=10)


def subject(layers: int = 4) -> Subject:
    """A model of which only shapes are asked."""
    every = tuple(range(layers))
    unasked: Any = None
    return Subject(
        model=unasked,
        identity=unasked,
        layers=every,
        shapes=dict.fromkeys(every, SHAPE),
        group=64,
        rotatable=SIDES,
        calibration=[],
        judged=[[]],
        texts=[],
        start=0,
    )


FLAT = Sensitivities([measured(layer, side, 2, False, 10.0**-layer) for layer in range(4) for side in SIDES])
TURNED = Sensitivities(FLAT.measured + [measured(0, side, 2, True, 0.1) for side in SIDES])


def test_errors_fall_with_the_square_of_the_levels_from_the_nearest_measured() -> None:
    known = Sensitivities([measured(0, "keys", 2, False, 0.1), measured(0, "keys", 3, False, 0.02)])
    assert known.error(0, "keys", False, 3) == 0.02
    assert known.error(0, "keys", False, 4) == pytest.approx(0.02 * (7 / 15) ** 2)
    assert known.error(0, "keys", True, 3) is None
    assert known.total("keys", True, 2) is None


@pytest.mark.parametrize("bits", [2.5, 2.75, 3.0, 4.0, 5.0])
def test_an_allocation_has_the_bits_that_were_asked_for_and_gives_them_to_what_matters(bits: float) -> None:
    spec = by_layer(subject(), FLAT, bits, WINDOW).spec
    assert bits_a_number(spec, subject().shapes, range(4), 4) <= bits + 1e-9
    first, last = spec.for_layer(0, 4), spec.for_layer(3, 4)
    assert (first.key_bits, first.value_bits) >= (last.key_bits, last.value_bits)
    assert (first.key_bits > last.key_bits) == (bits > 2.5)
    assert CacheSpec.checked(spec.model_dump()) == spec


def test_a_layer_is_rotated_where_that_was_better_and_only_there() -> None:
    spec = by_layer(subject(), TURNED, 3.0, WINDOW).spec
    assert [spec.for_layer(layer, 4).rotate for layer in range(4)] == ["both", "none", "none", "none"]


def test_a_recommended_spec_goes_through_its_file(tmp_path: Any) -> None:
    spec = by_layer(subject(), TURNED, 3.0, WINDOW).spec
    assert spec.layers
    (tmp_path / "recommended.yaml").write_text(spec.dump())
    assert CacheSpec.load(tmp_path / "recommended.yaml") == spec


def test_candidates_are_uniform_by_layer_and_mlx_lms_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.tune.candidates.quantized_layers", lambda *_: ())
    planned = plan_candidates(subject(), FLAT)
    slugs = [one.spec.slug for one in planned]
    assert len(slugs) == len(set(slugs))
    assert {one.family for one in planned} == {"uniform", "by layer", "mlx-lm"}
    assert all(any(bits in f"{slug}" for slug in slugs) for bits in (f"k{keys}v{values}" for keys, values in PAIRS))
