"""BatchKIVICache against the caches of its rows alone: codes bit for bit, attention within float32 noise."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, KVCache, load_prompt_cache, save_prompt_cache

from kivi.cache.batch import BatchKIVICache
from kivi.cache.single import KIVICache
from kivi.measure.memory import settled_memory
from kivi.spec import CacheSpec, LayerSpec, SpecError

KV_HEADS, QUERY_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 64, 48
SPEC = CacheSpec(key_bits=2, value_bits=4, group_size=32, residual_length=40, backend="mlx")
SINKS = CacheSpec(
    key_bits=4, value_bits=3, rotate="both", residual_length=5, sink_length=64, param_dtype="float32", backend="mlx"
)
NO_WINDOW = CacheSpec(key_bits=3, rotate="values", residual_length=0, backend="mlx")
SPECS = {"window": SPEC, "sinks": SINKS, "no window": NO_WINDOW}
BOUND = 2e-5  # float32, outputs of order 1


def draw(*shape):
    return mx.random.normal(shape)


class Side:
    """A batch beside the single caches of its rows, and beside mlx-lm's own batch for the masks."""

    def __init__(self, spec, rows, history=()):
        self.spec = spec
        self.singles = [KIVICache(spec) for _ in range(rows)]
        full = [KVCache() for _ in range(rows)]
        for single, kv_cache, length in zip(self.singles, full, history, strict=False):
            if length:
                keys, values = draw(1, KV_HEADS, length, KEY_DIM), draw(1, KV_HEADS, length, VALUE_DIM)
                single.update_and_fetch(keys, values)
                kv_cache.update_and_fetch(keys, values)
        self.batch = KIVICache.merge(copy.deepcopy(self.singles))
        self.mlx_lm = BatchKVCache.merge(full)

    def call(self, lengths, columns, *, padded):
        """Feed ``columns`` columns, of which ``lengths[row]`` are tokens and the rest is padding on the right."""
        rows = len(self.singles)
        keys, values = draw(rows, KV_HEADS, columns, KEY_DIM), draw(rows, KV_HEADS, columns, VALUE_DIM)
        queries = draw(rows, QUERY_HEADS, columns, KEY_DIM)
        mask = self.batch.make_mask(columns)
        assert mx.array_equal(mask, self.mlx_lm.make_mask(columns))
        fetched = self.batch.update_and_fetch(keys, values)
        self.mlx_lm.update_and_fetch(keys, values)
        assert fetched == (keys, values)
        out = self.batch.attend(queries, scale=KEY_DIM**-0.5, mask=mask, sinks=None)
        if not padded:
            assert mx.array_equal(self.batch.offset, self.mlx_lm.offset)
        for row, (single, length) in enumerate(zip(self.singles, lengths, strict=True)):
            if length:
                own_mask = single.make_mask(length, return_array=False, window_size=None)
                single.update_and_fetch(keys[row : row + 1, :, :length], values[row : row + 1, :, :length])
                own = single.attend(queries[row : row + 1, :, :length], scale=KEY_DIM**-0.5, mask=own_mask, sinks=None)
                assert mx.max(mx.abs(out[row, :, :length] - own[0])).item() < BOUND
        assert mx.all(mx.isfinite(out)).item()

    def prompt(self, lengths, chunk):
        """Process a prompt as mlx-lm's PromptProcessingBatch does."""
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        if any(padding):
            self.batch.prepare(lengths=lengths, right_padding=padding)
            self.mlx_lm.prepare(lengths=lengths, right_padding=padding)
        for start in range(0, longest, chunk):
            columns = min(chunk, longest - start)
            taken = [max(0, min(columns, length - start)) for length in lengths]
            self.call(taken, columns, padded=any(padding))
            mx.eval(self.batch.state)
        if any(padding):
            self.batch.finalize()
            self.mlx_lm.finalize()
        self.check()

    def decode(self, steps):
        for _ in range(steps):
            self.call([1] * len(self.singles), 1, padded=False)

    def trim(self, n):
        assert self.batch.trim(n) == self.mlx_lm.trim(n) == n
        for single in self.singles:
            single.trim(n)
        # mlx-lm takes the next tokens of a row that lost all of its own for padding; here an empty row is meant
        self.mlx_lm.left_padding = mx.minimum(self.mlx_lm.left_padding, self.mlx_lm.size())
        self.mlx_lm.offset = mx.maximum(self.mlx_lm.offset, 0)
        assert mx.array_equal(self.batch.offset, self.mlx_lm.offset)

    def filter(self, rows):
        self.singles = [self.singles[row] for row in rows]
        self.batch.filter(rows)
        self.mlx_lm.filter(rows)
        self.check()

    def extend(self, other):
        self.singles += other.singles
        self.batch.extend(other.batch)
        self.mlx_lm.extend(other.mlx_lm)
        self.check()

    def check(self):
        assert mx.array_equal(self.batch.offset, self.mlx_lm.offset)
        assert self.batch.size() == self.mlx_lm.size()
        for row, single in enumerate(self.singles):
            assert_same_state(self.batch.extract(row), single)
        if not self.batch.empty():
            assert self.batch.bytes().is_honest
            assert self.batch.nbytes == self.batch.bytes().resident


