// Products with packed matrices on tensor cores, the one operation of attention on codes.
//
// A packed matrix has rows of words: `scale[row][chunk] * code[row][column] + zero[row][chunk]`, a chunk being 32 columns. Keys are
// such a matrix with channels as rows and tokens as columns, values with tokens as rows and channels as columns. What is wanted of
// either is x M, for each query's x: the query's channels, or the weights of its tokens.
//
// Unpacking is what bounds this on 2-bit codes, so codes are not converted at all. A code masked out of a word's half *is* a
// float16, a subnormal: the bits c << s with s + BITS <= 10 mean c * 2^(s - 24). One AND makes two codes of a fragment, and the
// factor 2^(24 - s), the same for a row of the product, is for the caller to apply: `code_factor`.
//
// The product is M^T x^T: its rows are columns of M, and its columns are queries. A fragment's register pairs two rows of M, while a
// word holds codes of one. So two rows' words are regrouped into their low and their high halves, which are rows r and r + 8 of
// the product, and the bits at one shift of them are one column of M a product. The slots 2p, 2p + 1, 2p + 8, 2p + 9 of a step's
// contraction are the rows p, p + 4, p + 8, p + 12 of its 16, p being lane % 4, so that lanes read neighbouring rows.
//
// Columns of M differ in their scales where they are of different chunks, so scales go to x. The product's eight columns tell
// chunks apart: column n holds a query of x times the scales of one chunk, and of a row only its own chunk's columns are used. Rows
// and columns are dealt alike: of row8 = lane / 4, which counts a lane's rows and columns, row8 / UNITS is the class and
// row8 % UNITS the query of a column and the part of a chunk that a row has. Four chunks take UNITS / 2 sets of products.
//
// At 3 bits two words of a chunk's three hold two runs of eight codes whole, 24 bits each. A lane has both runs or one, and reads
// both words. Windows of 16 bits begin at whole bytes: of a run's bytes the first two hold five codes whole, and the last two as
// many.
template <int BITS, int UNITS>
struct Deal {
  static constexpr int SETS = UNITS / 2, PRODUCTS = 16 / UNITS;  // of a set
  // Of a chunk's BITS words, those of a lane, and the lanes that share them.
  static constexpr int WORDS = BITS == 3 ? 2 : BITS > UNITS ? BITS / UNITS : 1;
  static constexpr int PHASES = BITS == 3 ? UNITS / 2 : UNITS > BITS ? UNITS / BITS : 1;
  static constexpr int WINDOWS = BITS == 3 ? 4 / UNITS : WORDS;              // of row row8, and as many of row row8 + 8
  static constexpr int SHIFTS = BITS == 3 ? 4 : 16 / BITS / PHASES;          // products that are made together
  static constexpr int DIRECT = 10 / BITS;                                   // codes within a float16's mantissa

  // Of a lane: the chunk of its first set, the others following, and the first of its words in a chunk.
  FN uint chunk(uint row8) { return row8 / UNITS * SETS; }
  FN uint word(uint row8) { return row8 % UNITS / PHASES * (BITS == 3 ? 1 : WORDS); }
  // Which of a chunk's columns of M is the first of a lane's, and how many columns further row row8 (high: row8 + 8) of product `m` is.
  FN uint column(uint row8) { return BITS == 3 ? row8 % UNITS * 2 * PRODUCTS : word(row8) * (32 / BITS) + row8 % UNITS % PHASES * SHIFTS; }
  FN uint further(uint m, bool high) {
    if (BITS == 3) return m + high * PRODUCTS;
    return m / SHIFTS * (32 / BITS) + m % SHIFTS + high * (16 / BITS);
  }
  // Where product `m` has its code: in which window, from which bit on. Bits past the tenth belong to a float16's exponent: such
  // codes are moved `down`.
  FN uint window(uint m) { return BITS == 3 ? UNITS == 2 && m > 2 : m / SHIFTS; }
  FN uint bit(uint m, bool high) {
    if (BITS != 3) return m % SHIFTS * BITS;
    // A run's second window begins at its eighth bit; where the high row has that alone, its first code is at the twelfth.
    return m * 3 - window(m) * 8 + (UNITS == 4 && high ? 4 : 0);
  }
  FN uint down(uint m, bool high) { return bit(m, high) + BITS > 10 ? DIRECT * BITS : 0; }
  // What row row8 (high: row8 + 8) of product `m` is to be multiplied by, but for 2^24.
  FN float code_factor(uint m, bool high) { return 1.0f / float(1u << (bit(m, high) - down(m, high))); }
};

// What a lane reads for a step of 16 rows of M.
template <int BITS, int UNITS>
struct Step {
  uint word[UNITS / 2][4][Deal<BITS, UNITS>::WORDS], scale[4], zero[4];
  uint x[2], row[2];
};

