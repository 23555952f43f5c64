"""The check of numbers that scales and zeros may not hold: a cache restores or refuses them, and never answers wrongly."""

from __future__ import annotations

import mlx.core as mx

from kivi.measure.audit.history import beyond_one_rounding
from kivi.measure.audit.report import AuditSettings, Notes
from kivi.measure.audit.subject import Pair, Subject, join, read
from kivi.quantize import dtype_name

NUMBER = -100_000.0  # beyond float16, whose largest number is 65,504
RANGE = 100_000.0  # times the levels: a scale beyond float16, where the zero is an ordinary number
SIDES = ("keys", "values")


def check_overflow(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Put one number beyond float16, or one that widens its group's range beyond it, among ordinary keys or values.

    The cache must give it back within one rounding, or refuse it in its calls: at once, or within two tokens of quantising it.
    """
    count = subject.filled
    ways = [("at once", [count - 2, 1, 1], dtype) for dtype in (mx.float32, mx.bfloat16)]
    ways.append(("one by one", [1] * count, mx.float32))
    bits = (subject.spec.key_bits, subject.spec.value_bits)
    for side, name in enumerate(SIDES):
        for what, number in (("number", NUMBER), ("range", RANGE * ((1 << bits[side]) - 1))):
            wrong, refusals = [], []
            for way, calls, dtype in ways:
                tokens = _with_outlier(subject, count, settings.seed + 70, side, number, dtype)
                try:
                    cache = subject.fed(tokens, calls)
                except ValueError as refusal:
                    refusals.append(str(refusal))
                    continue
                if beyond := beyond_one_rounding(subject, read(cache), tokens):
                    wrong.append(
                        f"in {dtype_name(dtype)}, tokens {way}: {beyond:,} numbers are further from what was put in than one "
                        "rounding explains, and no call refused them"
                    )
            put = f"{number:,.0f} among {name}"
            right = f"{put} is refused: {refusals[0]}" if refusals else f"{put} is held"
            wrong[:1] = [f"{put} {sentence}" for sentence in wrong[:1]]
            notes.check(f"{what} in {name}", join(wrong), right, refused=len(refusals), asked=len(ways))


def _with_outlier(subject: Subject, count: int, seed: int, side: int, number: float, dtype: mx.Dtype) -> Pair:
    """Return tokens with ``number`` in the group that leaves the window last."""
    pair = Pair(*(part.astype(dtype) for part in subject.tokens(count, seed)))
    pair[side][0, 0, subject.frontier(count) - 2, 5] = number
    mx.eval(pair)
    return pair
