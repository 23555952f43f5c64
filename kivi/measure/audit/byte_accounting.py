"""Scenes of bookkeeping: what a cache says it weighs, against what it weighs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from kivi.accounting import CacheBytes
from kivi.cache.storage import CODE_STEP, GROWTH
from kivi.measure.arms import held_arrays, settle
from kivi.measure.audit.report import Curve, Notes, SceneSettings
from kivi.measure.audit.subject import Pair, Subject, feed, join, read, show_bytes, subject_of
from kivi.measure.memory import held_bytes, settled_memory
from kivi.spec import CacheSpec

PARTS = ("key_codes", "key_params", "value_codes", "value_params", "residual", "full_precision")
WITNESSED = 5  # times that MLX's own count of active memory is asked; each waits for the garbage collector
GPU_PAGE, CPU_PAGE, HEADER = 16_384, 4096, 64  # bytes; see _rounding
AT_ONCE = 2048  # tokens, for bytes a token in the long run
GROWN = 16_384  # tokens, of which a 32nd stands out from a window; what comes after them makes the codes grow

SEED_SPEC: dict[str, Any] = {"key_bits": 2, "value_bits": 2, "group_size": 32, "residual_length": 32}
SEED_TOKENS, SEED_HEADS, SEED_HEAD_DIM = 200, 4, 64
SEED_LIVE, SEED_BILLED, SEED_FULL = 131_072, 15_360, 81_920


def books(subject: Subject, settings: SceneSettings, notes: Notes) -> None:
    """Compare reported with live bytes at each decode step, every part of the bill with one made from counts alone."""
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
        for what, sentence in _look(said, held, subject, prompt + step + 1):
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
        f"at each of {count} decode steps live bytes are the bill and its spare capacity, "
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
    expected = subject.bill(prompt + count)
    for part in PARTS:
        notes.check(
            f"bill of {part}",
            _tally(wrong[part], count),
            f"{show_bytes(getattr(last, part))} at the last step, as the number of tokens says",
            billed_bytes=getattr(last, part),
            expected_bytes=getattr(expected, part),
        )
    curves = {"live": live, "accounted": [said.accounted for said in reported]}
    curves["full_precision"] = [said.full_precision for said in reported]
    notes.curves += [
        Curve(name=f"audit.{name}_bytes", axis="decode step", unit="bytes", steps=steps, values=[float(v) for v in values])
        for name, values in curves.items()
    ]


def _look(said: CacheBytes, held: int, subject: Subject, tokens: int) -> list[tuple[str, str]]:
    """Return what is wrong with the books at this moment: its name and a sentence."""
    found = []
    if said.resident != held:
        found.append(("resident", f"reports {show_bytes(said.resident)} as resident, its live arrays hold {show_bytes(held)}"))
    if said.accounted + said.spare != held:
        missing = held - said.accounted - said.spare
        found.append(("total", f"live arrays hold {show_bytes(held)}, {show_bytes(missing)} more than bill and spare"))
    if said.spare > subject.spare_limit(tokens):
        limit = subject.spare_limit(tokens)
        found.append(("spare", f"{show_bytes(said.spare)} are called spare capacity, at most {show_bytes(limit)} can be"))
    expected = subject.bill(tokens)
    for part in PARTS:
        billed, due = getattr(said, part), getattr(expected, part)
        if billed != due:
            found.append((part, f"bills {show_bytes(billed)} for {part} of {tokens} tokens, {show_bytes(due)} are due"))
    return found


def _tally(sentences: list[str], steps: int) -> str:
    return f"wrong at {len(sentences)} of {steps} decode steps; {join(sentences[:1])}" if sentences else ""


def witness(subject: Subject, settings: SceneSettings, notes: Notes) -> None:
    """Ask MLX itself: active memory before and after, with all garbage collected, against what the cache reports."""
    prompt = subject.filled
    tokens = subject.tokens(prompt + settings.decode_steps, settings.seed + 1)
    every = max(1, settings.decode_steps // WITNESSED)
    # What a first use keeps for good, such as compiled functions and their constants, is no part of a cache.
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
        f"(allocations are rounded up, by at most {show_bytes(allowed)} in all); looked at {len(steps)} times",
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
    """Return the most that MLX's allocator adds to an array.

    It takes a buffer that was used before when that is less than twice the size and less than two pages larger.
    """
    page = GPU_PAGE if mx.default_device() == mx.gpu else CPU_PAGE
    return min(array.nbytes + HEADER, 2 * page)


def growth(subject: Subject, settings: SceneSettings, notes: Notes) -> None:
    """Measure bytes a token in the long run, where neither window nor spare capacity of a fixed size counts."""
    longer = subject.tokens(2 * AT_ONCE, settings.seed + 2)
    sizes = []
    for count in (AT_ONCE, 2 * AT_ONCE):
        cache = subject.fed(longer.cut(0, count))
        read(cache)
        sizes.append(held_bytes(cache))
    token = (sizes[1] - sizes[0]) / AT_ONCE
    full = subject.bill(AT_ONCE).full_precision / AT_ONCE
    due = (subject.bill(2 * AT_ONCE).accounted - subject.bill(AT_ONCE).accounted) / AT_ONCE
    slack = due * (1 + 1 / GROWTH) + subject.spare_limit(0) / AT_ONCE
    sentence = (
        f"live arrays grow by {token:,.1f} bytes a token, full precision by {full:,.1f}, {full / token:.2f} times as much"
    )
    wrong = f"{sentence}; the spec promises {due:,.1f}, with spare capacity at most {slack:,.1f}" if token > slack else ""
    notes.check("bytes a token", wrong, sentence, live_bytes=token, promised_bytes=due, full_bytes=full)
    if not subject.packs and not wrong:
        notes.warn("saves no memory", f"{subject.spec.kind} keeps every token in full precision: it shows the error alone")
    _spare_as_it_grows(subject, settings, notes)


def _spare_as_it_grows(subject: Subject, settings: SceneSettings, notes: Notes) -> None:
    """Measure spare capacity where a long cache has just grown, which is when it has the most."""
    tokens = subject.tokens(GROWN + 2 * CODE_STEP, settings.seed + 2)
    cache = subject.fed(tokens.cut(0, GROWN))
    most, limit, where = 0, subject.spare_limit(GROWN), GROWN
    for stop in (GROWN + CODE_STEP, GROWN + 2 * CODE_STEP):
        feed(cache, tokens.cut(stop - CODE_STEP, stop))
        settle([cache])
        spare = held_bytes(cache) - subject.bill(stop).accounted
        if spare > most:
            most, limit, where = spare, subject.spare_limit(stop), stop
    sentence = f"live arrays hold at most {show_bytes(most)} more than {where:,} tokens need, once a long cache has grown"
    wrong = f"{sentence}; its class states at most {show_bytes(limit)}" if most > limit else ""
    notes.check("spare as it grows", wrong, sentence, spare_bytes=most, limit_bytes=limit, tokens=where)


def seed_scene(subject: Subject, settings: SceneSettings, notes: Notes) -> None:  # noqa: ARG001  a scene of fixed specs
    """Reproduce the audit that this project began with, and set the packed cache beside it.

    200 tokens, heads x head_dim = 256, float16, 2 bits, G = R = 32. The round-trip cache keeps its keys in 256 slots of
    full precision; its estimate of packed size covers the 160 tokens that went through the quantiser.
    """
    roundtrip, packed = (
        subject_of(CacheSpec(kind=kind, backend="mlx", **SEED_SPEC), heads=SEED_HEADS, head_dim=SEED_HEAD_DIM)
        for kind in ("kivi-roundtrip", "kivi")
    )
    tokens = roundtrip.tokens(SEED_TOKENS, settings.seed + 3)
    prompt = SEED_TOKENS - 100
    calls = [prompt] + [1] * (SEED_TOKENS - prompt)
    old = roundtrip.fed(tokens, calls)
    slots, live = old.keys.shape[-2], old.keys.nbytes
    estimate = old.packed_bytes()
    billed = estimate.key_codes + estimate.key_params
    quantized = old.frontier
    full = quantized * SEED_HEADS * SEED_HEAD_DIM * old.keys.itemsize
    as_known = (live, billed, full) == (SEED_LIVE, SEED_BILLED, SEED_FULL)
    sentence = (
        f"kivi-roundtrip: keys live {show_bytes(live)} in {slots} slots; as codes the {quantized} quantised tokens would be "
        f"{show_bytes(billed)}, like for like {full:,} / {billed:,} = {full / billed:.2f}"
    )
    known = f"known are {SEED_LIVE:,} live, {SEED_BILLED:,} billed and {SEED_FULL:,} in full precision"
    notes.check(
        "round trip",
        "" if as_known else f"{sentence}; {known}",
        sentence,
        live_key_bytes=live,
        slots=slots,
        estimated_key_bytes=billed,
        full_key_bytes=full,
        ratio_of_estimate=full / billed,
        ratio_of_live=full / live,
    )
    new = packed.fed(tokens, calls)
    _compare_packed(notes, new.bytes(), held_bytes(new), read(old), read(new))


def _compare_packed(notes: Notes, said: CacheBytes, held: int, rounded: Pair, unpacked: Pair) -> None:
    keys = said.key_codes + said.key_params
    sentence = (
        f"kivi: the same keys are {show_bytes(keys)} of codes, scales and zeros; with values, window and spare capacity "
        f"live arrays are {show_bytes(held)}, {said.full_precision / said.accounted:.2f} times smaller than full precision "
        f"without and {said.full_precision / held:.2f} times with the spare capacity"
    )
    wrong = "" if keys == SEED_BILLED and held == said.resident else f"{sentence}; {show_bytes(SEED_BILLED)} are due"
    notes.check(
        "packed",
        wrong,
        sentence,
        packed_key_bytes=keys,
        live_bytes=held,
        accounted_bytes=said.accounted,
        spare_bytes=said.spare,
        full_bytes=said.full_precision,
    )
    apart = sum(int(mx.sum(a != b)) for a, b in zip(rounded, unpacked, strict=True))
    notes.check(
        "same numbers",
        f"{apart:,} keys and values differ between the two caches" if apart else "",
        "both caches give back the same keys and values, bit for bit",
        differing=apart,
    )
