// What restoring a history uses; rows have CHANNELS elements.

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