def assert_same_state(one, other):
    assert one.offset == other.offset
    left, right = one.state, other.state
    assert left.keys() == right.keys()
    for name, expected in right.items():
        arrays = [part for part in (left[name], expected) if isinstance(part, mx.array)]
        if any(part.size for part in arrays):
            assert len(arrays) == 2, name
            assert left[name].dtype == expected.dtype, name
            assert mx.array_equal(left[name], expected), name
        elif arrays:  # nothing is held, as None or as arrays of no tokens
            assert left[name] is None or isinstance(left[name], mx.array), name
        else:
            assert left[name] == expected, name


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_unequal_prompts_then_decoding_equal_each_row_alone(spec):
    mx.random.seed(0)
    side = Side(spec, 4)
    side.prompt([150, 33, 1, 96], chunk=64)
    side.decode(70)
    side.check()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_longest_row_leaves_and_another_joins(spec):
    mx.random.seed(1)
    side = Side(spec, 3)
    side.prompt([40, 300, 77], chunk=128)
    side.decode(3)
    side.filter([0, 2])
    newcomer = Side(spec, 1)
    newcomer.prompt([130], chunk=128)
    side.extend(newcomer)
    side.decode(40)
    side.filter([2])
    side.decode(35)
    side.check()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_rows_with_history_merge_and_go_on(spec):
    mx.random.seed(2)
    side = Side(spec, 4, history=[0, 200, 33, 64])
    side.check()
    side.prompt([9, 70, 1, 40], chunk=1000)
    side.decode(5)
    side.check()


@settings(max_examples=15)
@given(data=st.data())
def test_whatever_happens_rows_equal_their_sequences_alone(data):
    spec = data.draw(st.sampled_from(list(SPECS.values())), label="spec")
    mx.random.seed(data.draw(st.integers(0, 99), label="seed"))
    length = st.integers(0, 140)

    def newcomers():
        side = Side(spec, 0 + len(history := data.draw(st.lists(length, min_size=1, max_size=3), label="history")), history)
        prompt = [max(1, data.draw(length, label="prompt")) for _ in history]
        side.prompt(prompt, chunk=data.draw(st.sampled_from([1000, 50, 7]), label="chunk"))
        return side

    side = newcomers()
    for action in data.draw(
        st.lists(st.sampled_from(["decode", "filter", "extend", "copy", "trim", "prompt"]), max_size=6), label="actions"
    ):
        if action == "decode":
            side.decode(data.draw(st.integers(1, 40), label="steps"))
        elif action == "filter":
            rows = list(range(len(side.singles)))
            side.filter(sorted(data.draw(st.sets(st.sampled_from(rows), min_size=1), label="kept")))
        elif action == "extend":
            side.extend(newcomers())
        elif action == "trim":
            side.trim(data.draw(st.integers(0, side.batch.size()), label="trimmed"))
        elif action == "prompt":
            side.prompt([max(1, data.draw(length, label="prompt")) for _ in side.singles], chunk=50)
        else:
            side.batch = copy.deepcopy(side.batch)
    side.check()


def test_trimming_a_batch_trims_every_row_as_it_would_be_alone():
    mx.random.seed(3)
    side = Side(SINKS, 3)
    side.prompt([200, 90, 3], chunk=1000)
    for n in (2, 40):
        side.trim(n)
        for row in (0, 1):
            assert_same_state(side.batch.extract(row), side.singles[row])
    assert side.batch.extract(2).empty()
    side.filter([0, 1])
    side.decode(50)
    side.check()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("prompt", [[20, 70, 3], [9, 9, 9]], ids=["padded on the right", "of equal lengths"])
