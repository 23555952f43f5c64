"""KIVICache: what its queries see, what it stores, and mlx-lm's protocol."""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kivi.backends import ATTENTION_BOUND
from kivi.cache.batch import BatchKIVICache
from kivi.cache.overflow import NonFiniteError
from kivi.cache.packed import MAX_CODE_QUERIES
from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.cache.single import DequantizedKIVICache, KIVICache
from kivi.quantize import group_roundtrip
from kivi.rotation import rotate, rotate_back
from kivi.spec import CacheSpec, LayerSpec, SpecError


def spec(**fields) -> CacheSpec:
    return CacheSpec(**{"kind": "kivi", "backend": "mlx", "residual_length": 32, **fields})


def tokens(count: int, *, batch=1, heads=2, key_dim=32, value_dim=32, dtype=mx.float32, seed=0) -> tuple[mx.array, mx.array]:
    first, second = mx.random.split(mx.random.key(seed))
    keys = mx.random.normal((batch, heads, count, key_dim), key=first)
    return keys.astype(dtype), mx.random.normal((batch, heads, count, value_dim), key=second).astype(dtype)


def feed(cache: KIVICache, keys: mx.array, values: mx.array) -> KIVICache:
    cache.update_and_fetch(keys, values)
    return cache


def seen_by_first_query(keys: mx.array, values: mx.array, before: int, what: CacheSpec) -> tuple[mx.array, mx.array]:
    """Return what the visibility rule says, from the definition alone: ``before`` tokens were there when the call came."""
    sinks, group = what.sink_length, what.group_size
    frontier = sinks + max(0, before + 1 - sinks - what.residual_length) // group * group
    sides = []
    for x, bits, axis, name in ((keys, what.key_bits, -2, "keys"), (values, what.value_bits, -1, "values")):
        rotated = what.rotate in (name, "both")
        stored = rotate(x) if rotated else x
        old = stored[..., sinks:frontier, :]
        if frontier > sinks:
            old = group_roundtrip(old, bits=bits, group_size=group, axis=axis, param_dtype=what.params)
        seen = mx.concatenate([stored[..., :sinks, :], old, stored[..., max(sinks, frontier) :, :]], axis=-2)
        sides.append(rotate_back(seen) if rotated else seen)
    return tuple(sides)


def distance(out: mx.array, expected: mx.array) -> float:
    error = mx.max(mx.abs(out.astype(mx.float32) - expected.astype(mx.float32)))
    return (error / mx.max(mx.abs(expected.astype(mx.float32)))).item()


@pytest.mark.parametrize(
    ("dtype", "key_bits", "value_bits", "rotated"),
    [
        (mx.float32, 4, 2, "none"),
        (mx.float16, 4, 2, "none"),
        (mx.bfloat16, 4, 3, "none"),
        (mx.float32, 3, 4, "both"),
        (mx.float16, 3, 2, "both"),
        (mx.bfloat16, 8, 3, "values"),
    ],
)
@pytest.mark.parametrize("residual", [0, 5, 32])
@pytest.mark.parametrize("sinks", [0, 32])
def test_every_call_attends_to_what_its_first_query_would_see(dtype, key_bits, value_bits, rotated, residual, sinks):
    what = spec(residual_length=residual, sink_length=sinks, key_bits=key_bits, value_bits=value_bits, rotate=rotated)
    keys, values = tokens(300, heads=2, value_dim=48, dtype=dtype)
    cache, start = KIVICache(what), 0
    for count in (100, *[1] * 35, 5, 1, MAX_CODE_QUERIES, 40, 1, 30, 1, 1, 60):
        stop = start + count
        queries = mx.random.normal((1, 6, count, 32), key=mx.random.key(stop)).astype(dtype)
        feed(cache, keys[..., start:stop, :], values[..., start:stop, :])
        out = cache.attend(queries, scale=0.2, mask="causal")
        visible = seen_by_first_query(keys[..., :stop, :], values[..., :stop, :], start, what)
        exact = (part.astype(mx.float32) for part in (queries, *visible))
        expected = mx.fast.scaled_dot_product_attention(*exact, scale=0.2, mask="causal")
        assert out.dtype == dtype
        assert distance(out, expected) < ATTENTION_BOUND[dtype], (start, count)
        start = stop


