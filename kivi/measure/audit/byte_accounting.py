"""Checks of byte accounting: the bytes that a cache reports against the bytes that it holds."""

from __future__ import annotations

import mlx.core as mx

from kivi.accounting import CacheBytes
from kivi.cache.storage import CODE_STEP, GROWTH
from kivi.measure.arms import held_arrays, settle
from kivi.measure.audit.report import AuditSettings, Curve, Notes
from kivi.measure.audit.subject import Subject, feed, join, read, show_bytes
from kivi.measure.memory import held_bytes, settled_memory

PARTS = ("key_codes", "key_params", "value_codes", "value_params", "residual", "full_precision")
MEMORY_PROBES = 5  # times that MLX's count of active memory is read; each waits for the garbage collector
GPU_PAGE, CPU_PAGE, HEADER = 16_384, 4096, 64  # bytes; see _rounding
AT_ONCE = 2048  # tokens of one call when bytes a token are measured
LONG = 16_384  # tokens: a 32nd of them, the stated spare capacity, is then larger than a window


def check_bytes(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Compare reported bytes with live bytes at each decode step, and each accounted part with what token counts give."""
    prompt = subject.filled
    tokens = subject.tokens(prompt + settings.decode_steps, settings.seed)
    cache = subject.fed(tokens.cut(0, prompt))
    steps = list(range(settings.decode_steps))
    wrong: dict[str, list[str]] = {name: [] for name in ("resident", "total", "spare", *PARTS)}
    reported: list[CacheBytes] = []
    live: list[int] = []
    for step in steps:
        feed(cache, tokens.cut(prompt + step, prompt + step + 1))
        said, held = cache.bytes(), held_bytes(cache)
        reported.append(said)
        live.append(held)
        for what, sentence in _errors(said, held, subject, prompt + step + 1):
            wrong[what].append(f"decode step {step}: {sentence}")
    last, most = reported[-1], max(abs(said.resident - held) for said, held in zip(reported, live, strict=True))
    count = len(steps)
    notes.check(
        "resident",
        _tally(wrong["resident"], count),
        f"at each of {count} decode steps the bytes reported as resident are those of the live arrays, "
        f"{show_bytes(live[-1])} at the last",
        reported_bytes=last.resident,
        live_bytes=live[-1],
        largest_difference_bytes=most,
    )
    notes.check(
        "total",
        _tally(wrong["total"], count),
        f"at each of {count} decode steps live bytes are the accounted bytes and the spare capacity, "
        f"{show_bytes(last.accounted)} and {show_bytes(last.spare)} at the last",
        accounted_bytes=last.accounted,
        spare_bytes=last.spare,
        live_bytes=live[-1],
    )
    notes.check(
        "spare",
        _tally(wrong["spare"], count),
        f"spare capacity stays within what the class states, {show_bytes(last.spare)} of at most "
        f"{show_bytes(subject.spare_limit(prompt + count))} at the last step",
        spare_bytes=last.spare,
        limit_bytes=subject.spare_limit(prompt + count),
    )
    expected = subject.expected_bytes(prompt + count)
    for part in PARTS:
        notes.check(
            f"accounted {part}",
            _tally(wrong[part], count),
            f"{show_bytes(getattr(last, part))} at the last step, as the token count gives",
            billed_bytes=getattr(last, part),
            expected_bytes=getattr(expected, part),
        )
    if hasattr(cache, "packed_bytes"):
        _check_estimate(cache.packed_bytes(), subject, prompt + count, notes)
    curves = {"live": live, "accounted": [said.accounted for said in reported]}
    curves["full_precision"] = [said.full_precision for said in reported]
    notes.curves += [
        Curve(name=f"audit.{name}_bytes", axis="decode step", unit="bytes", steps=steps, values=[float(v) for v in values])
        for name, values in curves.items()
    ]


def _check_estimate(estimate: CacheBytes, subject: Subject, tokens: int, notes: Notes) -> None:
    """Compare what a full-precision cache says that its tokens would take if they were packed with the packed cache's count."""
    expected = subject.packed_bytes(tokens)
    wrong = [
        f"estimates {show_bytes(getattr(estimate, part))} for packed {part}, expected {show_bytes(getattr(expected, part))}"
        for part in PARTS
        if getattr(estimate, part) != getattr(expected, part)
    ]
    notes.check(
        "estimate of packed size",
        join(wrong),
        f"estimates {show_bytes(estimate.accounted)} if its {tokens} tokens were packed, as the packed cache accounts",
        estimated_bytes=estimate.accounted,
        expected_bytes=expected.accounted,
    )


def _errors(said: CacheBytes, held: int, subject: Subject, tokens: int) -> list[tuple[str, str]]:
    """Return what is wrong with the reported bytes at this moment: its name and a sentence."""
    found = []
    if said.resident != held:
        found.append(("resident", f"reports {show_bytes(said.resident)} as resident, its live arrays hold {show_bytes(held)}"))
    if said.accounted + said.spare != held:
        missing = held - said.accounted - said.spare
        found.append(("total", f"live arrays hold {show_bytes(held)}, {show_bytes(missing)} more than accounted and spare"))
    limit = subject.spare_limit(tokens)
    if said.spare > limit:
        found.append(("spare", f"reports {show_bytes(said.spare)} as spare capacity, expected at most {show_bytes(limit)}"))
    expected = subject.expected_bytes(tokens)
    for part in PARTS:
        ours, theirs = getattr(said, part), getattr(expected, part)
        if ours != theirs:
            found.append((part, f"accounts {show_bytes(ours)} for {part} of {tokens} tokens, expected {show_bytes(theirs)}"))
    return found


def _tally(sentences: list[str], steps: int) -> str:
    return f"wrong at {len(sentences)} of {steps} decode steps; {join(sentences[:1])}" if sentences else ""


def check_memory(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Compare the growth of MLX's active memory, with all garbage collected, with the bytes that the cache reports."""
    prompt = subject.filled
    tokens = subject.tokens(prompt + settings.decode_steps, settings.seed + 1)
    every = max(1, settings.decode_steps // MEMORY_PROBES)
    # A first use keeps compiled functions and their constants for good: they are no part of a cache.
    read(subject.fed(tokens, [prompt] + [1] * settings.decode_steps))
    before = settled_memory()
    cache = subject.make()
    feed(cache, tokens.cut(0, prompt))
    wrong, steps, grown, said = [], [], [], 0
    allowed = 0
    for step in range(settings.decode_steps):
        feed(cache, tokens.cut(prompt + step, prompt + step + 1))
        if (step + 1) % every:
            continue
        said = cache.bytes().resident
        allowed = sum(_rounding(array) for array in held_arrays(cache))
        grown.append(settled_memory() - before)
        steps.append(step)
        if abs(grown[-1] - said) > allowed:
            wrong.append(f"decode step {step}: reports {show_bytes(said)}, MLX's active memory grew by {show_bytes(grown[-1])}")
    notes.check(
        "active memory",
        join(wrong[-1:]),
        f"MLX's active memory grew by {show_bytes(grown[-1])}, reported are {show_bytes(said)} "
        f"(allocations are rounded up, by at most {show_bytes(allowed)} in all); read {len(steps)} times; copies outside MLX, "
        "in numpy say, are not seen",
        reported_bytes=said,
        active_bytes=grown[-1],
        rounding_bytes=allowed,
    )
    notes.curves.append(
        Curve(
            name="audit.active_bytes", axis="decode step", unit="bytes", steps=steps, values=[float(value) for value in grown]
        )
    )


def _rounding(array: mx.array) -> int:
    """Return the most bytes that MLX's allocator adds to an array.

    It reuses a buffer that is less than twice the size and less than two pages larger.
    """
    page = GPU_PAGE if mx.default_device() == mx.gpu else CPU_PAGE
    return min(array.nbytes + HEADER, 2 * page)


def check_growth(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Measure bytes a token over thousands of tokens, where a window or spare capacity of fixed size no longer counts."""
    longer = subject.tokens(2 * AT_ONCE, settings.seed + 2)
    sizes = []
    for count in (AT_ONCE, 2 * AT_ONCE):
        cache = subject.fed(longer.cut(0, count))
        read(cache)
        sizes.append(held_bytes(cache))
    token = (sizes[1] - sizes[0]) / AT_ONCE
    full = subject.expected_bytes(AT_ONCE).full_precision / AT_ONCE
    expected = (subject.expected_bytes(2 * AT_ONCE).accounted - subject.expected_bytes(AT_ONCE).accounted) / AT_ONCE
    slack = expected * (1 + 1 / GROWTH) + subject.spare_limit(0) / AT_ONCE
    sentence = (
        f"live arrays grow by {token:,.1f} bytes a token, full precision by {full:,.1f}, {full / token:.2f} times as much"
    )
    wrong = f"{sentence}; the spec gives {expected:,.1f}, with spare capacity at most {slack:,.1f}" if token > slack else ""
    notes.check("bytes a token", wrong, sentence, live_bytes=token, promised_bytes=expected, full_bytes=full)
    if not subject.packs and not wrong:
        notes.warn("saves no memory", f"{subject.spec.kind} keeps every token in full precision: it shows the error alone")
    _check_spare_after_growth(subject, settings, notes)


def _check_spare_after_growth(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Measure spare capacity when a long cache has just grown, which is when it has the most."""
    tokens = subject.tokens(LONG + 2 * CODE_STEP, settings.seed + 2)
    cache = subject.fed(tokens.cut(0, LONG))
    most, limit, where = 0, subject.spare_limit(LONG), LONG
    for stop in (LONG + CODE_STEP, LONG + 2 * CODE_STEP):
        feed(cache, tokens.cut(stop - CODE_STEP, stop))
        settle([cache])
        spare = held_bytes(cache) - subject.expected_bytes(stop).accounted
        if spare > most:
            most, limit, where = spare, subject.spare_limit(stop), stop
    sentence = f"live arrays hold at most {show_bytes(most)} more than {where:,} tokens need, once a long cache has grown"
    wrong = f"{sentence}; its class states at most {show_bytes(limit)}" if most > limit else ""
    notes.check("spare as it grows", wrong, sentence, spare_bytes=most, limit_bytes=limit, tokens=where)
