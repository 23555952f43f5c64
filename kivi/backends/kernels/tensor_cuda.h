// What attention_tensor uses beyond the dialect, for CUDA from sm_80 on.

#define ROLLED _Pragma("unroll 1")

// c += a b for a 16 x 16 (rows), b 16 x 8 (columns), float16 in, float32 out. Subnormal inputs are kept.
FN void mma_f16(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

FN uint low_halves(uint x, uint y) { return __byte_perm(x, y, 0x5410); }
FN uint high_halves(uint x, uint y) { return __byte_perm(x, y, 0x7632); }
FN uint half2_of(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint*>(&both);
}
FN uint half2_multiply(uint x, uint y) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
  return *reinterpret_cast<const uint*>(&product);
}
FN uint half_bits(__half x) { return __half_as_ushort(x); }

template <int N>
FN void load_words(const uint* from, uint* to) {
  if constexpr (N == 1) {
    to[0] = from[0];
  } else if constexpr (N == 2) {
    const uint2 pair = *reinterpret_cast<const uint2*>(from);
    to[0] = pair.x;
    to[1] = pair.y;
  } else {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  }
}

// Asks for the line of memory at `address` to be brought to the L2 cache.
template <typename E>
FN void prefetch(const E* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
