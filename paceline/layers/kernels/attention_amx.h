// Attention on AMX tiles, for bf16. A block holds up to 16 (row, query head) pairs of one KV head; keys and values
// of a tile are laid out once for all blocks of a run. Probabilities are rounded to bf16 for the product with the values.
// A row's result does not depend on its block: a tile product works row by row, and keys past a row's own length enter
// with probability 0, which adds exact zeros.
#pragma once
#include "attention_row.h"

#ifdef USE_AMX
template <int D>
struct AmxTile {
  alignas(64) bf16 keys[TILE / 16][D / 32][512];    // [16 keys][32 dims]: pairs of dims, keys, 2
  alignas(64) bf16 values[TILE / 32][D / 16][512];  // [32 keys][16 dims]: pairs of keys, dims, 2

  // Its blocks of 32 keys from..blocks32-1. ask(j, count): between two blocks, for what comes in their places in the next tile.
  template <class U, class Ask>
  void load(const U* const* k, const U* const* v, int from, int blocks32, Ask ask) {
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 16; i++) {
      low[2 * i] = i; low[2 * i + 1] = 32 + i;
      high[2 * i] = 16 + i; high[2 * i + 1] = 48 + i;
    }
    __m512i pick_low = _mm512_load_si512(low), pick_high = _mm512_load_si512(high);
    for (int b = 2 * from; b < 2 * blocks32; b++) {
      for (int d = 0; d < D / 32; d++)
        transpose16([&](int i) { return numbers32(k[b * 16 + i], D, d * 32); }, keys[b][d]);
      ask(b * 8, 8);
    }
    for (int b = from; b < blocks32; b++) {
      ask(TILE / 2 + b * 16, 16);
      for (int p = 0; p < 16; p++)
        for (int d = 0; d < D / 32; d++) {
          __m512i x = numbers32(v[b * 32 + 2 * p], D, d * 32), y = numbers32(v[b * 32 + 2 * p + 1], D, d * 32);
          _mm512_store_si512(values[b][2 * d] + p * 32, _mm512_permutex2var_epi16(x, pick_low, y));
          _mm512_store_si512(values[b][2 * d + 1] + p * 32, _mm512_permutex2var_epi16(x, pick_high, y));
        }
    }
  }
};

// Tiles: 0-3 sums, 4 left operand, 5 right operand.
static void amx_attend_configure(int rows) {
  TileConfig c = {};
  c.palette = 1;
  for (int t = 0; t < 5; t++) { c.rows[t] = rows; c.colsb[t] = 64; }
  c.rows[5] = 16; c.colsb[5] = 64;
  tile_configure(c);
}

template <int D>
struct AmxBlock {  // up to 16 (row, query head) pairs
  alignas(64) bf16 q[16 * D];
  alignas(64) float acc[16 * D];
  alignas(64) float top[16], total[16], fade[16];
  int64_t start[16], length[16];  // the positions that a pair sees: start..length-1
  int pairs;
  int64_t earliest, longest;

  bool sees(int64_t base) const { return base < longest && base + TILE > earliest; }

  void add_tile(const AmxTile<D>& tile, int64_t base, float scale) {
    alignas(64) float s[16 * TILE];
    alignas(64) bf16 p[16 * TILE];
    int blocks32 = (std::min<int64_t>(TILE, longest - base) + 31) / 32;
    before_tiles();
    for (int b = 0; b < blocks32 * 2; b += 2) {
      _tile_zero(0); _tile_zero(1);
      for (int d = 0; d < D / 32; d++) {
        _tile_loadd(4, q + d * 32, D * 2);
        _tile_loadd(5, tile.keys[b][d], 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, tile.keys[b + 1][d], 64);
        _tile_dpbf16ps(1, 4, 5);
      }
      _tile_stored(0, s + b * 16, TILE * 4);
      _tile_stored(1, s + b * 16 + 16, TILE * 4);
    }
    soften(s, p, TILE, {pairs, start, length, top, total, fade}, base, 0, blocks32 * 2, scale);
    for (int m = 0; m < pairs; m++)
      for (int d = 0; d < D && fade[m] != 1; d += 16) store16(acc + m * D + d, load16(acc + m * D + d) * fade[m]);
    before_tiles();
    for (int d = 0; d < D / 16; d += 2) {
      _tile_loadd(0, acc + d * 16, D * 4);
      _tile_loadd(1, acc + d * 16 + 16, D * 4);
      for (int b = 0; b < blocks32; b++) {
        _tile_loadd(4, p + b * 32, TILE * 2);
        _tile_loadd(5, tile.values[b][d], 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, tile.values[b][d + 1], 64);
        _tile_dpbf16ps(1, 4, 5);
      }
      _tile_stored(0, acc + d * 16, D * 4);
      _tile_stored(1, acc + d * 16 + 16, D * 4);
    }
  }
};

static constexpr int RUN_BLOCKS = 16;   // blocks that share a tile's layout at most
static constexpr int LEAST_BLOCKS = 8;  // the same where more of them would leave threads without a run

