"""Masks: what callers may ask with; and from mlx-lm's left-padded coordinates of a batch to a backend's storage order."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kivi.cache.padding import Padding
from kivi.cache.rows import RowWindow


def require_question(queries: mx.array, mask: mx.array | str | None, keys: mx.array, columns: int) -> None:
    """Refuse queries and masks that do not go with what a cache holds, before some product does, in words about neither.

    Args:
        queries: Expected ``[B, H_q, L, D_k]``.
        mask: Expected None, ``"causal"`` or an array that broadcasts to ``[B, H_q, L, columns]``.
        keys: ``[B, H, capacity, D_k]`` that the cache holds.
        columns: Tokens, or columns of the padded coordinates.

    Raises:
        ValueError: they are something else.
    """
    batch, heads, _, channels = keys.shape
    fits = queries.ndim == 4 and queries.shape[0] == batch and queries.shape[1] % heads == 0 and queries.shape[3] == channels
    if not fits:
        raise ValueError(
            f"queries {queries.shape}: the cache holds {batch} rows and {heads} heads of {channels} numbers, so [{batch}, a "
            f"multiple of {heads}, queries, {channels}] is expected"
        )
    if mask is None or (isinstance(mask, str) and mask == "causal"):
        return
    wanted = (*queries.shape[:3], columns)
    if isinstance(mask, str) or mask.ndim > 4 or not mask.ndim:
        raise ValueError(f"mask {mask if isinstance(mask, str) else mask.shape!r}: expected 'causal' or an array for {wanted}")
    if any(size not in (1, full) for size, full in zip(reversed(mask.shape), reversed(wanted), strict=False)):
        raise ValueError(f"mask of shape {mask.shape}: it does not broadcast to {wanted}, queries by tokens of the cache")


def default_mask(length: int, padding: Padding, *, causal: bool) -> mx.array:
    """Return the boolean mask of a call whose model made none: padding is hidden, and what comes later if ``causal``.

    Args:
        length: Queries of the call, the last columns.
        padding: Which columns are tokens.
        causal: Whether a query sees no later token.

    Returns:
        Broadcastable to ``[B, 1, length, width]``.
    """
    left = mx.array(padding.left)
    if not causal:
        return mx.arange(padding.width) >= left[:, None, None, None]
    mask: mx.array = create_causal_mask(length, offset=padding.width - length, left_padding=left)
    return mask


def in_storage_order(mask: mx.array, padding: Padding, *, stored: int, window: RowWindow) -> mx.array:
    """Return ``mask`` for the columns of sinks, codes and window.

    Args:
        mask: Boolean or additive, broadcastable to ``[B, H_q, L, width]``, in left-padded coordinates.
        padding: Which columns are tokens.
        stored: Capacity of sinks and codes together: columns from each row's position 0 on.
        window: The newest tokens; what lies before a row's first one is hidden.

    Returns:
        ``[B, H_q or 1, L or 1, stored + window.capacity]``.
    """
    width, shape = padding.width, (1,) * (4 - mask.ndim) + mask.shape
    mask = mx.broadcast_to(mask.reshape(shape), (len(padding.left), *shape[1:3], width))
    positions = mx.array(padding.left)[:, None, None, None] + mx.arange(stored)
    positions = mx.broadcast_to(mx.minimum(positions, width - 1), (*mask.shape[:-1], stored))
    unused = max(0, window.stop - width)  # columns that are older than the padded coordinates
    newest = mask[..., max(0, width - window.stop) :]
    newest = mx.pad(newest, [(0, 0)] * 3 + [(unused, window.capacity - window.stop)])
    seen = mx.arange(window.capacity) >= mx.array(window.starts)[:, None, None, None]
    newest = newest & seen if mask.dtype == mx.bool_ else mx.where(seen, newest, -mx.inf)
    return mx.concatenate([mx.take_along_axis(mask, positions, axis=-1), newest], axis=-1)
