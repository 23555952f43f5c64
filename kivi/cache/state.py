"""States: what mlx-lm's ``save_prompt_cache`` writes of a cache, and what ``load_prompt_cache`` makes one of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache

STATE_ARRAYS = (
    *("sink_keys", "sink_values", "window_keys", "window_values"),
    *("key_words", "key_scale", "key_zero", "value_words", "value_scale", "value_zero"),
)

Cache = TypeVar("Cache", bound=type)
Value = mx.array | int | str | list[int] | None


def loadable(cache: Cache) -> Cache:
    """Make mlx-lm's ``load_prompt_cache`` know a class of caches: it looks them up by name in its own module."""
    setattr(mlx_lm_cache, cache.__name__, cache)
    return cache


def require_state(state: object, names: Iterable[str]) -> None:
    """Refuse what is not a state with ``names`` and the arrays.

    Raises:
        ValueError: it is something else, or lacks some; the message names them.
    """
    if not isinstance(state, dict):
        raise ValueError(f"a state of type {type(state).__name__}: expected that of a packed cache, a dict")
    if missing := {*names, *STATE_ARRAYS} - state.keys():
        raise ValueError(f"the state lacks {', '.join(sorted(missing))}: it is not that of a packed cache, or is damaged")
    for stretch in (STATE_ARRAYS[:2], STATE_ARRAYS[2:4], STATE_ARRAYS[4:]):
        absent = [name for name in stretch if state[name] is None]
        if absent and len(absent) < len(stretch):
            raise ValueError(f"the state has no {', '.join(absent)}, but the arrays that go with it, so it is damaged")