def test_a_row_that_trimming_emptied_takes_the_next_prompt_from_its_first_token(spec, prompt):
    mx.random.seed(4)
    side = Side(spec, 3, history=[0, 33, 1])
    side.check()
    side.trim(5)
    side.prompt(prompt, chunk=16)
    side.decode(40)
    side.check()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_batch_that_trimming_emptied_begins_anew(spec):
    mx.random.seed(5)
    side = Side(spec, 2, history=[84, 20])
    side.check()
    side.trim(84)
    side.check()
    side.prompt([40, 70], chunk=32)
    side.check()


@pytest.mark.parametrize("residual", [0, 2, 32])
def test_a_rejected_draft_of_a_batch_quantises_nothing(residual):
    """A draft crosses a flush and is rejected: each row is what its sequence alone is, exact where that is exact."""
    spec = CacheSpec.parse(f"kivi:bits=2,residual={residual},backend=mlx")
    lengths = (30 + residual, 62 + residual)
    singles = [KIVICache(spec) for _ in lengths]
    for single, length in zip(singles, lengths, strict=True):
        single.update_and_fetch(draw(1, KV_HEADS, length, KEY_DIM), draw(1, KV_HEADS, length, VALUE_DIM))
    batch = BatchKIVICache.merge(singles)
    keys, values = draw(2, KV_HEADS, 4, KEY_DIM), draw(2, KV_HEADS, 4, VALUE_DIM)
    batch.update_and_fetch(keys, values)
    batch.trim(4)
    for row, single in enumerate(singles):
        single.update_and_fetch(keys[row : row + 1], values[row : row + 1])
        single.trim(4)
        assert_same_state(batch.extract(row), single)


def test_left_padding_that_is_still_to_come_outlives_trimming():
    batch = BatchKIVICache(SPEC, [0, 40])
    batch.update_and_fetch(draw(2, KV_HEADS, 10, KEY_DIM), draw(2, KV_HEADS, 10, VALUE_DIM))
    batch.trim(2)
    assert batch.offset.tolist() == [8, -32]


def test_a_step_builds_its_graph_and_computes_nothing():
    mx.random.seed(4)
    side = Side(NO_WINDOW, 2)
    side.prompt([100, 31], chunk=1000)
    mx.eval(side.batch.state)
    running, grown = [], []
    for _ in range(40):  # flushes of both rows included
        before = mx.get_active_memory()
        keys = draw(2, KV_HEADS, 1, KEY_DIM)
        mask = side.batch.make_mask(1)
        side.batch.update_and_fetch(keys, keys[..., :VALUE_DIM])
        running.append(side.batch.attend(draw(2, QUERY_HEADS, 1, KEY_DIM), scale=1.0, mask=mask))
        grown.append(mx.get_active_memory() - before)
        mx.eval(running[:-1])  # as mlx-lm does: the step before has run once this one is built
    # Only the lengths, which come from the host, and random keys are there.
    assert max(grown) < 1000, grown


def test_what_a_batch_weighs_is_what_mlx_holds_also_when_its_longest_row_has_left():
    before = settled_memory()
    batch = BatchKIVICache(NO_WINDOW, [0, 0])
    batch.prepare(lengths=[6000, 100], right_padding=[0, 5900])
    batch.update_and_fetch(draw(2, KV_HEADS, 6000, KEY_DIM), draw(2, KV_HEADS, 6000, KEY_DIM))
    batch.finalize()
    for _ in range(2):
        size = batch.nbytes
        assert size <= settled_memory() - before < 1.1 * size + 50_000
        batch.filter([len(batch.frontiers) - 1])
    assert batch.nbytes < 200_000


def test_masks_that_are_additive_or_missing_hide_the_same():
    mx.random.seed(5)
    side = Side(SINKS, 3)
    side.prompt([200, 90, 3], chunk=1000)
    for columns in (1, 4, 12):
        batch = copy.deepcopy(side.batch)
        seen = batch.make_mask(columns)
        keys, values = draw(3, KV_HEADS, columns, KEY_DIM), draw(3, KV_HEADS, columns, VALUE_DIM)
        queries = draw(3, QUERY_HEADS, columns, KEY_DIM)
        batch.update_and_fetch(keys, values)
        expected = batch.attend(queries, scale=0.1, mask=seen)
        additive = mx.where(seen, 0.0, -mx.inf)
        per_head = mx.broadcast_to(additive, (3, QUERY_HEADS, columns, seen.shape[-1]))
        for mask in (additive, per_head, "causal", None if columns == 1 else seen):
            assert mx.allclose(batch.attend(queries, scale=0.1, mask=mask), expected, atol=1e-5)


