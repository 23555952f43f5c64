// Rows of CHANNELS elements, eight at a time where they are aligned to eight.

// Stores those of eight channels, from `channel` on, that a row has.
template <int CHANNELS, typename E>
FN void store_channels(DEVICE E* row, uint channel, const THREAD float* held) {
  if (CHANNELS % 8 == 0) {
    store8(row + channel, held);
    return;
  }
  UNROLL
  for (uint i = 0; i < 8; i++) {
    if (channel + i < CHANNELS) row[channel + i] = E(held[i]);
  }
}

// Copies neighbouring rows, or fills them with zeros, with all threads of the threadgroup.
template <int CHANNELS, typename E>
FN void copy_rows(const DEVICE E* from, DEVICE E* to, bool blank, uint rows, uint thread) {
  if (blank) {
    for (uint i = thread; i < rows * CHANNELS; i += THREADS) to[i] = E(0.0f);
  } else if (CHANNELS % 8 == 0) {
    UNROLL_LOADS
    for (uint i = thread * 8; i < rows * CHANNELS; i += THREADS * 8) {
      float held[8];
      load8(from + i, held);
      store8(to + i, held);
    }
  } else {
    for (uint i = thread; i < rows * CHANNELS; i += THREADS) to[i] = from[i];
  }
}

// The code in the low bits of `word` as a float: set into the mantissa of 2^23, which it then exceeds by just itself.
template <int BITS>
FN float code_value(uint word) {
  return sub_rn(as_float((word & ((1u << BITS) - 1u)) | 0x4b000000u), 8388608.0f);
}