// sums[set * PRODUCTS + m] += x M of STEPS times 16 rows, and zero_sums += x times zeros, for COUNT queries, one or UNITS. `x` has
// pairs of float16 in the order of slots, PITCH words a query. A step is read while the one before it is multiplied.
template <int BITS, int UNITS, int COUNT, int STEPS, int ROW_WORDS, int PARAMS, int PITCH>
FN void add_product(const uint* words, const PARAM* scale, const PARAM* zero, const uint* x, uint lane, float (*sums)[4], float* zero_sums) {
  typedef Deal<BITS, UNITS> Dealt;
  typedef Step<BITS, UNITS> Read;
  const uint row8 = lane / 4, pair4 = lane % 4, unit = row8 % UNITS;
  const uint phase = unit % Dealt::PHASES;
  const uint low = BITS == 3 && UNITS == 2 ? (unit ? 0x7632u : 0x5410u) : phase ? 0x6521u : 0x5410u;
  const uint high = phase ? 0x7733u : 0x7632u;
  // Four bytes of two words, at 3 bits: those in the middle of a lane's two runs, or its run.
  const uint inner = (UNITS == 2 ? 0x4321u + unit * 0x2222u : 0x0210u + (unit % 2 * 3 + unit / 2 * 2) * 0x0111u);
  // Two sets' scales lie side by side, or are one.
  const bool PAIRED = Dealt::SETS == 2 && GROUP == 32;
  const uint chunk = Dealt::chunk(row8);
  // A lone query leaves every second column free: there zeros take the place of scales, and a matrix of ones sums them up.
  const PARAM* scales_here = (COUNT == 1 && unit ? zero : scale) + pair4 * PARAMS + chunk * 32 / GROUP;
  const PARAM* zeros_here = zero + pair4 * PARAMS + row8 % 4 * 32 / GROUP;
  const uint* words_here = words + pair4 * ROW_WORDS + chunk * BITS + Dealt::word(row8);
  const uint* x_here = x + (COUNT == 1 ? 0 : unit) * PITCH + pair4 * 2;
  const uint* row_here = x + row8 % COUNT * PITCH + pair4 * 2;

  const auto read = [&](Read& to) {
    UNROLL
    for (int c = 0; c < 4; c++) {
      const PARAM* mine = scales_here + c * 4 * PARAMS;
      if (!PAIRED) to.scale[c] = half_bits(mine[0]);
      else if (PARAMS % 2) to.scale[c] = half_bits(mine[0]) | half_bits(mine[1]) << 16;
      else to.scale[c] = load_halves(mine);
      UNROLL
      for (int set = 0; set < Dealt::SETS; set++) {
        const uint* from = words_here + c * 4 * ROW_WORDS + set * BITS;
        if (BITS == 3) {
          load_words<1>(from, to.word[set][c]);
          load_words<1>(from + 1, to.word[set][c] + 1);
        } else {
          load_words<Dealt::WORDS>(from, to.word[set][c]);
        }
      }
    }
    load_words<2>(x_here, to.x);
    if (COUNT > 1) {
      UNROLL
      for (int c = 0; c < 4; c++) to.zero[c] = half_bits(zeros_here[c * 4 * PARAMS]);
      load_words<2>(row_here, to.row);
    }
    scales_here += 16 * PARAMS;
    zeros_here += 16 * PARAMS;
    words_here += 16 * ROW_WORDS;
    x_here += 8;
    row_here += 8;
  };
  // to[side][window]: two rows' windows of a lane's low codes and of its high ones.
  const auto cut = [&](const uint* one, const uint* other, uint (*to)[Dealt::WINDOWS]) {
    if constexpr (BITS != 3) {
      UNROLL
      for (uint j = 0; j < Dealt::WORDS; j++) {
        to[0][j] = pick_bytes(one[j], other[j], low);
        to[1][j] = pick_bytes(one[j], other[j], high);
      }
    } else {
      const uint inner_one = pick_bytes(one[0], one[1], inner), inner_other = pick_bytes(other[0], other[1], inner);
      if constexpr (UNITS == 2) {
        to[0][0] = pick_bytes(one[0], other[0], low);
        to[0][1] = pick_bytes(inner_one, inner_other, 0x5410u);
        to[1][0] = pick_bytes(inner_one, inner_other, 0x7632u);
        to[1][1] = pick_bytes(one[1], other[1], low);
      } else {
        to[0][0] = pick_bytes(inner_one, inner_other, 0x5410u);
        to[1][0] = pick_bytes(inner_one, inner_other, 0x6521u);
      }
    }
  };
  const auto multiply = [&](const Read& from) {
    UNROLL
    for (uint set = 0; set < Dealt::SETS; set++) {
      const uint side = PAIRED && set ? 0x7632u : 0x5410u;
      const uint first = half2_multiply(pick_bytes(from.scale[0], from.scale[1], side), from.x[0]);
      const uint second = half2_multiply(pick_bytes(from.scale[2], from.scale[3], side), from.x[1]);
      if (COUNT == 1) mma_f16(zero_sums, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, first, second);
      uint pairs[2][2][Dealt::WINDOWS];
      cut(from.word[set][0], from.word[set][1], pairs[0]);
      cut(from.word[set][2], from.word[set][3], pairs[1]);
      UNROLL
      for (uint m = 0; m < Dealt::PRODUCTS; m += Dealt::SHIFTS) {
        uint a[Dealt::SHIFTS][4];
        UNROLL
        for (uint i = 0; i < Dealt::SHIFTS; i++) {
          UNROLL
          for (uint r = 0; r < 4; r++) {
            const uint down = Dealt::down(m + i, r % 2), bit = Dealt::bit(m + i, r % 2) - down;
            a[i][r] = (pairs[r / 2][r % 2][Dealt::window(m + i)] >> down) & ((1u << BITS) - 1u) * 0x00010001u << bit;
          }
        }
        UNROLL
        for (uint i = 0; i < Dealt::SHIFTS; i++) {
          mma_f16(sums[set * Dealt::PRODUCTS + m + i], a[i][0], a[i][1], a[i][2], a[i][3], first, second);
        }
      }
    }
    if (COUNT > 1) {
      // Rows are queries, columns chunks.
      const uint first = pick_bytes(from.zero[0], from.zero[1], 0x5410u), second = pick_bytes(from.zero[2], from.zero[3], 0x5410u);
      mma_f16(zero_sums, from.row[0], 0, from.row[1], 0, first, second);
    }
  };
  Read now, next;
  read(now);
  UNROLL_STEPS
  for (uint k = 1; k < STEPS; k++) {
    read(next);
    multiply(now);
    now = next;
  }
  multiply(now);
}
