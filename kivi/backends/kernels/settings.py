"""What kernels are told of codecs: the macros that a codec becomes, in one place."""

from __future__ import annotations

import mlx.core as mx

from kivi.backends.kernels.program import Configuration, Setting
from kivi.codec import Codec, Codecs
from kivi.quantize import WORD_BITS


def element_settings(codec: Codec, x: mx.array) -> Configuration:
    """Return the settings of kernels that quantise ``x``, ``[B, H, S, D]``."""
    settings: dict[str, Setting] = {
        "ELEMENT": x.dtype,
        "PARAM": codec.param_dtype,
        "BITS": codec.bits,
        "LEVELS": codec.levels,
        "GROUP": codec.group_size,
        "SMALLEST_SCALE": codec.smallest_scale,
    }
    if codec.axis == -1:
        settings |= {"CHANNELS": x.shape[-1], "PADDED": codec.padded(x.shape[-1])}
    return tuple(settings.items())


def run_codes(codec: Codec) -> int:
    """Return how many codes a thread takes at a time: those of a word, or 16 of 3 bits, a word and a half (headers/codes.h)."""
    return 16 if codec.bits == 3 else WORD_BITS // codec.bits


def history_settings(codecs: Codecs, key_channels: int, value_channels: int) -> dict[str, Setting]:
    """Return the settings of kernels that read packed keys and values."""
    return {
        "KEY_BITS": codecs.keys.bits,
        "VALUE_BITS": codecs.values.bits,
        "GROUP": codecs.group_size,
        "KEY_CHANNELS": key_channels,
        "VALUE_CHANNELS": value_channels,
        "VALUE_PADDED": codecs.values.padded(value_channels),
        "KEY_CODES": run_codes(codecs.keys),
        "VALUE_CODES": run_codes(codecs.values),
    }