def test_no_query_sees_its_future():
    """Changing the tokens after a query leaves what it returns as it was, also across a flush."""
    keys, values = tokens(200)
    queries = mx.random.normal((1, 2, 120, 32), key=mx.random.key(3))
    outs = []
    for future in (0.0, 50.0):
        cache = feed(KIVICache(spec()), keys[..., :80, :], values[..., :80, :])
        later = mx.arange(120)[:, None] > 60
        feed(cache, keys[..., 80:, :] + later * future, values[..., 80:, :] + later * future)
        outs.append(cache.attend(queries, scale=0.2, mask="causal")[..., :61, :])
    assert mx.array_equal(*outs).item()


def test_update_and_fetch_returns_the_tokens_of_the_call_exactly():
    keys, values = tokens(100)
    fetched = KIVICache(spec()).update_and_fetch(keys, values)
    assert mx.array_equal(fetched[0], keys).item() and mx.array_equal(fetched[1], values).item()


def test_queries_are_not_modified():
    cache = feed(KIVICache(spec()), *tokens(100))
    queries = mx.ones((1, 2, 1, 32))
    mx.eval(cache.attend(queries, scale=3.0))
    assert mx.all(queries == 1).item()


@pytest.mark.parametrize("calls", [[200], [150, 50], [1] * 200])
@pytest.mark.parametrize("residual", [0, 31, 32, 128])
def test_the_window_holds_the_residual_and_less_than_a_group_more(calls, residual):
    keys, values = tokens(200, heads=1)
    cache, start = KIVICache(spec(residual_length=residual)), 0
    for count in calls:
        feed(cache, keys[..., start : start + count, :], values[..., start : start + count, :])
        cache.bytes()
        start += count
        assert cache.offset == start
        assert cache.frontier % 32 == 0
        assert min(start, residual) <= start - cache.frontier <= residual + 31


def test_dequantized_is_the_definition_on_the_codes_and_exact_elsewhere():
    keys, values = tokens(200, value_dim=80)
    what = spec(sink_length=32, value_bits=4)
    cache = feed(KIVICache(what), keys, values)
    assert cache.keys_and_values()[0].shape == keys.shape
    for out, expected in zip(cache.dequantized(), seen_by_first_query(keys, values, 199, what), strict=True):
        assert mx.array_equal(out, expected).item()


def test_the_control_lane_holds_the_same_codes_and_differs_by_the_kernel_alone():
    keys, values = tokens(200)
    packed, control = feed(KIVICache(spec()), keys, values), feed(DequantizedKIVICache(spec()), keys, values)
    query = mx.random.normal((1, 2, 1, 32))
    for cache in (packed, control):
        feed(cache, *tokens(1, seed=1))
    out, expected = (cache.attend(query, scale=0.2) for cache in (packed, control))
    assert 0 < distance(out, expected) < ATTENTION_BOUND[mx.float32]
    assert mx.array_equal(packed.state["key_words"], control.state["key_words"]).item()


@pytest.mark.parametrize("count", [0, 10, 40, 200])
def test_state_builds_the_same_cache_in_arrays_of_its_own(count):
    cache = KIVICache(spec(sink_length=32))
    if count:
        feed(cache, *tokens(count, value_dim=72))
    other = KIVICache.from_state(cache.state)
    assert other.spec == cache.spec and other.offset == count and other.frontier == cache.frontier
    assert other.bytes() == cache.bytes()
    assert_same_state(other, cache)
    feed(other, *tokens(40, value_dim=72, seed=1))
    assert cache.offset == count


def assert_same_state(left: KIVICache, right: KIVICache) -> None:
    for (name, ours), theirs in zip(left.state.items(), right.state.values(), strict=True):
        if isinstance(ours, mx.array):
            assert mx.array_equal(ours, theirs).item(), name
        else:
            assert ours == theirs, name


