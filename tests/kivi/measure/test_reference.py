from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kivi.measure.reference import ReferenceStore
from kivi.models import LoadedModel

Tiny = Callable[..., LoadedModel]
TOKENS = list(range(100))
BYTES = 100 * 256 * 4


def read(store: ReferenceStore, model: LoadedModel, tokens: list[int] = TOKENS) -> np.ndarray:
    return np.concatenate([np.array(part) for part in store.logits(model, tokens)])


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_stored_is_what_was_computed(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny()
    computed = read(ReferenceStore(tmp_path, 10**9), model)
    model.model.model.norm.weight = model.model.model.norm.weight * 2  # what is found does not come from the model
    assert np.array_equal(read(ReferenceStore(tmp_path, 10**9), model), computed)
    assert computed.shape == (100, 256)


def test_logits_are_those_of_mlx_lms_own_cache(tiny: Tiny, tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    model = tiny("qwen3")
    expected = model.model(mx.array([TOKENS]), cache=make_prompt_cache(model.model))[0]
    np.testing.assert_allclose(read(ReferenceStore(tmp_path, 0), model), np.array(expected), atol=1e-4)


def test_beyond_the_limit_nothing_is_stored_and_all_is_computed_again(tiny: Tiny, tmp_path: Path) -> None:
    store, model = ReferenceStore(tmp_path, BYTES - 1), tiny()
    first = read(store, model)
    assert entries(tmp_path) == set()
    assert np.array_equal(read(store, model), first)


def test_the_oldest_entries_of_earlier_runs_make_room_and_this_runs_stay(tiny: Tiny, tmp_path: Path) -> None:
    model, limit = tiny(), int(2.5 * BYTES)
    old, older, new, one_more = ([number, *TOKENS[1:]] for number in (1, 2, 3, 4))
    for age, tokens in ((10, old), (20, older)):
        before = entries(tmp_path)
        read(ReferenceStore(tmp_path, limit), model, tokens)
        (name,) = entries(tmp_path) - before
        os.utime(tmp_path / name, (age * -1 + 1e9, age * -1 + 1e9))
    names = entries(tmp_path)
    store = ReferenceStore(tmp_path, limit)
    read(store, model, new)
    assert len(entries(tmp_path)) == 2
    assert len(entries(tmp_path) & names) == 1
    read(store, model, one_more)
    kept = entries(tmp_path)
    assert not kept & names
    read(store, model, old)  # there is no room left that this run does not need itself
    assert entries(tmp_path) == kept


@pytest.mark.parametrize("change", [{"weights_digest": "other"}, {"dtype": "float16"}])
def test_another_models_reference_is_not_taken(change: dict[str, str], tiny: Tiny, tmp_path: Path) -> None:
    store, model = ReferenceStore(tmp_path, 10**9), tiny()
    read(store, model)
    read(store, replace(model, **change))
    assert len(entries(tmp_path)) == 2


def test_a_reader_that_stops_half_way_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    parts = ReferenceStore(tmp_path, 10**9).logits(tiny(), TOKENS)
    next(parts)
    parts.close()
    assert entries(tmp_path) == set()


def test_drafts_that_a_killed_process_left_are_removed_after_a_day(tiny: Tiny, tmp_path: Path) -> None:
    fresh, abandoned = tmp_path / "a.fresh", tmp_path / "b.abandoned"
    fresh.mkdir()
    abandoned.mkdir()
    os.utime(abandoned, (1e9, 1e9))
    read(ReferenceStore(tmp_path, 10**9), tiny())
    assert fresh.exists()
    assert not abandoned.exists()


def test_a_trajectory_is_found_again(tiny: Tiny, tmp_path: Path) -> None:
    model, steps = tiny(), []
    prompts = [TOKENS[:40], TOKENS[40:80]]
    first = ReferenceStore(tmp_path, 10**9).trajectory(model, prompts, 5, steps.append)
    assert steps == [1, 2, 3, 4]
    again = ReferenceStore(tmp_path, 10**9).trajectory(model, prompts, 5, steps.append)
    assert steps == [1, 2, 3, 4]
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.logits, again.logits)
    assert first.tokens.shape == (2, 5)
    assert np.array_equal(first.logits.argmax(-1).T, first.tokens)


def flip(content: bytes, at: int) -> bytes:
    return content[: at // 8] + bytes([content[at // 8] ^ 1 << at % 8]) + content[at // 8 + 1 :]


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_the_last_bit(file: Path) -> None:
    file.write_bytes(flip(file.read_bytes(), 8 * file.stat().st_size - 1))


@pytest.mark.parametrize("damage", [remove, truncate, flip_the_last_bit])
@pytest.mark.parametrize("which", ["000000.safetensors", "digests.json"])
def test_logits_that_were_damaged_are_computed_anew(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], which: str
) -> None:
    model = tiny()
    computed = read(ReferenceStore(tmp_path, 10**9), model)
    (entry,) = tmp_path.iterdir()
    damage(entry / which)
    assert np.array_equal(read(ReferenceStore(tmp_path, 10**9), model), computed)
    assert f"{entry} is damaged, its reference is computed anew" in caplog.text
    caplog.clear()
    assert np.array_equal(read(ReferenceStore(tmp_path, 10**9), model), computed) and not caplog.text


def test_no_bit_that_flips_in_a_trajectory_is_read(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny()
    first = ReferenceStore(tmp_path, 10**9).trajectory(model, [TOKENS[:40]], 3, lambda _: None)
    chosen = random.Random(0)  # noqa: S311  not for secrets
    for _ in range(100):
        (entry,) = tmp_path.iterdir()
        file = chosen.choice(sorted(entry.iterdir()))
        file.write_bytes(flip(file.read_bytes(), chosen.randrange(8 * file.stat().st_size)))
        again = ReferenceStore(tmp_path, 10**9).trajectory(model, [TOKENS[:40]], 3, lambda _: None)
        assert np.array_equal(again.tokens, first.tokens) and np.array_equal(again.logits, first.logits)
