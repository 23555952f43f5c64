"""Checks of what a cache gives back: as the definition says, for any calls, after trims, files and batches."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from kivi.measure.audit.report import AuditSettings, Curve, Notes
from kivi.measure.audit.subject import Pair, Subject, differing, feed, first_difference, join, read, show_bytes
from kivi.measure.memory import held_bytes


def check_definition(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Compare what the cache gives back with the definition: old tokens quantised, sinks and the window exact."""
    count = subject.filled + subject.spec.group_size
    tokens = subject.tokens(count, settings.seed)
    given = read(subject.fed(tokens, [count // 3] + [1] * (count - count // 3)))
    expected = subject.as_promised(tokens)
    sinks, frontier = subject.spec.sink_length, subject.frontier(count)
    old, exact = given.cut(sinks, frontier), tokens.cut(sinks, frontier)
    elements = old.keys.size + old.values.size
    untouched = elements - differing(old, exact)
    if given.keys.shape == tokens.keys.shape and untouched > elements // 2:
        wrong = (
            f"the quantiser never ran: {untouched:,} of {elements:,} numbers of the {frontier - sinks} tokens that should be "
            "quantised are those that were put in"
        )
    else:
        wrong = ""
    notes.check(
        "lossy",
        wrong,
        f"of {elements:,} numbers in the {frontier - sinks} quantised tokens {untouched:,} are unchanged by chance",
        unchanged=untouched,
        elements=elements,
    )
    apart, where = differing(given, expected), first_difference(given, expected)
    notes.check(
        "as defined",
        f"{apart:,} numbers differ from the definition in kivi.quantize, the first at token {where} of {count}"
        if apart
        else "",
        f"all {given.keys.size + given.values.size:,} numbers equal the definition bit for bit: "
        f"{frontier - sinks} tokens quantised, {count - frontier + sinks} exact",
        differing=apart,
        tokens=count,
    )


def check_chunking(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Feed the same tokens cut into different calls: the caches must be equal."""
    count = subject.filled + 2 * subject.spec.group_size
    tokens = subject.tokens(count, settings.seed + 10)
    draw = random.Random(settings.seed)  # noqa: S311  not for secrets
    mixed = [draw.choice((1, 1, 3, 17, 40)) for _ in range(count)]
    ways = {"all at once": [count], "sevens": [7] * (count // 7 + 1), "mixed": mixed}
    single = subject.fed(tokens, [1] * count)
    first, accounted = read(single), single.bytes().accounted
    wrong, numbers = [], {}
    for name, calls in ways.items():
        cache = subject.fed(tokens, _within(calls, count))
        apart = differing(read(cache), first)
        numbers[f"differing_{name.replace(' ', '_')}"] = float(apart)
        if apart:
            wrong.append(f"{name}: {apart:,} of {2 * first.keys.size:,} numbers differ from one token a call")
        elif cache.bytes().accounted != accounted:
            wrong.append(f"{name}: accounts {show_bytes(cache.bytes().accounted)}, one token a call {show_bytes(accounted)}")
    right = f"{count} tokens in 4 ways ({', '.join(['one by one', *ways])}): the same numbers, bit for bit, and the same bytes"
    notes.check("chunking", join(wrong), right, **numbers)


def check_append(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Stream a long sequence and read after each group: quantised tokens must never change, and their error must not grow."""
    group = subject.spec.group_size
    count = -(-max(settings.history, subject.filled + 4 * group) // group) * group
    tokens = subject.tokens(count, settings.seed + 20)
    cache, sinks = subject.make(), subject.spec.sink_length
    before: Pair | None = None
    wrong, steps, errors, changed_in_all = [], [], [], 0
    for stop in range(group, count + 1, group):
        feed(cache, tokens.cut(stop - group, stop), [1] * group)
        given, settled = read(cache), subject.frontier(stop)
        if before is not None:
            changed = differing(given.cut(0, before.tokens), before)
            changed_in_all += changed
            if changed:
                wrong.append(f"at {stop} tokens {changed:,} numbers of the first {before.tokens} tokens have changed")
        before = Pair(*(side + mx.array(0, side.dtype) for side in given.cut(0, settled)))
        mx.eval(before)
        if settled >= sinks + group:
            oldest, exact = given.cut(sinks, sinks + group).keys, tokens.cut(sinks, sinks + group).keys
            errors.append(float(mx.mean(mx.abs(oldest.astype(mx.float32) - exact.astype(mx.float32)))))
            steps.append(stop)
    notes.check(
        "old codes",
        f"{join(wrong[:1])}; wrong at {len(wrong)} of {count // group} reads" if wrong else "",
        f"{count} tokens one by one, read after each {group}: no number of a quantised token ever changed",
        changed=changed_in_all,
        looks=count // group,
    )
    if not errors:
        return
    drift = errors[-1] - errors[0]
    notes.check(
        "oldest group's error",
        f"the mean error of the oldest {group} keys went from {errors[0]:.4g} to {errors[-1]:.4g}" if drift else "",
        f"the mean error of the oldest {group} keys is {errors[0]:.4g} from {steps[0]} to {steps[-1]} tokens",
        first=errors[0],
        last=errors[-1],
    )
    notes.curves.append(Curve(name="audit.oldest_error", axis="tokens", unit="1", steps=steps, values=errors))


def check_trim(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Trim by one token, into the codes, and to nothing; then append again.

    Kept tokens must read as before, and whole groups before the cut must stay as they are. A token that is quantised again may
    move by half the scale of its new group at most.
    """
    count, group = subject.filled, subject.spec.group_size
    tokens, later = subject.tokens(count, settings.seed + 30), subject.tokens(count, settings.seed + 31)
    into_codes = count - subject.frontier(count) + group + group // 2
    for cut in sorted({1, min(into_codes, count), count}):
        kept = count - cut
        cache = subject.fed(tokens)
        before = read(cache).cut(0, kept)
        trimmed = cache.trim(cut)
        name = f"trim {cut} of {count}"
        if trimmed != cut or cache.offset != kept:
            notes.check(name, f"trimmed {trimmed} tokens and stands at {cache.offset}, {cut} and {kept} are right", "")
            continue
        changed = differing(read(cache), before) if kept else 0
        feed(cache, later.cut(0, cut), [cut // 2, 1, cut - cut // 2 - 1] if cut > 2 else [1] * cut)
        after = read(cache)
        whole = subject.spec.sink_length + max(0, kept - subject.spec.sink_length) // group * group
        whole = min(kept, whole)
        moved = differing(after.cut(0, whole), before.cut(0, whole)) if whole else 0
        put_in = Pair(*(mx.concatenate(list(side), axis=-2) for side in zip(before, later.cut(0, cut), strict=True)))
        beyond = beyond_one_rounding(subject, after, put_in)
        parts = [
            f"{changed:,} numbers of the {kept} kept tokens changed at the trim" if changed else "",
            f"{moved:,} numbers of whole groups before the cut changed when it grew again" if moved else "",
            f"{beyond:,} numbers are further from what was put in than one rounding explains" if beyond else "",
            f"stands at {after.tokens} tokens after growing back to {count}" if after.tokens != count else "",
        ]
        right = f"{kept} kept tokens read as before; grown back to {count}, all is within one more rounding"
        notes.check(name, join([part for part in parts if part]), right, changed=changed, moved=moved, beyond=beyond)


def check_save(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Save with mlx-lm, load, and append: class, numbers and accounted bytes must be the same."""
    tokens = subject.tokens(subject.filled + 40, settings.seed + 40)
    cache = subject.fed(tokens.cut(0, subject.filled))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.safetensors"
        save_prompt_cache(str(path), [cache])
        (loaded,) = load_prompt_cache(str(path))
        size = path.stat().st_size
    if type(loaded) is not type(cache):
        notes.check("class", f"saved as {type(cache).__name__}, loaded as {type(loaded).__name__}", "")
        return
    apart = differing(read(loaded), read(cache))
    for each in (cache, loaded):
        feed(each, tokens.cut(subject.filled), [1] * 40)
    later = differing(read(loaded), read(cache))
    apart_bytes = cache.bytes().accounted - loaded.bytes().accounted
    parts = [
        f"{apart:,} numbers differ after loading" if apart else "",
        f"{later:,} numbers differ 40 tokens later" if later else "",
        f"accounted bytes differ by {show_bytes(abs(apart_bytes))}" if apart_bytes else "",
    ]
    notes.check(
        "save and load",
        join([part for part in parts if part]),
        f"{subject.filled} tokens in a file of {show_bytes(size)}: the same class, numbers and bytes, also 40 tokens later",
        differing=apart,
        differing_later=later,
        file_bytes=size,
    )


def check_batch(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Merge caches of different lengths into a batch, append, and extract the rows: each must equal its single cache."""
    lengths = (subject.filled, subject.filled - subject.spec.group_size - 3)
    prompts = [subject.tokens(length, settings.seed + 50 + row) for row, length in enumerate(lengths)]
    later = [subject.tokens(45, settings.seed + 60 + row) for row in range(len(lengths))]
    singles = [subject.fed(prompt) for prompt in prompts]
    if not hasattr(singles[0], "merge"):
        notes.info("no batched form", "it has no method merge, so mlx-lm does not batch it")
        return
    merged = singles[0].merge([subject.fed(prompt) for prompt in prompts])
    joined = Pair(*(mx.concatenate(list(side)) for side in zip(*later, strict=True)))
    calls = [1] * 40 + [5]
    feed(merged, joined, calls)
    for single, tokens in zip(singles, later, strict=True):
        feed(single, tokens, calls)
    rows = [merged.extract(row) for row in range(len(lengths))]
    _check_rows(notes, merged, rows, singles)
    _check_batch_bytes(notes, merged, singles)


def _check_rows(notes: Notes, merged: Any, rows: list[Any], singles: list[Any]) -> None:
    wrong, apart = [], 0
    for row, (taken, single) in enumerate(zip(rows, singles, strict=True)):
        if type(taken) is not type(single):
            wrong.append(f"row {row} comes out of a {type(merged).__name__} as {type(taken).__name__}")
            continue
        differ = differing(read(taken), read(single))
        apart += differ
        if differ:
            wrong.append(f"row {row}: {differ:,} numbers differ from the same sequence alone")
    lengths = ", ".join(str(single.offset) for single in singles)
    right = f"rows of {lengths} tokens in a {type(merged).__name__} equal the same sequences alone, bit for bit"
    notes.check("rows", join(wrong), right, differing=apart)


def _check_batch_bytes(notes: Notes, merged: Any, singles: list[Any]) -> None:
    alone = sum(single.bytes().accounted for single in singles)
    held = held_bytes(merged)
    if not hasattr(merged, "bytes"):
        sentence = (
            f"a {type(merged).__name__} has no byte accounting; it holds {show_bytes(held)}, the rows need {show_bytes(alone)}"
        )
        notes.check("byte accounting", sentence, "")
        return
    said = merged.bytes()
    parts = [
        f"reports {show_bytes(said.resident)}, its live arrays hold {show_bytes(held)}" if said.resident != held else "",
        f"accounts {show_bytes(said.accounted)}, the rows alone {show_bytes(alone)}" if said.accounted != alone else "",
        f"accounted and spare are {show_bytes(said.accounted + said.spare)} of {show_bytes(held)}"
        if not said.is_honest
        else "",
    ]
    right = f"accounts {show_bytes(said.accounted)}, as the rows alone do; {show_bytes(held)} live with its spare capacity"
    numbers = {"accounted_bytes": said.accounted, "live_bytes": held, "accounted_alone_bytes": alone}
    notes.check("byte accounting", join([part for part in parts if part]), right, **numbers)


def _within(calls: list[int], count: int) -> list[int]:
    """Cut a list of calls where ``count`` tokens are used up."""
    taken: list[int] = []
    for call in calls:
        taken.append(min(call, count - sum(taken)))
        if sum(taken) == count:
            break
    return taken


def beyond_one_rounding(subject: Subject, given: Pair, put_in: Pair) -> int:
    """Count the numbers that are further from ``put_in`` than half a scale of their group, and what rounding adds."""
    if given.keys.shape != put_in.keys.shape:
        return given.keys.size + given.values.size
    spec = subject.spec
    given, put_in = subject.rotated(given), subject.rotated(put_in)
    limits = [
        _half_scale(put_in.keys[..., spec.sink_length :, :].swapaxes(-1, -2), spec.key_bits, spec.group_size).swapaxes(-1, -2),
        _half_scale(put_in.values[..., spec.sink_length :, :], spec.value_bits, spec.group_size),
    ]
    count = 0
    for ours, theirs, limit in zip(given, put_in, limits, strict=True):
        # Scale, zero and result are rounded, what is rotated twice more, each by half an epsilon of a number no larger than the
        # largest: 2**-11 in float16, in which parameters may be whatever the dtype, and 2**-8 in bfloat16.
        rounding = 2 * max(mx.finfo(dtype).eps for dtype in (theirs.dtype, mx.float16))
        ours, theirs = (side.astype(mx.float32) for side in (ours, theirs))
        error = mx.abs(ours - theirs)[..., spec.sink_length :, :]
        count += int(mx.sum(~(error <= limit + rounding * mx.max(mx.abs(theirs)))))  # NaN counts
    return count


def _half_scale(x: mx.array, bits: int, group: int) -> mx.array:
    """Return half the scale of each number's group along the last axis, in the shape of ``x``."""
    x = x.astype(mx.float32)
    length = x.shape[-1]
    missing = -length % group
    if missing:
        x = mx.concatenate([x, mx.repeat(x[..., -1:], missing, axis=-1)], axis=-1)
    groups = x.reshape(*x.shape[:-1], -1, group)
    half = (mx.max(groups, axis=-1) - mx.min(groups, axis=-1)) / (2 * ((1 << bits) - 1))
    return mx.repeat(half, group, axis=-1)[..., :length]