def test_a_deep_copy_goes_its_own_way():
    cache = feed(KIVICache(spec()), *tokens(100))
    other = copy.deepcopy(cache)
    before = copy.deepcopy(cache)
    feed(other, *tokens(100, seed=1))
    assert other.offset == 200
    assert_same_state(cache, before)


def test_a_full_cache_is_converted_to_the_cache_that_its_tokens_would_have_made():
    keys, values = tokens(130)
    full = KVCache()
    full.update_and_fetch(keys, values)
    assert_same_state(KIVICache.from_full(full, spec()), feed(KIVICache(spec()), keys, values))
    assert KIVICache.from_full(KVCache(), spec()).empty()


def test_a_cache_that_is_not_plain_is_not_converted():
    with pytest.raises(TypeError, match="RotatingKVCache: only mlx-lm's KVCache can be converted"):
        KIVICache.from_full(RotatingKVCache(max_size=8), spec())


def test_another_kind_of_spec_is_refused():
    with pytest.raises(SpecError, match="kind='full': KIVICache takes a spec with kind='kivi'"):
        KIVICache(CacheSpec(kind="full"))
    with pytest.raises(SpecError, match="a cache is one layer's, use make_prompt_cache for settings by layer"):
        KIVICache(CacheSpec(layers={0: LayerSpec(key_bits=8)}))


def test_the_protocol_of_an_empty_cache():
    cache = KIVICache(spec())
    assert cache.empty() and cache.size() == 0 and cache.nbytes == 0 and cache.trim(5) == 0 and cache.is_trimmable()
    assert not hasattr(cache, "bits")
    cache.check_finite(0)
    assert cache.make_mask(1, return_array=False, window_size=None) is None
    assert cache.make_mask(3, return_array=False, window_size=None) == "causal"
    feed(cache, *tokens(10))
    assert not cache.empty() and cache.size() == 10
    assert cache.make_mask(3, return_array=True, window_size=None).shape == (3, 13)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("queries", "mask", "says"),
    [
        (
            (1, 2, 1, 32),
            mx.ones((1, 1, 1, 99), mx.bool_),
            r"mask of shape \(1, 1, 1, 99\): it does not broadcast to \(1, 2, 1, 100\)",
        ),
        ((1, 2, 1, 32), mx.ones((5, 100)), r"mask of shape \(5, 100\): it does not broadcast"),
        ((1, 2, 1, 32), mx.array(1.0), r"mask \(\): expected 'causal' or an array"),
        ((1, 2, 1, 32), "causal-ish", "mask 'causal-ish': expected 'causal' or an array"),
        ((2, 2, 1, 32), None, r"queries \(2, 2, 1, 32\): the cache holds 1 rows and 2 heads of 32 numbers"),
        ((1, 3, 1, 32), None, r"queries \(1, 3, 1, 32\): .* a multiple of 2"),
        ((1, 2, 1, 16), None, r"queries \(1, 2, 1, 16\): "),
        ((2, 1, 32), None, r"queries \(2, 1, 32\): "),
    ],
)
def test_queries_and_masks_that_do_not_go_with_the_cache_are_refused(queries, mask, says, batched):
    cache = feed(KIVICache(spec()), *tokens(99))
    cache = KIVICache.merge([cache]) if batched else cache
    cache.update_and_fetch(*tokens(1))
    with pytest.raises(ValueError, match=says):
        cache.attend(mx.ones(queries), scale=1.0, mask=mask)


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("batched", [False, True])
def test_the_result_has_the_dtype_of_the_queries_whatever_that_of_keys_and_values(count, batched):
    keys, values = tokens(100)
    cache = feed(KIVICache(spec()), keys, values.astype(mx.float16))
    cache = KIVICache.merge([cache]) if batched else cache
    keys, values = tokens(count)
    cache.update_and_fetch(keys, values.astype(mx.float16))
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        assert cache.attend(mx.ones((1, 2, count, 32), dtype), scale=0.1, mask="causal").dtype == dtype


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("position", "what", "named"),
    [(3, "keys", 3), (70, "keys", 64), (71, "values", 71), (150, "keys", 150), (150, "values", 150)],
)
def test_what_is_not_finite_is_named_wherever_it_sits(bad, position, what, named):
    keys, values = tokens(170)
    (keys if what == "keys" else values)[0, 1, position, 5] = bad
    cache = feed(KIVICache(spec(sink_length=32)), keys, values)
    with pytest.raises(NonFiniteError, match=rf"layer 7: .* at token {named};"):
        cache.check_finite(7)


