"""The audit of a cell: whether its caches have the class that the spec says and hold the bytes that they report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from kivi.accounting import CacheBytes, sum_bytes
from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.cache.single import KIVICache
from kivi.measure.arms import Arm, held_arrays
from kivi.measure.memory import cache_bytes, held_bytes
from kivi.measure.quality import Scores
from kivi.measure.results import Audit, Finding

CLASSES = {"kivi": KIVICache, "kivi-roundtrip": RoundTripKIVICache, "mlx-quantized": QuantizedKVCache}

# KL of the full cache to itself in other calls: at most 1.1e-10 over 1,024 positions (SmolLM2, float32 on a CPU). Eight bits
# cost 9e-6 on average. TF32 on an H200 is noisier, 2e-5; but where the window is a multiple of 32 the calls are the
# reference's own, and there a quantiser that never ran is at 0 on any device.
NOISE = 1e-9

# Mean KL of the full cache to itself in other calls that is still noise. On a CPU in float32 8.1e-12 was measured, over 512
# positions of SmolLM2; on an H200, whose products are TF32, 2e-6. In 16 bits nothing was measured that could set a limit.
FULL_NOISE = {"cpu": 1e-8, "gpu": 2e-5}

# Mean KL in nats of codes with one level, as it were: a KL falls with the square of the step, so it is divided by the square of
# the levels. 1.1 and 0.6 were measured at 2 and 8 bits (SmolLM2, float32); a model that loses a hundred-thousandth is none.
LEAST_KL = 1e-5

# Active memory counts whole pages and whatever else the process holds. A cache that hides a full-precision copy is off by a
# factor, which is more.
GROWTH_SLACK = 0.05
PAGE_BYTES = 16_384  # what an allocator may round an array up to


def audit_cell(arm: Arm, scores: Scores, growth: int, compared: int) -> Audit:
    """Audit the caches of ``arm`` after its generation.

    Args:
        arm: The arm, with its caches as they were left.
        scores: The scored positions of the same spec.
        growth: Bytes by which MLX's active memory grew since before the caches were made, with the states of recurrent layers
            in arrays of their own (:func:`kivi.measure.arms.unpin_states`).
        compared: Tokens a row that were fed when the generation's last logits were compared.
    """
    layers = [cache_bytes(cache) for cache in arm.caches]
    total = sum_bytes(layers)
    findings = [
        *_classes(arm),
        *_byte_accounting(arm.caches, layers),
        *_active_memory(arm.caches, total, growth),
        *_zero_guard(arm, scores),
        *_noise_of_full(arm, scores),
        *_generation(scores, compared),
    ]
    passed = not any(finding.severity == "error" for finding in findings)
    return Audit(passed=passed, findings=findings, bytes=total)


def _error(name: str, evidence: str) -> Finding:
    return Finding(name=name, severity="error", evidence=evidence)


def _classes(arm: Arm) -> Iterator[Finding]:
    """The caches are those of the spec, and none is taken for mlx-lm's quantised cache by its attribute ``bits``."""
    count = len(arm.caches)
    for index, cache in enumerate(arm.caches):
        if str(index) in arm.kept or arm.spec.kind == "full":
            continue
        expected = CLASSES[arm.spec.for_layer(index, count).kind]
        if not isinstance(cache, expected):
            yield _error("class", f"layer {index} has a {type(cache).__name__}, the spec says {expected.__name__}")
        if expected is not QuantizedKVCache and hasattr(cache, "bits"):
            yield _error("bits attribute", f"layer {index}: mlx-lm takes a cache with `bits` for its own and reads it wrongly")
    if arm.kept:
        kept = ", ".join(f"{index} {why}" for index, why in arm.kept.items())
        yield Finding(name="layers kept", severity="info", evidence=f"layers with a cache of their own: {kept}")


def _byte_accounting(caches: Sequence[Any], layers: Sequence[CacheBytes]) -> Iterator[Finding]:
    for index, (cache, reported) in enumerate(zip(caches, layers, strict=True)):
        if not reported.is_honest:
            yield _error(
                "byte accounting",
                f"layer {index}: {reported.resident} bytes resident, {reported.accounted} accounted and {reported.spare} spare",
            )
        held = held_bytes(cache)
        if held > reported.resident:
            yield _error("held", f"layer {index}: holds arrays of {held} bytes and reports {reported.resident}")


def _active_memory(caches: Sequence[Any], total: CacheBytes, growth: int) -> Iterator[Finding]:
    arrays = sum(1 for _ in held_arrays(caches))
    allowed = total.resident * (1 + GROWTH_SLACK) + arrays * PAGE_BYTES
    if growth > allowed:
        yield _error("active memory", f"MLX's active memory grew by {growth} bytes, the caches report {total.resident}")


def _zero_guard(arm: Arm, scores: Scores) -> Iterator[Finding]:
    if not arm.layers:
        return
    # Of packed caches the control: its calls are the reference's, and its codes are the same.
    kl = scores.kl if scores.control_kl is None else scores.control_kl
    flips = scores.flips if scores.control_flips is None else scores.control_flips
    kl, flips = kl[:, scores.first :], flips[:, scores.first :]
    steps = [(1 - 2**bits) ** -2 for layer in arm.layers for bits in (layer.key_bits, layer.value_bits)]
    least = LEAST_KL * sum(steps) / (2 * len(arm.caches))
    if kl.max() <= NOISE and not flips.any():
        yield _error(
            "zero guard",
            f"the quantiser never ran: over {kl.size} positions that should see quantised keys the largest KL is "
            f"{kl.max():.2g} and no token flips",
        )
    elif kl.mean() < least and not flips.any():
        yield _error(
            "plausible KL",
            f"codes of so few bits cost more: over {kl.size} positions the mean KL is {kl.mean():.2g}, at least "
            f"{least:.2g} nats are plausible; look for exact numbers that are attended to",
        )


def _noise_of_full(arm: Arm, scores: Scores) -> Iterator[Finding]:
    """The full cache is at the noise of its arithmetic, or something is wrong with the model, the references or MLX."""
    if arm.spec.kind != "full" or any(array.dtype in (mx.float16, mx.bfloat16) for array in held_arrays(arm.caches)):
        return
    device = mx.default_device().type.name
    if scores.kl.mean() > FULL_NOISE[device]:
        yield _error(
            "noise of full",
            f"the full cache is {scores.kl.mean():.2g} nats from its own reference; in float32 on a {device} noise is at most "
            f"{FULL_NOISE[device]:g}: the reference or the computation is wrong; measure again with --refresh",
        )


def _generation(scores: Scores, compared: int) -> Iterator[Finding]:
    if compared <= scores.first:
        evidence = (
            f"no step of the generation sees a quantised key: it ends after {compared} tokens, and the first key is quantised "
            f"for token {scores.first + 1}; make measure.generation's context longer"
        )
        yield Finding(name="generation", severity="warning", evidence=evidence)
