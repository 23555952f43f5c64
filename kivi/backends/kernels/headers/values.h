// What the two kernels on values [rows, D] share: a lane holds eight channels, GROUP / 8 neighbouring lanes a group.

#define LANES_A_GROUP (GROUP / 8)

// Eight channels from `channel` on; a ragged group repeats its last channel.
FN void load_channels(const DEVICE ELEMENT* row, uint channel, THREAD float* held) {
#if CHANNELS % 8 == 0
  if (channel < CHANNELS) {
    load8(row + channel, held);
    return;
  }
#endif
  UNROLL
  for (uint i = 0; i < 8; i++) held[i] = float(row[channel + i < CHANNELS ? channel + i : CHANNELS - 1]);
}

FN Group group_of(const THREAD float* held) {
  Range range = empty_range();
  UNROLL
  for (uint i = 0; i < 8; i++) range = include(range, held[i]);
  UNROLL
  for (uint mask = 1; mask < LANES_A_GROUP; mask *= 2) {
    range.low = min_f(range.low, lane_xor(range.low, mask));
    range.high = max_f(range.high, lane_xor(range.high, mask));
    range.poison += lane_xor(range.poison, mask);
  }
  return finish(range);
}
