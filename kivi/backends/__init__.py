"""Who runs KIVI's kernels: one interface, three backends.

``mlx`` is plain MLX operations and runs everywhere; ``metal`` and ``cuda`` run the project's own kernels. A backend never
falls back to another: what it cannot do raises :class:`BackendError`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import mlx.core as mx

from kivi.codec import Codec, Codecs, Packed
from kivi.spec import BackendName

Name = Literal["mlx", "metal", "cuda"]
NAMES: tuple[Name, ...] = ("metal", "cuda", "mlx")  # best first: the order in which `auto` tries


# How far attention on codes may be from exact attention on the dequantised history: the largest difference of an output over
# the largest output, by the coarsest dtype of queries, keys and values, since the history is cast to theirs and codes are not.
# In 16 bits these are a few roundings of an output. For numbers of ordinary size, as a normal distribution has them;
# docs/kernels.md has what holds for any.
ATTENTION_BOUND = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 2e-2}


class BackendError(RuntimeError):
    """A backend that is missing, or a kernel that failed to compile or to run."""


@dataclass(slots=True)  # not frozen: one is made in every layer of every step, and that takes four times as long
class History:
    """What a few queries attend to: one layer's tokens in storage order, oldest first.

    Three stretches, each an array with spare capacity at its end and a count of the tokens that are there: sinks (exact),
    codes, window (exact; it ends with the tokens of the call). Counts are ints, or int32 arrays ``[B]`` when rows of a batch
    have histories of different lengths.
    """

    codecs: Codecs
    sink_keys: mx.array | None  # [B, H, capacity, D_k]
    sink_values: mx.array | None  # [B, H, capacity, D_v]
    keys: Packed | None  # capacity C tokens; None while nothing is quantised
    values: Packed | None
    window_keys: mx.array  # [B, H, capacity, D_k]
    window_values: mx.array  # [B, H, capacity, D_v]
    sink_count: int | mx.array
    code_count: int | mx.array
    window_count: int | mx.array


class Backend(Protocol):
    """The operations that a cache needs. All equal :mod:`kivi.quantize` bit for bit, attention within ATTENTION_BOUND."""

    name: Name

    def group_roundtrip(self, x: mx.array, codec: Codec) -> mx.array:
        """Return what :meth:`kivi.codec.Codec.roundtrip` returns."""
        ...

    def quantize(self, x: mx.array, codec: Codec) -> Packed:
        """Quantise and pack keys or values ``[B, H, S, D]``; for keys ``S`` is a whole number of groups."""
        ...

    def decode_attention(
        self,
        queries: mx.array,
        history: History,
        *,
        scale: float,
        causal: bool,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend with a few queries on codes.

        Args:
            queries: ``[B, H_q, L, D_k]``; ``H_q`` a multiple of the KV heads. Not modified.
            history: The tokens; the last ``L`` of the window are those of the queries.
            scale: Factor of the scores, usually ``D_k ** -0.5``.
            causal: Query ``i`` does not see the window's last ``L - 1 - i`` tokens.
            mask: Boolean (True: seen) or additive, broadcastable to ``[B, H_q, L, N]``, in storage order: ``N`` columns are
                the capacities of sinks, codes and window. What lies beyond a count is never seen, whatever the mask says.
            sinks: Attention sinks, one logit a query head ``[H_q]``, in the softmax's denominator only.

        Returns:
            ``[B, H_q, L, D_v]`` in the dtype of the queries.
        """
        ...

    def restore(self, history: History, *, columns: int, window_start: int | mx.array = 0) -> tuple[mx.array, mx.array]:
        """Return a history as exact numbers, each row's tokens side by side: sinks, codes, window.

        Codes are dequantised as :func:`kivi.quantize.group_dequantize` does: in float32, then cast.

        Args:
            history: The tokens; nothing beyond the counts is read.
            columns: Tokens of the longest row or more. Rows end in the last column and have zeros before their first token.
                Where all counts are ints it is their sum.
            window_start: First token of the window that counts, an int or int32 ``[B]``.

        Returns:
            Keys ``[B, H, columns, D_k]`` and values ``[B, H, columns, D_v]`` in the dtypes of the window.
        """
        ...


class Availability(NamedTuple):
    """Whether a backend runs here, and why not (or on what)."""

    ok: bool
    reason: str


def available(name: Name) -> Availability:
    """Return whether backend ``name`` runs on this machine, with the reason."""
    availability: Availability = importlib.import_module(f"kivi.backends.{name}").available()
    return availability


def resolve(name: BackendName) -> Backend:
    """Return the backend called ``name``; ``auto`` is the best that is available.

    Raises:
        BackendError: a backend was required and is not available; the message says why and what to do.
    """
    chosen = next(other for other in NAMES if available(other).ok) if name == "auto" else name
    availability = available(chosen)
    if not availability.ok:
        raise BackendError(f"backend={chosen}: {availability.reason}; use backend=auto or backend=mlx")
    backend: Backend = importlib.import_module(f"kivi.backends.{chosen}").BACKEND
    return backend
