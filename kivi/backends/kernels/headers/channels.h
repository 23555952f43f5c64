// Neighbouring channels of a row of CHANNELS elements, as vectors of eight where rows are aligned to eight.

// Loads COUNT channels from `channel` on. Those past the end of the row are some others of the row.
template <int CHANNELS, int COUNT, typename E>
FN void load_channels_of(const DEVICE E* row, uint channel, THREAD float* held) {
  if (CHANNELS % 8 == 0 && COUNT % 8 == 0) {
    UNROLL
    for (uint i = 0; i < COUNT; i += 8) load8(row + (channel + i < CHANNELS ? channel + i : CHANNELS - 8), held + i);
    return;
  }
  UNROLL
  for (uint i = 0; i < COUNT; i++) held[i] = float(row[channel + i < CHANNELS ? channel + i : CHANNELS - 1]);
}

// Stores those of eight channels from `channel` on that the row has.
template <int CHANNELS, typename E>
FN void store_channels_of(DEVICE E* row, uint channel, const THREAD float* held) {
  if (CHANNELS % 8 == 0) {
    store8(row + channel, held);
    return;
  }
  UNROLL
  for (uint i = 0; i < 8; i++) {
    if (channel + i < CHANNELS) row[channel + i] = E(held[i]);
  }
}
