// Prelude for CUDA. MLX compiles with NVRTC's defaults: IEEE division and subnormals, but with contraction, which the _rn
// intrinsics rule out.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int uint;

#define FN static __device__ __forceinline__
#define DEVICE
#define THREAD
#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)
#define UNROLL _Pragma("unroll")
#define UNROLL_LOADS _Pragma("unroll 4")

FN uint as_uint(float x) { return __float_as_uint(x); }
FN float as_float(uint bits) { return __uint_as_float(bits); }

FN float mul_rn(float a, float b) { return __fmul_rn(a, b); }
FN float add_rn(float a, float b) { return __fadd_rn(a, b); }
FN float sub_rn(float a, float b) { return __fsub_rn(a, b); }
FN float div_rn(float a, float b) { return __fdiv_rn(a, b); }
FN float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FN float min_f(float a, float b) { return fminf(a, b); }
FN float max_f(float a, float b) { return fmaxf(a, b); }
FN float exp2_f(float x) { return exp2f(x); }

// Eight elements as 16-byte vectors; the pointer is aligned to eight elements.
template <typename E>
FN void load8(const E* from, float* to) {
  uint4 held[sizeof(E) / 2];
  UNROLL
  for (int i = 0; i < int(sizeof(E) / 2); i++) held[i] = reinterpret_cast<const uint4*>(from)[i];
  UNROLL
  for (int i = 0; i < 8; i++) to[i] = float(reinterpret_cast<const E*>(held)[i]);
}
template <typename E>
FN void store8(E* to, const float* from) {
  uint4 held[sizeof(E) / 2];
  UNROLL
  for (int i = 0; i < 8; i++) reinterpret_cast<E*>(held)[i] = E(from[i]);
  UNROLL
  for (int i = 0; i < int(sizeof(E) / 2); i++) reinterpret_cast<uint4*>(to)[i] = held[i];
}

#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define BARRIER() __syncthreads()
#define SIMD_BARRIER() __syncwarp()

FN uint lane_xor(uint x, uint mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FN float lane_xor(float x, uint mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
