// Runs of packed codes, which a thread takes at a time: the codes of a word or, at 3 bits, 16 codes in a word and a half. 32 codes
// of 3 bits take three words, and two of them cross from a word into the next.

// A run in pieces, each a row of whole codes from its lowest bit on: its only word, or eight codes of 3 bits.
template <int BITS>
struct Run {
  uint piece[BITS == 3 ? 2 : 1];
};

// Reads the run `index` of a row of words. Two runs share the middle one of three words.
template <int BITS>
FN Run<BITS> load_run(const DEVICE uint* row, uint index) {
  Run<BITS> run;
  if (BITS == 3) {
    const DEVICE uint* from = row + index / 2 * 3 + index % 2;
    const uint first = from[0], second = from[1];
    run.piece[0] = index % 2 ? first >> 16 | second << 16 : first;
    run.piece[BITS == 3] = index % 2 ? second >> 8 : first >> 24 | second << 8;
  } else {
    run.piece[0] = row[index];
  }
  return run;
}

// The piece that has code `i` of a run, and the code's lowest bit in it.
template <int BITS>
FN uint piece_of(Run<BITS> run, uint i) { return run.piece[BITS == 3 ? i / 8 : 0]; }
template <int BITS>
FN int bit_of(uint i) { return int((BITS == 3 ? i % 8 : i) * BITS); }