def test_a_sliding_mask_is_followed_in_the_history():
    mx.random.seed(6)
    side = Side(SPEC, 2)
    side.prompt([200, 110], chunk=1000)
    mask = side.batch.make_mask(1, window_size=100)
    keys, values, queries = draw(2, KV_HEADS, 1, KEY_DIM), draw(2, KV_HEADS, 1, VALUE_DIM), draw(2, QUERY_HEADS, 1, KEY_DIM)
    side.batch.update_and_fetch(keys, values)
    got = side.batch.attend(queries, scale=0.1, mask=mask)
    all_keys, all_values = side.batch.keys_and_values()
    expected = mx.fast.scaled_dot_product_attention(queries, all_keys[..., -100:, :], all_values[..., -100:, :], scale=0.1)
    assert mx.allclose(got, expected, atol=1e-5)


def test_only_packed_caches_of_one_spec_share_a_batch():
    with pytest.raises(SpecError, match="KVCache: a batch of packed caches takes KIVICache rows only"):
        KIVICache.merge([KIVICache(SPEC), KVCache()])
    with pytest.raises(SpecError, match="kivi-k3v2-g32-r0-hv-mlx: cannot join a batch of kivi-k2v4-g32-r40-mlx"):
        KIVICache.merge([KIVICache(SPEC), KIVICache(NO_WINDOW)])
    with pytest.raises(SpecError, match="cannot join a batch of"):
        BatchKIVICache(SPEC, [0]).extend(BatchKIVICache(NO_WINDOW, [0]))


def test_rows_of_another_model_are_refused():
    def of(heads=2, dim=64, dtype=mx.float32):
        cache = KIVICache(SPEC)
        cache.update_and_fetch(mx.ones((1, heads, 80, dim), dtype), mx.ones((1, heads, 80, dim), dtype))
        return cache

    for other in (of(heads=4), of(dim=32), of(dtype=mx.float16)):
        batch = BatchKIVICache.merge([of(), KIVICache(SPEC)])
        with pytest.raises(ValueError, match="cannot join a batch of 2 heads of 64 numbers in float32: they are of another"):
            batch.extend(BatchKIVICache.merge([other]))
        assert batch.size() == 80
        batch.update_and_fetch(*mx.ones((2, 2, 2, 1, 64)))
    with pytest.raises(ValueError, match=r"keys \(3, 2, 1, 64\): this batch has 2 rows"):
        BatchKIVICache(SPEC, [0, 0]).update_and_fetch(*mx.ones((2, 3, 2, 1, 64)))


@pytest.mark.parametrize("prompt", [[70, 9, 1], [200, 130, 64]])
def test_a_batch_that_is_filtered_in_the_middle_of_a_padded_prompt_keeps_its_rows(prompt):
    mx.random.seed(7)
    keys, values = draw(3, KV_HEADS, max(prompt), KEY_DIM), draw(3, KV_HEADS, max(prompt), VALUE_DIM)
    batch = BatchKIVICache(SPEC, [0, 0, 0])
    batch.prepare(lengths=prompt, right_padding=[max(prompt) - length for length in prompt])
    batch.update_and_fetch(keys[..., :50, :], values[..., :50, :])
    batch.filter([2, 0])
    kept = mx.array([2, 0])
    batch.update_and_fetch(keys[kept, :, 50:], values[kept, :, 50:])
    batch.finalize()
    for row, index in enumerate([2, 0]):
        alone = KIVICache(SPEC)
        alone.update_and_fetch(keys[index : index + 1, :, : prompt[index]], values[index : index + 1, :, : prompt[index]])
        assert_same_state(batch.extract(row), alone)


