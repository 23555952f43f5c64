// What attention_tensor uses beyond the dialect, for the host: matrix fragments are exchanged among the lanes.

#define ROLLED

static uint fragments[2][1024][6];

// c += a b for a 16 x 16 (rows), b 16 x 8 (columns), float16 in, float32 out; lanes hold them as PTX's mma.m16n8k16 does.
FN void mma_f16(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  const uint me = current_thread, side = turn[me]++ & 1, first = me & ~31u;
  const uint mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(fragments[side][me], mine, sizeof mine);
  wait_as(AT_SIMD);
  for (uint i = 0; i < 4; i++) {
    const uint row = me % 32 / 4 + i / 2 * 8, column = me % 4 * 2 + i % 2;
    float sum = c[i];
    for (uint k = 0; k < 16; k++) {
      const uint a = fragments[side][first + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const uint b = fragments[side][first + column * 4 + k % 8 / 2][4 + k / 8];
      sum += half_to_float(uint16_t(a >> (k % 2 * 16))) * half_to_float(uint16_t(b >> (k % 2 * 16)));
    }
    c[i] = sum;
  }
}

FN uint low_halves(uint x, uint y) { return (x & 0xffffu) | (y << 16); }
FN uint high_halves(uint x, uint y) { return (x >> 16) | (y & 0xffff0000u); }
FN uint half2_of(float low, float high) { return uint(float_to_half(low)) | (uint(float_to_half(high)) << 16); }
FN uint half2_multiply(uint x, uint y) {
  const float low = half_to_float(uint16_t(x)) * half_to_float(uint16_t(y));
  return half2_of(low, half_to_float(uint16_t(x >> 16)) * half_to_float(uint16_t(y >> 16)));
}
FN uint half_bits(float16_t_ x) { return x.bits; }

template <int N>
FN void load_words(const uint* from, uint* to) { for (int i = 0; i < N; i++) to[i] = from[i]; }

template <typename E>
FN void prefetch(const E*) {}