def test_the_worked_example_of_the_documentation_is_what_the_cache_weighs():
    page = (Path(__file__).parents[3] / "docs" / "cache.md").read_text()
    weight = feed(KIVICache(CacheSpec(backend="mlx")), *mx.zeros((2, 1, 8, 4096, 128), mx.float16)).bytes()
    table = {
        "key codes, value codes": f"2 x {weight.key_codes:,}",
        "key parameters, value parameters": f"2 x {weight.key_params:,}",
        "exact": f"{weight.residual:,}",
        "accounted": f"{weight.accounted:,}",
        "spare": f"{weight.spare:,}",
        "resident": f"{weight.resident:,}",
        "full precision": f"{weight.full_precision:,}",
    }
    for part, size in table.items():
        assert f"| {part} | {size} |" in page
    assert f"the whole layer {weight.full_precision / weight.resident:.2f} times" in page


@pytest.mark.parametrize(
    ("keys", "values", "says"),
    [
        (((2, 8, 64), mx.float32), ((2, 8, 64), mx.float32), "expected [B, H, S, D]"),
        (((1, 2, 8, 64), mx.int32), ((1, 2, 8, 64), mx.int32), "in a float of 16 or 32 bits"),
        (((1, 2, 8, 64), mx.float32), ((1, 2, 8, 64), mx.float16), "heads of 64 numbers in float32"),
        (((1, 2, 8, 64), mx.float32), ((1, 2, 9, 64), mx.float32), "the same rows, heads and tokens"),
        (((1, 2, 1, 64), mx.float32), ((1, 1, 1, 64), mx.float32), "the cache holds"),
        (((2, 2, 8, 64), mx.float32), ((2, 2, 8, 64), mx.float32), "the cache holds (1, 2) rows and heads of 64 numbers"),
        (((1, 1, 8, 64), mx.float32), ((1, 1, 8, 64), mx.float32), "the cache holds"),
        (((1, 2, 8, 1), mx.float32), ((1, 2, 8, 1), mx.float32), "the cache holds"),
    ],
)
def test_what_mlx_would_broadcast_or_cast_is_refused_and_changes_nothing(keys, values, says):
    cache = KIVICache(CacheSpec(residual_length=32))
    cache.update_and_fetch(mx.ones((1, 2, 40, 64)), mx.ones((1, 2, 40, 64)))
    batch = cache.merge([cache])
    for each in (cache, batch):
        with pytest.raises(ValueError, match=r"expected|holds") as raised:
            each.update_and_fetch(mx.ones(*keys), mx.ones(*values))
        assert says in str(raised.value)
        assert each.size() == 40


def test_a_part_of_a_token_is_not_trimmed():
    cache = KIVICache(CacheSpec(residual_length=32))
    cache.update_and_fetch(mx.ones((1, 2, 40, 64)), mx.ones((1, 2, 40, 64)))
    with pytest.raises(TypeError, match="float"):
        cache.trim(2.5)
    assert cache.offset == 40


def test_a_state_that_lost_tokens_is_refused():
    cache = KIVICache(CacheSpec(residual_length=32))
    cache.update_and_fetch(mx.ones((1, 2, 100, 64)), mx.ones((1, 2, 100, 64)))
    state = cache.state
    lost = {name: state[name][..., :5, :] for name in ("window_keys", "window_values")}
    with pytest.raises(ValueError, match="offset=100: the state's arrays hold 69 tokens"):
        KIVICache.from_state({**state, **lost})