// Rows [0, count) of one segment for one KV head: rows without tails, or nodes of a tree, whose prefixes are equally long.
// Nodes go through the tiles that lie in their prefix together. From the tile on in which it ends each has keys of its own,
// of which only the blocks of 32 that its tail reaches are laid out for it alone. What is computed is the part at `begin`.
template <int D, class U>
static void amx_attend_run(const bf16* q, const U* pool, int64_t page_size, int64_t Hq, int64_t Hk, int64_t head,
                           const int32_t* prefix, const int32_t* prefix_lens, int64_t count, const int32_t* tails,
                           const int64_t* tail_offsets, const Sight& sight, float scale, int64_t begin,
                           const States& states) {
  static thread_local AmxBlock<D> blocks[RUN_BLOCKS], own;
  static thread_local AmxTile<D> tile, second;
  constexpr int64_t W = kept_width<U>(D);
  alignas(64) static const U zeros[W] = {};
  const U *keys[TILE], *values[TILE];
  Places<U> places(pool, page_size, Hk, head, D);
  int64_t G = Hq / Hk, per = 16 / G, to_value = places.to_value(), longest = 0, earliest = INT64_MAX,
          shared = prefix_lens[0];
  bool tailed = tail_offsets[1] > tail_offsets[0];
  int used = (count + per - 1) / per, configured = -1;
  auto configure = [&](int pairs) { if (pairs != configured) amx_attend_configure(configured = pairs); };
  Places<U> ahead = places;
  // Keys base..base+n-1. more: how many of the prefix may be asked for from the next tile on.
  auto lay_out = [&](AmxTile<D>& to, int64_t base, int from, int64_t n, const int32_t* tail, int64_t more) {
    int blocks32 = (n + 31) / 32;
    for (int64_t j = from * 32; j < n; j++) {
      int64_t at = base + j;
      keys[j] = places.at((tail && at >= shared) ? tail[at - shared] : prefix[at]);
      values[j] = keys[j] + to_value;
    }
    for (int64_t j = n; j < blocks32 * 32; j++) keys[j] = values[j] = zeros;
    to.load(keys, values, from, blocks32, [&](int64_t j, int64_t count) {  // rows lie too far apart for the processor to guess
      for (int64_t end = std::min(j + count, more); j < end; j++) {
        const U* key = ahead.at(prefix[base + TILE + j]);
        ask_for(key, D);
        ask_for(key + to_value, D);
      }
    });
  };
  auto finish = [&](const AmxBlock<D>& block, int first, int64_t r) {  // row r, whose pairs begin at first
    for (int64_t g = 0; g < G; g++)
      states.put(r, g, block.acc + (first + g) * D, D, block.top[first + g], block.total[first + g]);
  };
  for (int b = 0; b < used; b++) {
    AmxBlock<D>& block = blocks[b];
    block.pairs = 0;
    block.longest = 0;
    block.earliest = INT64_MAX;
    memset(block.acc, 0, sizeof block.acc);
    for (int64_t r = b * per; r < std::min<int64_t>(count, (b + 1) * per); r++) {
      int64_t length = prefix_lens[r] + tail_offsets[r + 1] - tail_offsets[r];
      for (int64_t g = 0; g < G; g++) {
        memcpy(block.q + block.pairs * D, q + (r * Hq + head * G + g) * D, D * 2);
        block.top[block.pairs] = sight.top(head * G + g, length, begin);
        block.total[block.pairs] = sight.total(length, begin);
        block.start[block.pairs] = sight.first(length);
        block.length[block.pairs++] = length;
      }
      block.longest = std::max(block.longest, length);
      block.earliest = std::min(block.earliest, sight.first(length));
    }
    longest = std::max(longest, block.longest);
    earliest = std::min(earliest, block.earliest);
  }
  const int64_t end = begin + PART;
  int64_t apart = tailed ? shared / TILE * TILE : longest;  // from where on the rows go alone
  for (int64_t base = std::max(earliest / TILE * TILE, begin); base < std::min(apart, end); base += TILE) {
    lay_out(tile, base, 0, std::min<int64_t>(TILE, longest - base), nullptr,
            std::min(tailed ? shared : longest, end) - base - TILE);
    for (int b = 0; b < used; b++) {
      if (!blocks[b].sees(base)) continue;
      configure(blocks[b].pairs);
      blocks[b].add_tile(tile, base, scale);
    }
  }
  if (!tailed || end <= apart) {
    for (int64_t r = 0; r < count; r++) finish(blocks[r / per], r % per * G, r);
    return;
  }
  int whole = (shared - apart) / 32;  // blocks of the tile in which the prefix ends that no tail reaches
  if (whole && apart >= begin) lay_out(tile, apart, 0, whole * 32, nullptr, 0);
  own.pairs = G;
  configure(G);
  for (int64_t r = 0; r < count; r++) {
    const AmxBlock<D>& block = blocks[r / per];
    int64_t first = r % per * G;
    own.earliest = block.start[first];
    own.longest = block.length[first];
    std::fill_n(own.start, G, own.earliest);
    std::fill_n(own.length, G, own.longest);
    memcpy(own.q, block.q + first * D, G * D * sizeof(bf16));
    memcpy(own.acc, block.acc + first * D, G * D * sizeof(float));
    memcpy(own.top, block.top + first, G * sizeof(float));
    memcpy(own.total, block.total + first, G * sizeof(float));
    for (int64_t base = std::max(apart, begin); base < std::min(own.longest, end); base += TILE) {
      if (!own.sees(base)) continue;
      bool begins = base == apart;  // the tile that all rows begin alike
      AmxTile<D>& to = begins ? tile : second;
      lay_out(to, base, begins ? whole : 0, std::min<int64_t>(TILE, own.longest - base), tails + tail_offsets[r], 0);
      own.add_tile(to, base, scale);
    }
    finish(own, 0, r);
  }
}

#endif
