// What attention_tensor uses beyond the dialect, for the host: matrix fragments are exchanged among the lanes.

#include <algorithm>

#define ROLLED
#define UNROLL_STEPS

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

FN uint pick_bytes(uint x, uint y, uint selector) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint picked = 0;
  for (uint i = 0; i < 4; i++) picked |= uint(both >> (selector >> (i * 4) & 7u) * 8 & 0xffu) << (i * 8);
  return picked;
}
FN uint half2_of(float low, float high) { return uint(float_to_half(low)) | (uint(float_to_half(high)) << 16); }
FN uint half2_multiply(uint x, uint y) {
  const float low = half_to_float(uint16_t(x)) * half_to_float(uint16_t(y));
  return half2_of(low, half_to_float(uint16_t(x >> 16)) * half_to_float(uint16_t(y >> 16)));
}
FN uint half_bits(float16_t_ x) { return x.bits; }
FN uint load_halves(const float16_t_* from) {
  expect_aligned(from, 4);
  return from[0].bits | uint(from[1].bits) << 16;
}

template <int N>
FN void load_words(const uint* from, uint* to) {
  expect_aligned(from, N * 4);
  for (int i = 0; i < N; i++) to[i] = from[i];
}

FN void store_pair(uint* to, const uint* from) {
  expect_aligned(to, 8);
  for (int i = 0; i < 2; i++) to[i] = from[i];
}

FN float exp2_near(float x) { return exp2f(x); }

#define SHARED_BY_LAUNCH(name, count) alignas(16) static uint name[count]

// Copies are made when they are waited for, and until then their place holds junk: so what is read too early, or overwritten too
// early, is seen. What is not `there` becomes zeros.
struct Copy { void* to; const void* from; int bytes; bool there; };
static std::vector<std::vector<Copy>> copies[1024];  // batches of a thread, the last one open

template <int BYTES>
FN void copy_async(void* to, const void* from, bool there = true) {
  expect_aligned(to, BYTES);
  expect_aligned(from, BYTES);
  auto& batches = copies[current_thread];
  if (batches.empty()) batches.emplace_back();
  batches.back().push_back({to, from, BYTES, there});
  memset(to, 0xff, BYTES);
}
FN void close_copies() { copies[current_thread].resize(std::max<size_t>(copies[current_thread].size(), 1) + 1); }
template <int NEWEST>
FN void wait_for_copies() {
  auto& batches = copies[current_thread];
  while (batches.size() > NEWEST + 1) {
    for (const Copy& copy : batches.front()) {
      if (copy.there) memcpy(copy.to, copy.from, copy.bytes);
      else memset(copy.to, 0, copy.bytes);
    }
    batches.erase(batches.begin());
  }
}
