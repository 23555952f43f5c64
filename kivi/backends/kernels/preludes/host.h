// Prelude for a CPU: runs a kernel body with no GPU, one fibre a thread, one threadgroup after the other.
//
// Fibres of a SIMD group run until each waits at the same kind of point (a SIMD operation, a barrier, the end), so what a
// lane reads from another is what that lane wrote before the point, as on a GPU. Lanes that wait at different points, which
// hangs or corrupts on a GPU, make the launch fail.
#define _XOPEN_SOURCE 700
#ifndef _DARWIN_C_SOURCE
#define _DARWIN_C_SOURCE
#endif
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

typedef unsigned int uint;

#define FN static inline
#define DEVICE
#define THREAD
#define INFINITY_F __builtin_inff()
#define NAN_F __builtin_nanf("")
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(enable)")
#else
#define UNROLL
#endif
#define UNROLL_LOADS

FN uint as_uint(float x) { uint bits; memcpy(&bits, &x, 4); return bits; }
FN float as_float(uint bits) { float x; memcpy(&x, &bits, 4); return x; }

// The compiler is told -ffp-contract=off, so each operator rounds once.
FN float mul_rn(float a, float b) { return a * b; }
FN float add_rn(float a, float b) { return a + b; }
FN float sub_rn(float a, float b) { return a - b; }
FN float div_rn(float a, float b) { return a / b; }
FN float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
FN float min_f(float a, float b) { return fminf(a, b); }
FN float max_f(float a, float b) { return fmaxf(a, b); }
FN float exp2_f(float x) { return exp2f(x); }

// 16-bit floats by their bits, so that no compiler support is needed; both round to nearest even.
FN float half_to_float(uint16_t bits) {
  uint sign = uint(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, mantissa = bits & 0x3ffu;
  if (exponent == 31) return as_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) return as_float(sign | as_uint(float(mantissa) * 0x1p-24f));
  return as_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

FN uint16_t float_to_half(float x) {
  uint bits = as_uint(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 leaves the subnormal's ten bits, rounded, at the bottom of the sum.
    return uint16_t(sign | (as_uint(as_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

struct float16_t_ {
  uint16_t bits;
  float16_t_() = default;
  explicit float16_t_(float x) : bits(float_to_half(x)) {}
  operator float() const { return half_to_float(bits); }
};

struct bfloat16_t_ {
  uint16_t bits;
  bfloat16_t_() = default;
  explicit bfloat16_t_(float x) {
    uint word = as_uint(x);
    bits = uint16_t((word & 0x7fffffffu) > 0x7f800000u ? (word >> 16) | 0x40u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  operator float() const { return as_float(uint(bits) << 16); }
};

// A CPU reads vectors from any address, a GPU only from multiples of their size: others make the launch fail.
static bool misaligned;
FN void expect_aligned(const void* address, int bytes) { misaligned |= uintptr_t(address) % bytes != 0; }

template <typename E>
FN void load8(const E* from, float* to) {
  expect_aligned(from, 16);
  for (int i = 0; i < 8; i++) to[i] = float(from[i]);
}
template <typename E>
FN void store8(E* to, const float* from) {
  expect_aligned(to, 16);
  for (int i = 0; i < 8; i++) to[i] = E(from[i]);
}

// ---- threads ----

enum FibreState { READY, AT_SIMD, AT_BARRIER, DONE };
struct Fibre {
  ucontext_t start;
  jmp_buf resume;
  bool started;
  FibreState state;
  std::vector<char> stack;
};
struct Uint3 { uint x, y, z; };

static std::vector<Fibre> fibres;
static jmp_buf scheduler;
static uint current_thread;
static Uint3 current_group;
static void (*current_entry)();

// What each lane hands to the others, in two turns: no lane can be two operations ahead.
static uint exchanged[2][1024];
static uint turn[1024];

static void wait_as(FibreState state) {
  Fibre& fibre = fibres[current_thread];
  fibre.state = state;
  if (!_setjmp(fibre.resume)) _longjmp(scheduler, 1);
}

static void fibre_main() {
  current_entry();
  fibres[current_thread].state = DONE;
  _longjmp(scheduler, 1);
}

static void run_fibre(uint index) {
  Fibre& fibre = fibres[index];
  current_thread = index;
  if (_setjmp(scheduler)) return;
  if (fibre.started) _longjmp(fibre.resume, 1);
  fibre.started = true;
  setcontext(&fibre.start);
}

// Runs one SIMD group until all its lanes wait at a barrier or are done; false if they parted.
static bool run_simd(uint first, uint count) {
  for (;;) {
    uint at_simd = 0, at_barrier = 0, done = 0;
    for (uint i = first; i < first + count; i++) {
      if (fibres[i].state == READY) run_fibre(i);
      at_simd += fibres[i].state == AT_SIMD;
      at_barrier += fibres[i].state == AT_BARRIER;
      done += fibres[i].state == DONE;
    }
    if (at_barrier == count || done == count) return true;
    if (at_simd != count) return false;
    for (uint i = first; i < first + count; i++) fibres[i].state = READY;
  }
}

static bool run_threadgroup(uint threads) {
  for (uint i = 0; i < threads; i++) {
    Fibre& fibre = fibres[i];
    fibre.started = false;
    fibre.state = READY;
    turn[i] = 0;
    getcontext(&fibre.start);
    fibre.start.uc_stack.ss_sp = fibre.stack.data();
    fibre.start.uc_stack.ss_size = fibre.stack.size();
    fibre.start.uc_link = nullptr;
    makecontext(&fibre.start, fibre_main, 0);
  }
  for (;;) {
    uint done = 0;
    for (uint first = 0; first < threads; first += 32) {
      if (!run_simd(first, threads - first < 32 ? threads - first : 32)) return false;
    }
    for (uint i = 0; i < threads; i++) done += fibres[i].state == DONE;
    if (done == threads) return true;
    if (done) return false;
    for (uint i = 0; i < threads; i++) fibres[i].state = READY;
  }
}

static int run_grid(void (*entry)(), uint groups_x, uint groups_y, uint groups_z, uint threads) {
  if (threads > 1024) return 2;
  current_entry = entry;
  misaligned = false;
  if (fibres.size() < threads) fibres = std::vector<Fibre>(threads);
  for (uint i = 0; i < threads; i++) fibres[i].stack.resize(1 << 16);
  for (uint z = 0; z < groups_z; z++)
    for (uint y = 0; y < groups_y; y++)
      for (uint x = 0; x < groups_x; x++) {
        current_group = {x, y, z};
        if (!run_threadgroup(threads)) return 1;
      }
  return misaligned ? 3 : 0;
}

#define SHARED(type, name, count) static type name[count]
#define BARRIER() wait_as(AT_BARRIER)
#define SIMD_BARRIER() wait_as(AT_SIMD)

FN uint lane_xor(uint x, uint mask) {
  uint me = current_thread, side = turn[me]++ & 1;
  exchanged[side][me] = x;
  wait_as(AT_SIMD);
  return exchanged[side][me ^ mask];
}
FN float lane_xor(float x, uint mask) { return as_float(lane_xor(as_uint(x), mask)); }
