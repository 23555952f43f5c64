// What attention's kernels share. Scores are in units of log2, so that weights are powers of two.

// The code at bit `shift` of `word` as a float 1 + code / 2^BITS: placed in the mantissa's top bits, with no conversion.
template <int BITS>
FN float code_as_mantissa(uint word, int shift) {
  const int top = 23 - BITS;
  const uint mask = ((1u << BITS) - 1u) << top;
  const uint moved = shift > top ? word >> (shift - top) : word << (top - shift);
  return as_float((moved & mask) | 0x3f800000u);
}

// exp2(x - maximum), 0 for what must not be seen; NaN stays NaN, also where there is nothing else and the maximum is -infinity.
FN float weight_of(float x, float maximum) { return x == -INFINITY_F ? 0.0f : exp2_f(x - maximum); }

// What an output that is not yet divided by its sum is multiplied by; `sink` is the logit of an attention sink or -infinity.
// A query that sees nothing gets 0.
FN float normaliser(float maximum, float sum, float sink) {
  const float largest = max_f(maximum, sink), shrink = weight_of(maximum, largest);
  const float whole = sum * shrink + weight_of(sink, largest);
  return whole > 0.0f ? shrink / whole : whole == 0.0f ? 0.0f : NAN_F;
}
#if SINK_LOGITS
#define SINK_LOGIT(query_head) (sink_logits[query_head] * 1.44269504f)
#else
#define SINK_LOGIT(query_head) (-INFINITY_F)
#endif

#define VALUE_WORDS (VALUE_PADDED * VALUE_BITS / 32)  // of a token

// Positions of the layout array, which describes a launch.
#define QUERY_ROWS layout[0]     // queries of one KV head: query heads a KV head times L
#define QUERIES layout[1]        // L
#define KV_HEADS layout[2]
#define SPLITS layout[3]         // of the tokens
#define CODE_CAPACITY layout[4]  // tokens
#define SINK_CAPACITY layout[5]
#define WINDOW_CAPACITY layout[6]
#define CAUSAL layout[7]
#define MASK_BATCH layout[8]     // strides of the mask, in elements
#define MASK_HEAD layout[9]
#define MASK_QUERY layout[10]
#define MASK_TOKEN layout[11]
#define COUNT_STRIDE layout[12]  // 3 when every row of the batch has its own counts, else 0
#define BEFORE_GROUPS (TENSOR_FROM * QUERY_PARTS)  // threadgroups of attention in attention_tensor's grid
#define TENSOR_FROM layout[13]   // first split of attention_tensor's; those before are attention's (SPLITS where it runs alone)
