"""The check of quality by decode length: how the cache's error changes a model's logits, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from kivi.measure import generation
from kivi.measure.arms import Arm
from kivi.measure.audit.report import Curve, Notes
from kivi.measure.monitor import Monitor
from kivi.measure.reference import ReferenceStore
from kivi.measure.schedule import first_visible
from kivi.measure.sequences import TokenStream
from kivi.measure.settings import Settings
from kivi.models import LoadedModel
from kivi.spec import KIVI_BITS, CacheSpec

GROWS = 3.0  # last quarter's mean KL over the first's from which a reader is warned


class DecodeSettings(Settings):
    """How long the decode is along which the error is measured."""

    prompts: int = Field(2, ge=1, le=64, description="prompts that are continued")
    context: int = Field(192, ge=16, description="prompt tokens of each")
    steps: int = Field(64, ge=4, description="decode steps")


@dataclass(frozen=True)
class Reading:
    """A model and what it reads."""

    model: LoadedModel
    texts: Sequence[str]
    references: ReferenceStore
    settings: DecodeSettings


def check_quality(spec: CacheSpec, reading: Reading, monitor: Monitor, notes: Notes) -> None:
    """Decode with the spec at 2, 3, 4 and 8 bits and at its own, on the full cache's tokens and free-running.

    Teacher-forced logits differ by the cache's error alone. Free-running logits belong to different texts from the first
    different token on: the distance between the two curves is that divergence.
    """
    settings, model = reading.settings, reading.model
    prompts = TokenStream(model.tokenizer, reading.texts).windows(settings.prompts, settings.context)
    reference = generation.reference_trajectory(model, prompts, settings.steps, references=reading.references, monitor=monitor)
    own = spec.model_dump()
    variants = {f"b{bits}": CacheSpec.checked({**own, "key_bits": bits, "value_bits": bits}) for bits in KIVI_BITS}
    variants = {name: variant for name, variant in variants.items() if variant != spec}
    for name, variant in {"own": spec, **variants}.items():
        arm = Arm(model, variant)
        decoded = generation.decode(arm, prompts, reference, monitor)
        _note(notes, spec if name == "own" else variant, decoded, name == "own", first_visible(arm.layers), settings)


def _note(
    notes: Notes, spec: CacheSpec, decoded: generation.Decoded, own: bool, visible: int, settings: DecodeSettings
) -> None:
    curves = {"step_kl": decoded.kl, "logit_cosine": decoded.cosine, "logit_cosine_free": decoded.cosine_free}
    for name, values in curves.items():
        unit = "nats" if name == "step_kl" else "1"
        steps = list(range(len(values)))
        notes.curves.append(Curve(name=f"audit.{name}/{spec.slug}", axis="decode step", unit=unit, steps=steps, values=values))
    quarter = len(decoded.kl) // 4
    first, last = float(np.mean(decoded.kl[:quarter])), float(np.mean(decoded.kl[-quarter:]))
    numbers = {
        "kl_mean": float(np.mean(decoded.kl)),
        "kl_first_quarter": first,
        "kl_last_quarter": last,
        "cosine_last": decoded.cosine[-1],
        "cosine_free_last": decoded.cosine_free[-1],
    }
    sentence = (
        f"{spec.slug}: over {len(decoded.kl)} steps after {settings.context} tokens mean KL {numbers['kl_mean']:.3g} nats, "
        f"{first:.3g} in the first quarter and {last:.3g} in the last; cosine at the end {decoded.cosine[-1]:.4f} on the full "
        f"cache's tokens, {decoded.cosine_free[-1]:.4f} free-running"
    )
    seen = decoded.kl[max(0, visible - settings.context) :]
    if own and visible >= settings.context + settings.steps:
        notes.warn(
            "nothing tested", f"{sentence}; no step sees a quantised key, the first would be at token {visible}", **numbers
        )
        return
    never = own and bool(seen) and max(seen) == 0.0
    notes.check("quality", f"{sentence}: exactly zero, the quantiser never ran" if never else "", sentence, **numbers)
    if own and first > 0 and last > GROWS * first:
        notes.warn(
            "growing error", f"{spec.slug}: KL grew {last / first:.1f} times from the first quarter to the last", **numbers
        )
