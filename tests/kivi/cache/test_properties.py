"""Laws of KIVICache over random calls, trims and specs."""

from __future__ import annotations

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from kivi.cache.single import KIVICache
from kivi.cache.storage import CODE_STEP
from kivi.quantize import group_quantize, pack
from kivi.rotation import rotate
from kivi.spec import KIVI_BITS, CacheSpec

LENGTH = 400  # beyond CODE_STEP, so that codes grow
LAWS = settings(max_examples=30, deadline=None)

specs = st.builds(
    CacheSpec,
    kind=st.just("kivi"),
    backend=st.just("mlx"),
    key_bits=st.sampled_from(KIVI_BITS),
    value_bits=st.sampled_from(KIVI_BITS),
    rotate=st.sampled_from(["none", "keys", "values", "both"]),
    group_size=st.sampled_from([32, 64]),
    residual_length=st.sampled_from([0, 1, 7, 32, 64, 100]),
    sink_length=st.sampled_from([0, 64]),
    param_dtype=st.sampled_from(["float16", "float32"]),
)
calls = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 150)), max_size=25)


def tokens(count: int, seed: int = 0, *, heads: int = 2, value_dim: int = 40) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((1, heads, count, 16), key=mx.random.key(2 * seed))
    return keys, mx.random.normal((1, heads, count, value_dim), key=mx.random.key(2 * seed + 1))


def cut(pair: tuple[mx.array, mx.array], start: int, stop: int) -> tuple[mx.array, mx.array]:
    return pair[0][..., start:stop, :], pair[1][..., start:stop, :]


def lengths_up_to(total: int, counts: list[int]) -> list[int]:
    """Return ``counts`` cut off or filled up so that they sum to ``total``."""
    chosen: list[int] = []
    for count in counts:
        chosen.append(min(count, total - sum(chosen)))
    return [count for count in [*chosen, total - sum(chosen)] if count]


