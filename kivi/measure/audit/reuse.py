"""Checks of what a user comes back to: a prefix that is used again, the turns of a chat, and what was broken off.

Each compares with a cold run: a new cache that was given the same tokens. Both must be equal bit for bit. Trims here do not cut
into codes, where a token is quantised again and may move: that is the check ``trim``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache

from kivi.measure.audit.report import AuditSettings, Notes
from kivi.measure.audit.subject import Pair, Subject, differing, feed, join, read

LATER = 40  # tokens that follow a prefix
TURNS = 10
DRAFT, ACCEPTED = 4, 2  # tokens of a draft, and how many of them the model keeps


def check_prefix(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Come to a prefix by copying, by trimming back and through mlx-lm's store of prompt caches; then go on."""
    count = subject.filled
    prefix, later = subject.tokens(count, settings.seed + 70), subject.tokens(LATER, settings.seed + 71)
    aside = next(tokens for tokens in range(LATER - 1, 0, -1) if subject.frontier(count + tokens) <= count)
    other = subject.tokens(aside, settings.seed + 72)
    cold = read(_fed(subject, prefix, later))
    wrong = []
    for name, come in _ways(subject, prefix, other):
        cache = come()
        feed(cache, later, [1] * LATER)
        apart = differing(read(cache), cold)
        if apart:
            wrong.append(f"{name}: {apart:,} numbers differ from a cold run")
    ways = f"{count} tokens copied, trimmed back to by {aside}, and from a store, then {LATER} more"
    notes.check("reused", join(wrong), f"{ways}: equal to a cold run, bit for bit")


def _ways(subject: Subject, prefix: Pair, other: Pair) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield ways to a cache that holds ``prefix`` and nothing else; what each came from went on with ``other``."""
    model, names = "model", list(range(prefix.tokens))
    asked = [*names, *[-1] * LATER]

    def copied() -> Any:
        cache = subject.fed(prefix)
        copied = copy.deepcopy(cache)
        feed(cache, other)
        return copied

    def trimmed() -> Any:
        cache = _fed(subject, prefix, other)
        cache.trim(other.tokens)
        return cache

    def longer() -> Any:
        store = LRUPromptCache()
        store.insert_cache(model, [*names, *[-2] * other.tokens], [_fed(subject, prefix, other)])
        feed(store.fetch_nearest_cache(model, asked)[0][0], other)  # somebody else, who leaves
        return _taken(store.fetch_nearest_cache(model, asked))

    def shorter() -> Any:
        store = LRUPromptCache()
        store.insert_cache(model, names, [subject.fed(prefix)])
        return _taken(store.fetch_nearest_cache(model, asked))

    yield "copied", copied
    if subject.make().is_trimmable():
        yield "trimmed back", trimmed
        yield "from a longer prompt in the store", longer
    yield "from the store", shorter


def _taken(found: tuple[list[Any], list[int]]) -> Any:
    caches, rest = found
    if len(rest) != LATER:
        raise ValueError(f"the store gave a cache that lacks {len(rest)} tokens of the prompt, {LATER} are right")
    return caches[0]


def check_turns(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Keep a cache over the turns of a chat; after each it must hold what the whole text at once gives."""
    draw = random.Random(settings.seed)  # noqa: S311  not for secrets
    turns = [(draw.randint(5, 60), draw.randint(3, 24)) for _ in range(TURNS)]
    tokens = subject.tokens(sum(map(sum, turns)) + subject.filled, settings.seed + 80)
    cache, stop, wrong, apart_in_all = subject.make(), 0, [], 0
    for turn, (asked, answered) in enumerate(turns):
        start, stop = stop, stop + asked + answered + (0 if turn else subject.filled)
        feed(cache, tokens.cut(start, stop), [stop - start - answered, *[1] * answered])
        apart = differing(read(cache), read(subject.fed(tokens.cut(0, stop))))
        apart_in_all += apart
        if apart:
            wrong.append(f"after turn {turn + 1}, {stop} tokens: {apart:,} numbers differ from the same text at once")
    right = f"{TURNS} turns, {stop} tokens: after each turn equal to the same text at once, bit for bit"
    notes.check("turns", join(wrong), right, differing=apart_in_all)


