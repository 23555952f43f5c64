"""Memory: what caches report, and two probes that do not ask them.

- *resident*: bytes of the live arrays, as the cache's ``bytes()`` measures them; for mlx-lm's caches, which report
  nothing, the arrays that they hold;
- *accounted*: what the tokens need by count, the rest being spare capacity;
- *held*: bytes of every array that can be reached from the cache, buffers counted once, whatever the cache says;
- *growth*: of MLX's active memory since before the caches were made;
- *counted*: what the same caches will hold after longer prompts, from counts and shapes, so that it takes no time.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from kivi.accounting import CacheBytes, sum_bytes
from kivi.footprint import FootprintError, KeyValues, layer_bytes, prefill_calls
from kivi.measure.arms import held_arrays
from kivi.measure.results import Accounting, Memory

KILOBYTE = 1024  # unit of ru_maxrss on Linux; macOS counts bytes


def cache_bytes(cache: Any) -> CacheBytes:
    """Return the bytes of one layer's cache.

    Caches with ``bytes()`` are asked. mlx-lm's have none: a ``KVCache`` is all full precision, a ``QuantizedKVCache`` codes and
    parameters, both with spare capacity beyond their offset; any other cache counts as full precision, without spare.
    """
    if hasattr(cache, "bytes"):
        reported: CacheBytes = cache.bytes()
        return reported
    resident = held_bytes(cache)
    if type(cache) is QuantizedKVCache and not cache.empty():
        return _mlx_quantized_bytes(cache, resident)
    if type(cache) is KVCache and not cache.empty():
        held = resident // cache.keys.shape[2] * cache.offset
        return CacheBytes(resident=resident, full_precision=held, residual=held, spare=resident - held)
    return CacheBytes(resident=resident, full_precision=resident, residual=resident)


def packed_cache_bytes(cache: Any) -> CacheBytes:
    """Return :func:`cache_bytes`; for ``kivi-roundtrip`` what its tokens would take if they were packed."""
    estimate: CacheBytes = cache.packed_bytes() if hasattr(cache, "packed_bytes") else cache_bytes(cache)
    return estimate


def counted_bytes_per_token(caches: Sequence[Any], tokens: int) -> float | None:
    """Return the bytes a token, all layers, after a prompt of ``tokens`` tokens; None where a layer's cache cannot tell.

    Args:
        caches: One a layer, as they are after some tokens of one or several sequences: a layer without any never gets some.
        tokens: Tokens of the one sequence that is counted.
    """
    calls = prefill_calls(tokens)
    try:
        return sum(layer_bytes(cache, KeyValues.held(cache), calls, batch=1) for cache in caches) / tokens
    except FootprintError:
        return None


def held_bytes(holder: Any) -> int:
    """Return the bytes of every array reachable from ``holder``, each once. Views count what they show, not what they pin."""
    arrays = list(held_arrays(holder))
    mx.eval(arrays)
    return sum(array.nbytes for array in arrays)


def settled_memory() -> int:
    """Return MLX's active bytes once garbage is collected and its pool is empty."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return int(mx.get_active_memory())


def peak_of(work: Callable[[], Any]) -> int:
    """Run ``work`` and return MLX's peak of active bytes during it, the model's weights included."""
    settled_memory()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return int(mx.get_peak_memory())


def process_peak() -> int:
    """Return the largest resident set of this process so far, in bytes. It never falls, so it is the run's, not a cell's."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KILOBYTE


def memory(caches: Sequence[Any], *, tokens: int, peak_prefill: int, peak_decode: int, growth: int) -> Memory:
    """Return the figures of caches, one a layer, that hold ``tokens`` tokens over all rows."""
    layers = [cache_bytes(cache) for cache in caches]
    total = sum_bytes(layers)
    return Memory(
        resident_bytes=total.resident,
        accounted_bytes=total.accounted,
        full_bytes=total.full_precision,
        compression=total.full_precision / total.resident,
        bytes_per_token=total.resident / tokens,
        bytes_per_token_4096=counted_bytes_per_token(caches, 4096),
        bytes_per_token_32768=counted_bytes_per_token(caches, 32768),
        peak_prefill_bytes=peak_prefill,
        peak_decode_bytes=peak_decode,
        process_peak_bytes=process_peak(),
        tokens=tokens,
        growth_bytes=growth,
        held_bytes=held_bytes(caches),
        layer_bytes=[layer.resident for layer in layers],
    )


def accounting(caches: Sequence[Any], *, key_share: float, itemsize: float) -> Accounting:
    """Return the seven figures.

    Args:
        caches: One a layer.
        key_share: Keys' share of the bytes of a full-precision token.
        itemsize: Bytes of a full-precision number, the mean of keys and values where these differ.
    """
    total = sum_bytes(packed_cache_bytes(cache) for cache in caches)
    packed = total.accounted - total.residual
    numbers = (total.full_precision - total.residual) / itemsize
    full_keys = round(total.full_precision * key_share)
    return Accounting(
        compressed_key_bytes=total.key_codes + total.key_params,
        full_key_bytes=full_keys,
        compressed_value_bytes=total.value_codes + total.value_params,
        full_value_bytes=total.full_precision - full_keys,
        residual_bytes=total.residual,
        average_bits=8 * packed / numbers if numbers else 8 * itemsize,
        compression_ratio=total.full_precision / total.accounted,
    )


def full_token(caches: Sequence[Any]) -> tuple[float, float]:
    """Return the keys' share of the bytes of full caches, and the mean bytes of a number in them.

    Ordinary caches tell, or the others where no layer has one; a half and 4 where none has keys and values.
    """
    held = [cache for cache in caches if isinstance(getattr(cache, "keys", None), mx.array)]
    telling = [cache for cache in held if type(cache) is KVCache] or held
    if not telling:
        return 0.5, 4.0
    keys, values = ([getattr(cache, side) for cache in telling] for side in ("keys", "values"))
    size = sum(array.nbytes for array in keys + values)
    return sum(array.nbytes for array in keys) / size, size / sum(array.size for array in keys + values)


def _mlx_quantized_bytes(cache: QuantizedKVCache, resident: int) -> CacheBytes:
    capacity, offset = cache.keys[0].shape[-2], cache.offset
    (key_codes, *key_params), (value_codes, *value_params) = cache.keys, cache.values
    parts = {
        "key_codes": key_codes.nbytes,
        "key_params": sum(array.nbytes for array in key_params),
        "value_codes": value_codes.nbytes,
        "value_params": sum(array.nbytes for array in value_params),
    }
    used = {name: size // capacity * offset for name, size in parts.items()}
    full = sum(
        8 * codes.nbytes // capacity * offset // cache.bits * params[0].itemsize  # scales have the dtype of what was quantised
        for codes, params in ((key_codes, key_params), (value_codes, value_params))
    )
    return CacheBytes(resident=resident, full_precision=full, spare=resident - sum(used.values()), **used)
