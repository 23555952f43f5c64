// What attention_tensor uses beyond the dialect, for CUDA from sm_80 on.

#define ROLLED _Pragma("unroll 1")
#define UNROLL_STEPS _Pragma("unroll 4")

// c += a b for a 16 x 16 (rows), b 16 x 8 (columns), float16 in, float32 out. Subnormal inputs are kept. Volatile, lest a compiler
// move it to where some lanes need the result: all 32 must take part.
FN void mma_f16(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

FN uint pick_bytes(uint x, uint y, uint selector) { return __byte_perm(x, y, selector); }
FN uint half2_of(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint*>(&both);
}
FN uint half2_multiply(uint x, uint y) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
  return *reinterpret_cast<const uint*>(&product);
}
FN uint half_bits(__half x) { return __half_as_ushort(x); }
FN uint load_halves(const __half* from) { return *reinterpret_cast<const uint*>(from); }

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

FN void store_pair(uint* to, const uint* from) { *reinterpret_cast<uint2*>(to) = make_uint2(from[0], from[1]); }

FN float exp2_near(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Memory that every threadgroup of a launch asks for, beyond what SHARED may take.
#define SHARED_BY_LAUNCH(name, count) extern __shared__ __align__(16) uint name[]

// Asynchronous copies of BYTES (4, 8 or 16) to shared memory. A lane's copies up to close_copies() are a batch, which
// wait_for_copies<N>() waits for unless it is one of the lane's newest N. What is not `there` becomes zeros.
template <int BYTES>
FN void copy_async(void* to, const void* from, bool there = true) {
  const uint target = uint(__cvta_generic_to_shared(to));
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(there ? 16 : 0) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0) : "memory");
  }
}
FN void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NEWEST>
FN void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory"); }
