from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kivi.measure.schedule import cut_calls, first_visible, prefill_call, reference_blocks, scoring_blocks
from kivi.spec import CacheSpec


@st.composite
def specs(draw: st.DrawFn) -> CacheSpec:
    group = draw(st.sampled_from([32, 64]))
    return CacheSpec(
        kind=draw(st.sampled_from(["kivi", "kivi-roundtrip"])),
        group_size=group,
        residual_length=draw(st.integers(0, 150)),
        sink_length=group * draw(st.integers(0, 2)),
    )


def frontier(spec: CacheSpec, tokens: int) -> int:
    aged = max(0, tokens - spec.sink_length - spec.residual_length)
    return spec.sink_length + aged // spec.group_size * spec.group_size


layers = st.lists(specs(), max_size=2)
lengths = st.integers(1, 500)


@given(layers, lengths)
def test_calls_cover_every_position_once_and_in_order(layers: list[CacheSpec], length: int) -> None:
    calls = [call for start, stop in scoring_blocks(layers, length) for call in cut_calls(layers, start, stop)]
    assert [position for start, stop in calls for position in range(start, stop)] == list(range(length))


@given(layers, lengths)
def test_every_query_of_a_call_sees_what_it_would_see_one_token_at_a_time(layers: list[CacheSpec], length: int) -> None:
    for spec in layers:
        for start, stop in cut_calls(layers, 0, length):
            assert {frontier(spec, position + 1) for position in range(start, stop)} == {frontier(spec, start + 1)}


@given(layers, lengths)
def test_no_query_sees_a_group_that_holds_its_future_even_if_flushed_first(layers: list[CacheSpec], length: int) -> None:
    for spec in layers:
        for start, stop in cut_calls(layers, 0, length):
            if frontier(spec, stop) > spec.sink_length:
                assert frontier(spec, stop) <= start + 1


@given(layers, lengths)
def test_calls_of_the_round_trip_cache_are_no_longer_than_its_window_and_one(layers: list[CacheSpec], length: int) -> None:
    for spec in layers:
        if spec.kind == "kivi-roundtrip":
            assert all(stop - start <= spec.residual_length + 1 for start, stop in cut_calls(layers, 0, length))
            assert prefill_call(layers) <= spec.residual_length + 1


@given(st.lists(specs(), min_size=1, max_size=2))
def test_the_first_visible_position_is_where_a_frontier_first_moves(layers: list[CacheSpec]) -> None:
    first = first_visible(layers)
    sees = [any(frontier(spec, position + 1) > spec.sink_length for spec in layers) for position in range(first + 1)]
    assert sees == [False] * first + [True]


def test_a_full_cache_is_cut_otherwise_than_the_reference() -> None:
    assert scoring_blocks([], 512) != reference_blocks(512)
    assert first_visible([]) == 0


def test_mlx_lms_quantised_cache_is_seen_at_once() -> None:
    assert first_visible([CacheSpec(kind="mlx-quantized")]) == 0