@pytest.mark.parametrize("name", ["value_scale", "window_values", "sink_keys", "key_words"])
def test_a_state_with_an_array_missing_or_too_short_is_refused_and_leaves_a_live_cache_as_it_was(name):
    state = feed(KIVICache(spec(sink_length=32)), *tokens(200)).state
    live = feed(KIVICache(spec()), *tokens(100))
    before = copy.deepcopy(live)
    changes = [None] if name != "key_words" else [None, state[name][..., :-1]]
    for change in changes:
        with pytest.raises(ValueError, match=r"damaged|not of the same whole groups"):
            live.state = {**state, name: change}
        assert_same_state(live, before)
    live.state = state
    assert_same_state(live, KIVICache.from_state(state))


def test_a_cache_says_what_it_is():
    assert repr(KIVICache(CacheSpec(backend="mlx"))) == "KIVICache(kivi-k2v2-g32-r128-mlx, offset=0)"


def test_a_state_that_lacks_something_says_what():
    state = KIVICache(CacheSpec(backend="mlx")).state
    del state["offset"]
    with pytest.raises(ValueError, match="the state lacks offset: it is not that of a packed cache, or is damaged"):
        KIVICache.from_state(state)


@pytest.mark.parametrize("change", ["another type", "another version", "no JSON"])
def test_a_state_of_something_else_is_refused_in_a_sentence(change):
    state = KIVICache(CacheSpec(backend="mlx")).state
    kind, says = ValueError, "a state of type tuple: expected that of a packed cache, a dict"
    if change == "another type":
        state = (mx.zeros(1), mx.zeros(1))
    else:
        text = state["spec"].replace("{", '{"entropy_coding":true,', 1) if change == "another version" else "kivi"
        state["spec"], kind, says = text, SpecError, r"a spec that this version cannot read: .*\S"
    for cache in (KIVICache, BatchKIVICache):
        with pytest.raises(kind, match=says):
            cache.from_state(state if isinstance(state, tuple) else {**BatchKIVICache(CacheSpec(), [0]).state, **state})


@pytest.mark.parametrize("residual", [0, 32])
def test_a_call_without_tokens_changes_nothing(residual):
    cache = feed(KIVICache(spec(residual_length=residual)), *tokens(residual + 31))
    before = copy.deepcopy(cache.state)
    for _ in range(2):
        feed(cache, *tokens(0))
        assert cache.frontier == 0
    assert_same_state(cache, KIVICache.from_state(before))
    feed(cache, *tokens(1, seed=1))
    assert cache.frontier == 32


def test_trimmed_infinities_are_not_attended_to():
    """What lies beyond the count is multiplied by a weight of 0: NaN and infinity would stay NaN."""
    keys, values = tokens(100)
    spoilt, fresh = (feed(KIVICache(spec()), keys, values) for _ in range(2))
    for bad in (float("nan"), float("inf")):
        feed(spoilt, *mx.full((2, 1, 2, 5, 32), bad))
        assert spoilt.trim(5) == 5
    spoilt.check_finite(0)
    query, token = mx.random.normal((1, 2, 1, 32)), tokens(1, seed=1)
    outs = [feed(cache, *token).attend(query, scale=0.2) for cache in (spoilt, fresh)]
    assert mx.allclose(*outs, atol=1e-6).item()


def test_keys_and_values_of_different_dtypes_are_billed_each_by_its_own():
    """As in a 16-bit model, qwen3 say, whose norms are kept in float32."""
    keys, values = tokens(200, value_dim=48)
    for cache in (KIVICache(spec(sink_length=32)), RoundTripKIVICache(spec(kind="kivi-roundtrip"))):
        feed(cache, keys, values.astype(mx.float16))
        weight = cache.bytes()
        assert weight.is_honest
        assert weight.full_precision == 2 * 200 * (32 * 4 + 48 * 2)
        packed = weight if isinstance(cache, KIVICache) else cache.packed_bytes()
        assert packed.residual == 2 * (200 - cache.frontier + cache.spec.sink_length) * (32 * 4 + 48 * 2)
    batch = KIVICache.merge([feed(KIVICache(spec()), keys, values.astype(mx.float16))])
    assert batch.bytes().is_honest and batch.bytes().full_precision == weight.full_precision