def check_cancel(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Reject drafts, stop in mid-stream and drop a row of a batch: what follows must be as if it had not been."""
    prompt, later = subject.tokens(subject.filled, settings.seed + 90), subject.tokens(LATER, settings.seed + 91)
    cold = read(_fed(subject, prompt, later))
    _check_drafts(subject, settings, notes, prompt, later, cold)
    stopped = subject.fed(prompt)
    feed(stopped, later.cut(0, 7), [1] * 6)
    pending = [side + mx.array(0, side.dtype) for side in later.cut(6, 7)]
    stopped.update_and_fetch(*pending)  # a step that was built and that nobody waited for
    feed(stopped, later.cut(7), [LATER - 7])
    apart = differing(read(stopped), cold)
    notes.check(
        "stopped",
        f"{apart:,} numbers differ from a run that was not stopped" if apart else "",
        "stopped in mid-stream and given a prompt: equal to a run that was not stopped, bit for bit",
        differing=apart,
    )
    _check_dropped(subject, settings, notes)


def _check_drafts(subject: Subject, settings: AuditSettings, notes: Notes, prompt: Pair, later: Pair, cold: Pair) -> None:
    cache = subject.fed(prompt)
    if not cache.is_trimmable():
        notes.info("drafts", "it cannot be trimmed, so mlx-lm does not decode speculatively with it")
        return
    starts = range(0, LATER, ACCEPTED)
    if any(subject.frontier(prompt.tokens + start + DRAFT) > prompt.tokens + start + ACCEPTED for start in starts):
        notes.info("drafts", "its window is shorter than what is rejected, so trims cut into its codes: see the check trim")
        return
    rejected = subject.tokens(DRAFT - ACCEPTED, settings.seed + 92)
    for start in starts:
        feed(cache, _joined(later.cut(start, start + ACCEPTED), rejected), [DRAFT])
        cache.trim(rejected.tokens)
    apart = differing(read(cache), cold)
    notes.check(
        "drafts",
        f"{apart:,} numbers differ from a run without drafts" if apart else "",
        f"{len(starts)} drafts of {DRAFT} tokens, {ACCEPTED} of each kept: equal to a run without drafts, bit for bit",
        differing=apart,
    )


def _check_dropped(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    lengths = (subject.filled, subject.filled // 2, subject.filled - 7)
    prompts = [subject.tokens(length, settings.seed + 93 + row) for row, length in enumerate(lengths)]
    later = [subject.tokens(LATER, settings.seed + 96 + row) for row in range(len(lengths))]
    caches = [subject.fed(prompt) for prompt in prompts]
    if not hasattr(caches[0], "merge"):
        return
    merged = caches[0].merge(caches)
    feed(merged, _rows([tokens.cut(0, 11) for tokens in later]), [1] * 11)
    merged.filter(mx.array([0, 2]))
    feed(merged, _rows([later[row].cut(11) for row in (0, 2)]), [1] * (LATER - 11))
    wrong = []
    for place, row in enumerate((0, 2)):
        apart = differing(read(merged.extract(place)), read(_fed(subject, prompts[row], later[row])))
        if apart:
            wrong.append(f"row {row}: {apart:,} numbers differ from the same sequence alone")
    notes.check("dropped", join(wrong), "a row of three was dropped: the others equal the same sequences alone, bit for bit")


def _fed(subject: Subject, first: Pair, then: Pair) -> Any:
    """Return a new cache that was given ``first`` at once and ``then`` token by token."""
    cache = subject.fed(first)
    feed(cache, then, [1] * then.tokens)
    return cache


def _joined(*parts: Pair) -> Pair:
    return Pair(*(mx.concatenate(list(side), axis=-2) for side in zip(*parts, strict=True)))


def _rows(parts: list[Pair]) -> Pair:
    return Pair(*(mx.concatenate(list(side)) for side in zip(*parts, strict=True)))
