// Reductions over the 32 lanes of a SIMD group, in the same order on every target.

FN float lanes_sum(float x) {
  UNROLL
  for (uint mask = 1; mask < 32; mask *= 2) x += lane_xor(x, mask);
  return x;
}
FN float lanes_max(float x) {
  UNROLL
  for (uint mask = 1; mask < 32; mask *= 2) x = max_f(x, lane_xor(x, mask));
  return x;
}