@pytest.mark.parametrize("prompt", [[], [3, 1], [200, 33, 64]])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_batch_is_saved_and_loaded_and_goes_on(spec, prompt, tmp_path):
    mx.random.seed(8)
    side = Side(spec, len(prompt) or 2)
    if prompt:
        side.prompt(prompt, chunk=1000)
    save_prompt_cache(str(tmp_path / "batch.safetensors"), [side.batch])
    (loaded,) = load_prompt_cache(str(tmp_path / "batch.safetensors"))
    before = [copy.deepcopy(side.batch.extract(row).state) for row in range(len(prompt))]
    for batch in (loaded, BatchKIVICache.from_state(side.batch.state)):
        assert type(batch) is BatchKIVICache and batch.bytes() == side.batch.bytes()
        other = copy.deepcopy(side)
        other.batch = batch
        other.decode(40)
        other.check()
    for row, state in enumerate(before):
        assert_same_state(side.batch.extract(row), KIVICache.from_state(state))
    if prompt:
        with pytest.raises(ValueError, match=r"rows hold .* tokens, so it is damaged"):
            BatchKIVICache.from_state({**loaded.state, "offsets": [length + 1 for length in prompt]})


def test_a_state_that_was_kept_goes_back_to_where_it_was():
    mx.random.seed(9)
    side = Side(SPEC, 2)
    side.prompt([130, 60], chunk=1000)
    before = copy.deepcopy(side)
    kept = side.batch.state
    side.decode(70)
    side.batch.state = kept
    side.singles, side.mlx_lm = before.singles, before.mlx_lm
    side.check()
    side.decode(5)
    side.check()


def test_wrong_uses_are_refused_in_a_sentence():
    batch = BatchKIVICache(SPEC, [0, 0])
    for lengths in (
        {"left_padding": [1]},
        {"lengths": [1], "right_padding": [0, 1]},
        {"lengths": [1, 2], "right_padding": [1]},
    ):
        with pytest.raises(ValueError, match="has 1 numbers: this batch has 2 rows"):
            batch.prepare(**lengths)
    with pytest.raises(ValueError, match="no row to keep"):
        batch.filter([])
    with pytest.raises(ValueError, match="no cache to merge"):
        KIVICache.merge([])
    with pytest.raises(SpecError, match="KVCache: a batch of packed caches is extended by a BatchKIVICache only"):
        batch.extend(KVCache())
    with pytest.raises(SpecError, match="settings by layer"):
        BatchKIVICache(SPEC.model_copy(update={"layers": {0: LayerSpec(key_bits=8)}}), [0])
    batch.prepare(lengths=[3, 10], right_padding=[7, 0])
    batch.update_and_fetch(*mx.ones((2, 2, 2, 5, 64)))
    with pytest.raises(ValueError, match="in the middle of a padded prompt cannot be trimmed"):
        batch.trim(2)


def test_rows_are_counted_from_the_end_too():
    mx.random.seed(10)
    side = Side(SPEC, 3)
    side.prompt([100, 33, 64], chunk=1000)
    assert_same_state(side.batch.extract(-1), side.singles[2])
    with pytest.raises(IndexError):
        side.batch.extract(3)


def test_rows_may_be_kept_while_all_are_still_padding():
    """mlx-lm's own batch keeps as little padding, but goes below nothing."""
    batch = BatchKIVICache(SPEC, [40, 20])
    keys, values = draw(2, KV_HEADS, 60, KEY_DIM), draw(2, KV_HEADS, 60, VALUE_DIM)
    batch.update_and_fetch(keys[..., :6, :], values[..., :6, :])
    batch.filter([0])
    assert batch.size() == 0 and batch.offset.item() == -34
    batch.update_and_fetch(keys[:1, :, 6:], values[:1, :, 6:])
    alone = KIVICache(SPEC)
    alone.update_and_fetch(keys[:1, :, 40:], values[:1, :, 40:])
    assert_same_state(batch.extract(0), alone)


def test_padding_is_refused_where_it_would_be_taken_for_tokens():
    batch = BatchKIVICache(SPEC, [0, 0])
    with pytest.raises(ValueError, match="right_padding without lengths"):
        batch.prepare(right_padding=[0, 3])
    batch.prepare(lengths=[5, 2], right_padding=[0, 3])
    with pytest.raises(ValueError, match="finalize"):
        batch.extend(BatchKIVICache(SPEC, [0]))
    batch.update_and_fetch(draw(2, KV_HEADS, 5, KEY_DIM), draw(2, KV_HEADS, 5, VALUE_DIM))
    batch.finalize()
    with pytest.raises(ValueError, match="left padding can only be added to an empty"):
        batch.prepare(left_padding=[1, 0])
