// Prelude for Metal. MLX's own header comes before it and brings metal_stdlib, float16_t and bfloat16_t.
//
// Contraction is off so that code * scale + zero rounds twice, as the definition does; MLX compiles in the safe math mode,
// in which division is IEEE's.
#pragma METAL fp contract(off)

#define FN static inline
#define DEVICE device
#define THREAD thread
#define INFINITY_F INFINITY
#define NAN_F NAN
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_LOADS _Pragma("clang loop unroll_count(4)")

FN uint as_uint(float x) { return as_type<uint>(x); }
FN float as_float(uint bits) { return as_type<float>(bits); }

FN float mul_rn(float a, float b) { return a * b; }
FN float add_rn(float a, float b) { return a + b; }
FN float sub_rn(float a, float b) { return a - b; }
FN float div_rn(float a, float b) { return a / b; }
FN float fma_rn(float a, float b, float c) { return metal::fma(a, b, c); }
FN float min_f(float a, float b) { return metal::fmin(a, b); }
FN float max_f(float a, float b) { return metal::fmax(a, b); }
FN float exp2_f(float x) { return metal::exp2(x); }

template <typename E>
FN void load8(const device E* from, thread float* to) {
  UNROLL
  for (int i = 0; i < 8; i++) to[i] = float(from[i]);
}
template <typename E>
FN void store8(device E* to, const thread float* from) {
  UNROLL
  for (int i = 0; i < 8; i++) to[i] = E(from[i]);
}

#define SHARED(type, name, count) threadgroup type name[count]
#define BARRIER() threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define SIMD_BARRIER() simdgroup_barrier(metal::mem_flags::mem_threadgroup)

FN uint lane_xor(uint x, uint mask) { return metal::simd_shuffle_xor(x, ushort(mask)); }
FN float lane_xor(float x, uint mask) { return metal::simd_shuffle_xor(x, ushort(mask)); }