def in_the_basis(what: CacheSpec, pair: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
    """Return keys and values as they are stored: rotated or not."""
    keys, values = pair
    rotated = {"none": "", "both": "kv"}.get(what.rotate, what.rotate[0])
    return rotate(keys) if "k" in rotated else keys, rotate(values) if "v" in rotated else values


def assert_codes_follow_the_definition(cache: KIVICache, pair: tuple[mx.array, mx.array]) -> None:
    """Compare every word, scale and zero with those that :mod:`kivi.quantize` makes of the tokens."""
    what, state = cache.spec, cache.state  # reading the state settles the last call
    keys, values = cut(pair, min(what.sink_length, cache.offset), cache.frontier)
    if keys.shape[-2] == 0:
        return
    keys, values = in_the_basis(what, (keys, values))
    options = {"group_size": what.group_size, "param_dtype": what.params}
    codes, scale, zero = group_quantize(keys, bits=what.key_bits, axis=-2, **options)
    expected = [pack(codes.swapaxes(-1, -2), what.key_bits), scale.swapaxes(-1, -2), zero.swapaxes(-1, -2)]
    codes, scale, zero = group_quantize(values, bits=what.value_bits, axis=-1, **options)
    expected += [pack(codes, what.value_bits), scale, zero]
    for name, array in zip(
        ("key_words", "key_scale", "key_zero", "value_words", "value_scale", "value_zero"), expected, strict=True
    ):
        assert mx.array_equal(state[name], array).item(), name


@LAWS
@given(what=specs, counts=calls, total=st.integers(1, LENGTH))
def test_codes_do_not_depend_on_how_the_tokens_came(what, counts, total):
    pair = tokens(total)
    cache, start = KIVICache(what), 0
    for count in lengths_up_to(total, counts):
        cache.update_and_fetch(*cut(pair, start, start + count))
        start += count
    assert_codes_follow_the_definition(cache, pair)
    at_once = KIVICache(what)
    at_once.update_and_fetch(*pair)
    for (name, ours), theirs in zip(cache.state.items(), at_once.state.values(), strict=True):
        assert mx.array_equal(ours, theirs).item() if isinstance(ours, mx.array) else ours == theirs, name


steps = st.lists(st.tuples(st.sampled_from(["append", "append", "trim", "reload"]), st.integers(1, 150)), max_size=15)


@LAWS
@given(what=specs, steps=steps)
def test_every_resident_byte_is_accounted_for_at_every_step(what, steps):
    cache = KIVICache(what)
    for action, count in steps:
        if action == "append":
            cache.update_and_fetch(*tokens(count))
            if count % 2:  # attended or not, the state is the same
                cache.attend(mx.ones((1, 4, count, 16)), scale=0.2, mask="causal")
        elif action == "trim":
            cache.trim(count)
        else:
            cache = KIVICache.from_state(cache.state)
        weight = cache.bytes()
        assert weight.is_honest, (action, count, weight, weight.accounted)
        assert weight.spare <= spare_bound(cache), (action, count, weight)
        assert cache.nbytes == weight.resident


def spare_bound(cache: KIVICache) -> float:
    """Return the bound that the class documents, in bytes."""
    what, heads, key_dim, value_dim = cache.spec, 2, 16, 40
    padded = -(-value_dim // what.group_size) * what.group_size
    params = 2 * what.params.size / what.group_size
    code_token = heads * (key_dim * (what.key_bits / 8 + params) + padded * (what.value_bits / 8 + params))
    quantized = cache.frontier - min(cache.offset, what.sink_length)
    window = what.residual_length + what.group_size
    return (quantized / 32 + CODE_STEP) * code_token + (window + what.sink_length) * heads * (key_dim + value_dim) * 4


@LAWS
@given(
    what=specs.filter(lambda what: what.residual_length >= 7),
    drafts=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=20, max_size=60),
    prompt=st.integers(1, 200),
)
def test_after_drafts_and_trims_within_the_window_codes_are_those_of_the_surviving_tokens(what, drafts, prompt):
    """As in speculative decoding: append k, trim j < k, again and again across flushes."""
    survivors = tokens(prompt)
    cache = KIVICache(what)
    cache.update_and_fetch(*survivors)
    for index, (appended, trimmed) in enumerate(drafts, start=1):
        draft = tokens(appended, seed=index)
        cache.update_and_fetch(*draft)
        cache.attend(mx.ones((1, 2, appended, 16)), scale=0.2, mask="causal")
        trimmed = min(trimmed, appended - 1)
        assert cache.trim(trimmed) == trimmed
        assert cache.frontier == min(cache.offset, what.sink_length) + what.quantized_tokens(cache.offset)
        kept = cut(draft, 0, appended - trimmed)
        survivors = tuple(mx.concatenate(pair, axis=-2) for pair in zip(survivors, kept, strict=True))
    assert cache.offset == survivors[0].shape[-2]
    assert_codes_follow_the_definition(cache, survivors)
    direct = KIVICache(what)
    direct.update_and_fetch(*survivors)
    direct.bytes()
    assert cache.frontier == direct.frontier
    assert cache.bytes() == direct.bytes()
    exact, stored = cache.state["window_keys"], in_the_basis(what, survivors)[0]
    assert mx.array_equal(exact, stored[..., cache.frontier :, :]).item()


@LAWS
@given(what=specs, total=st.integers(1, LENGTH), trimmed=st.integers(0, LENGTH), counts=calls)
def test_a_trim_keeps_what_was_exact_exact_and_what_was_rounded_as_it_was(what, total, trimmed, counts):
    pair = tokens(total)
    cache, start = KIVICache(what), 0
    for count in lengths_up_to(total, counts):
        cache.update_and_fetch(*cut(pair, start, start + count))
        start += count
    before = cache.dequantized()
    assert cache.trim(trimmed) == min(total, trimmed)
    kept = total - min(total, trimmed)
    assert cache.offset == kept
    for old, new in zip(before, cache.keys_and_values(), strict=True):
        assert mx.array_equal(old[..., :kept, :], new).item()
    assert cache.frontier <= kept
    assert (cache.frontier - min(kept, what.sink_length)) % what.group_size == 0
