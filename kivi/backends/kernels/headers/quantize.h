// KIVI's rules for one group, step by step as in kivi/quantize.py. LEVELS, SMALLEST_SCALE and PARAM are configuration.

struct Range {
  float low, high, poison;
};

FN Range empty_range() {
  Range range;
  range.low = INFINITY_F;
  range.high = -INFINITY_F;
  range.poison = 0.0f;
  return range;
}

FN Range include(Range range, float x) {
  range.low = min_f(range.low, x);
  range.high = max_f(range.high, x);
  // Minimum and maximum skip NaN; x * 0 is NaN for NaN and infinity, and stays.
  range.poison += x * 0.0f;
  return range;
}

struct Group {
  PARAM scale, zero;
  float scale_value, zero_value, reciprocal;
};

FN Group finish(Range range) {
  Group group_;
  float scale = div_rn(sub_rn(range.high, range.low), float(LEVELS));
  if (range.poison != 0.0f) scale = NAN_F;
  group_.scale = PARAM(scale);
  group_.scale_value = float(group_.scale);
  if (group_.scale_value < SMALLEST_SCALE) {
    group_.scale = PARAM(SMALLEST_SCALE);
    group_.scale_value = SMALLEST_SCALE;
  }
  group_.zero = PARAM(add_rn(range.low, 0.0f));
  group_.zero_value = float(group_.zero);
  group_.reciprocal = div_rn(1.0f, group_.scale_value);
  return group_;
}

// x / y rounded once, given 1 / y rounded: two Newton steps with exact remainders (Markstein, IBM J. Res. Dev. 34, 1990)
// cost half of a division. Quotients so small or so large that a step underflows or overflows have the same code either way;
// a scale whose reciprocal is subnormal has not, and is divided by.
FN float quotient(float x, float y, float reciprocal) {
  if (y > 1.2676506e30f) return div_rn(x, y);
  float q = mul_rn(x, reciprocal);
  q = fma_rn(fma_rn(-q, y, x), reciprocal, q);
  return fma_rn(fma_rn(-q, y, x), reciprocal, q);
}

// A float between 0 and 2^22 plus 1.5 * 2^23 has its integer part, rounded half to even, in the low bits.
#define ROUNDING 12582912.0f

// The code as the low bits of the result. Clipping before rounding gives the same, since the bounds are integers.
FN float encode_biased(float x, Group group_) {
  float code = quotient(sub_rn(x, group_.zero_value), group_.scale_value, group_.reciprocal);
  return add_rn(min_f(max_f(code, 0.0f), float(LEVELS)), ROUNDING);
}
FN uint encode(float x, Group group_) { return as_uint(encode_biased(x, group_)) & uint(LEVELS); }
FN float roundtrip(float x, Group group_) {
  float code = sub_rn(encode_biased(x, group_), ROUNDING);
  return add_rn(mul_rn(code, group_.scale_value), group_.zero_value);
}
