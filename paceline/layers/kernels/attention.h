// Attention over a paged pool, grouped query heads. Each element type has a file of its own, to be compiled beside the other.
#pragma once
#include <type_traits>

#include "blocks.h"
#include "steps.h"
#include "tile.h"

#ifdef USE_AVX512BF16
template <int D>
static inline void dots16(const bf16* q, const bf16* const* keys, float* out) {
  __m512 acc[16];
  for (int j = 0; j < 16; j++) {
    acc[j] = _mm512_setzero_ps();
    int d = 0;
    for (; d + 32 <= D; d += 32)
      acc[j] = _mm512_dpbf16_ps(acc[j], (__m512bh)_mm512_loadu_si512(q + d), (__m512bh)_mm512_loadu_si512(keys[j] + d));
    for (; d < D; d += 16) acc[j] = (__m512)((v16)acc[j] + load16(q + d) * load16(keys[j] + d));
  }
  store16(out, sum_each(acc));
}
#else
template <int D>
static inline void dots16(const bf16* q, const bf16* const* keys, float* out) {
  for (int j = 0; j < 16; j++) {
    v16 acc = {};
    for (int d = 0; d < D; d += 16) acc += load16(q + d) * load16(keys[j] + d);
    out[j] = hsum(acc);
  }
}
#endif
template <int D>
static inline void dots16(const float* q, const float* const* keys, float* out) {
  for (int j = 0; j < 16; j++) {
    v16 acc = {};
    for (int d = 0; d < D; d += 16) acc += load16(q + d) * load16(keys[j] + d);
    out[j] = hsum(acc);
  }
}

// What a layer's rows see, besides what the batch says. A row sees the last `window` positions up to its own; 0: all. A sink
// is a score without a value: it takes its share of the softmax of its query head, and adds nothing. Neither changes how
// tiles are cut: a row passes over the tiles that lie before its window, and over the positions before it in the first.
struct Sight {
  int64_t window;
  const float* sinks;  // of query heads, or null

  int64_t first(int64_t length) const { return window > 0 ? std::max<int64_t>(length - window, 0) : 0; }
  float top(int64_t head) const { return sinks ? sinks[head] : -INFINITY; }  // of the scores before any key
  float total() const { return sinks ? 1.0f : 0.0f; }                       // of the weights before any key
};

// G query heads of one row, from `query_head` on, over one KV head.
template <int D, int G, class T>
static void attend_row(const T* q, const T* pool, int64_t page_size, int64_t Hk, int64_t head, int64_t query_head,
                       const int32_t* prefix, int64_t prefix_len, const int32_t* tail, int64_t length,
                       const Sight& sight, float scale, T* out) {
  constexpr int DV = D / 16;
  alignas(64) float s[G][TILE];
  alignas(64) static const T zeros[D] = {};
  const T *seen[2][TILE];  // keys of this tile and of the next
  v16 acc[G][DV] = {};
  float top[G], total[G];
  for (int g = 0; g < G; g++) { top[g] = sight.top(query_head + g); total[g] = sight.total(); }
  const int64_t row = Hk * D, first = sight.first(length), to_value = page_size * row;
  // The keys of the tile at `base`, and their lines asked for: a head's rows lie too far apart for the processor to guess.
  auto find = [&](int64_t base, const T** keys) {
    const uint32_t page = (uint32_t)page_size;
    for (int64_t at = std::max(base, first), end = std::min<int64_t>(base + TILE, length); at < end; at++) {
      uint32_t slot = (uint32_t)(at < prefix_len ? prefix[at] : tail[at - prefix_len]);
      const T* key = pool + slot / page * 2 * to_value + slot % page * row + head * D;
      keys[at - base] = key;
      for (int64_t line = 0; line < D * (int64_t)sizeof(T); line += 64) {
        __builtin_prefetch((const char*)key + line, 0, 2);
        __builtin_prefetch((const char*)(key + to_value) + line, 0, 2);
      }
    }
  };
  int64_t start = first / TILE * TILE;
  find(start, seen[start / TILE % 2]);
  for (int64_t base = start; base < length; base += TILE) {
    const T** keys = seen[base / TILE % 2];
    if (base + TILE < length) find(base + TILE, seen[(base / TILE + 1) % 2]);
    int n = std::min<int64_t>(TILE, length - base), groups = (n + 15) / 16;
    int from = std::max<int64_t>(first - base, 0), group0 = from / 16;  // what lies before is not seen
    bool partial = from > 0 || n < groups * 16;
    for (int j = group0 * 16; j < from; j++) keys[j] = zeros;
    for (int j = n; j < groups * 16; j++) keys[j] = zeros;
    for (int g = 0; g < G; g++) {
      v16 m = splat(-INFINITY);
      for (int b = group0; b < groups; b++) {
        dots16<D>(q + g * D, keys + b * 16, s[g] + b * 16);
        for (int j = b * 16; j < b * 16 + 16; j++) s[g][j] = j >= from && j < n ? s[g][j] * scale : -INFINITY;
        m = vmax(m, load16(s[g] + b * 16));
      }
      float high = top[g];
      for (int i = 0; i < 16; i++) high = std::max(high, m[i]);
      v16 sum = {};
      for (int b = group0; b < groups; b++) {
        v16 e = vexp(load16(s[g] + b * 16) - high);
        store16(s[g] + b * 16, e);
        sum += e;
      }
      for (int j = group0 * 16; j < from; j++) s[g][j] = 0;
      for (int j = n; j < groups * 16; j++) s[g][j] = 0;
      float fade = vexp(splat(top[g] - high))[0];  // of what is 0 where nothing came before
      // The masked lanes hold exp(-87), not 0: take them off by summing again where a tile is partial.
      if (partial) { sum = v16{}; for (int b = group0; b < groups; b++) sum += load16(s[g] + b * 16); }
      total[g] = total[g] * fade + hsum(sum);
      top[g] = high;
      for (int d = 0; d < DV; d++) acc[g][d] *= fade;
    }
    for (int j = from; j < n; j++) {
      v16 v[DV];
      for (int d = 0; d < DV; d++) v[d] = load16(keys[j] + to_value + d * 16);
      for (int g = 0; g < G; g++)
        for (int d = 0; d < DV; d++) acc[g][d] += v[d] * s[g][j];
    }
  }
  for (int g = 0; g < G; g++)
    for (int d = 0; d < DV; d++) store16(out + g * D + d * 16, acc[g][d] / total[g]);
}

template <class T>
using RowFn = void (*)(const T*, const T*, int64_t, int64_t, int64_t, int64_t, const int32_t*, int64_t, const int32_t*,
                       int64_t, const Sight&, float, T*);

template <int D, class T>
static RowFn<T> by_group(int64_t G) {
  switch (G) {
    case 1: return attend_row<D, 1, T>;
    case 2: return attend_row<D, 2, T>;
    case 3: return attend_row<D, 3, T>;
    case 4: return attend_row<D, 4, T>;
    case 5: return attend_row<D, 5, T>;
    case 6: return attend_row<D, 6, T>;
    case 7: return attend_row<D, 7, T>;
    case 8: return attend_row<D, 8, T>;
  }
  return nullptr;
}

template <class T>
static RowFn<T> row_fn(int64_t D, int64_t G) {
  switch (D) {
    case 16: return by_group<16, T>(G);
    case 32: return by_group<32, T>(G);
    case 64: return by_group<64, T>(G);
    case 96: return by_group<96, T>(G);
    case 128: return by_group<128, T>(G);
    case 256: return by_group<256, T>(G);
  }
  return nullptr;
}

#ifdef USE_AMX
// The same attention on AMX tiles, for bf16. A block holds up to 16 (row, query head) pairs of one KV head; keys and values
// of a tile are laid out once for all blocks of a run. Probabilities are rounded to bf16 for the product with the values.
// A row's result does not depend on its block: a tile product works row by row, and keys past a row's own length enter
// with probability 0, which adds exact zeros.

static inline void transpose16(const bf16* const* rows, int64_t offset, bf16* out) {  // 16 x 16 pairs
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + offset);
  for (int i = 0; i < 8; i++) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      a[4 * i + 2 * j] = _mm512_unpacklo_epi64(b[4 * i + j], b[4 * i + 2 + j]);
      a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(b[4 * i + j], b[4 * i + 2 + j]);
    }
  // a[4 i + c]: column c of every 128-bit lane, rows 4 i to 4 i + 3.
  for (int c = 0; c < 4; c++) {
    __m512i x0 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), x1 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    __m512i y0 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88), y1 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_storeu_si512(out + (0 + c) * 32, _mm512_shuffle_i32x4(x0, y0, 0x88));
    _mm512_storeu_si512(out + (8 + c) * 32, _mm512_shuffle_i32x4(x0, y0, 0xdd));
    _mm512_storeu_si512(out + (4 + c) * 32, _mm512_shuffle_i32x4(x1, y1, 0x88));
    _mm512_storeu_si512(out + (12 + c) * 32, _mm512_shuffle_i32x4(x1, y1, 0xdd));
  }
}

template <int D>
struct AmxTile {
  alignas(64) bf16 keys[TILE / 16][D / 32][512];    // [16 keys][32 dims]: pairs of dims, keys, 2
  alignas(64) bf16 values[TILE / 32][D / 16][512];  // [32 keys][16 dims]: pairs of keys, dims, 2

  void load(const bf16* const* k, const bf16* const* v, int from, int blocks32) {  // its blocks of 32 keys from..blocks32-1
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 16; i++) {
      low[2 * i] = i; low[2 * i + 1] = 32 + i;
      high[2 * i] = 16 + i; high[2 * i + 1] = 48 + i;
    }
    __m512i pick_low = _mm512_load_si512(low), pick_high = _mm512_load_si512(high);
    for (int b = 2 * from; b < 2 * blocks32; b++)
      for (int d = 0; d < D / 32; d++) transpose16(k + b * 16, d * 32, keys[b][d]);
    for (int b = from; b < blocks32; b++)
      for (int p = 0; p < 16; p++)
        for (int d = 0; d < D / 32; d++) {
          __m512i x = _mm512_loadu_si512(v[b * 32 + 2 * p] + d * 32), y = _mm512_loadu_si512(v[b * 32 + 2 * p + 1] + d * 32);
          _mm512_store_si512(values[b][2 * d] + p * 32, _mm512_permutex2var_epi16(x, pick_low, y));
          _mm512_store_si512(values[b][2 * d + 1] + p * 32, _mm512_permutex2var_epi16(x, pick_high, y));
        }
  }
};

// Tiles: 0-3 sums, 4 left operand, 5 right operand.
static void amx_attend_configure(int rows) {
  TileConfig c = {};
  c.palette = 1;
  for (int t = 0; t < 5; t++) { c.rows[t] = rows; c.colsb[t] = 64; }
  c.rows[5] = 16; c.colsb[5] = 64;
  _tile_loadconfig(&c);
}

template <int D>
struct AmxBlock {  // up to 16 (row, query head) pairs
  alignas(64) bf16 q[16 * D];
  alignas(64) float acc[16 * D];
  float top[16], total[16];
  int64_t start[16], length[16];  // the positions that a pair sees: start..length-1
  int pairs;
  int64_t earliest, longest;

  bool sees(int64_t base) const { return base < longest && base + TILE > earliest; }

  void add_tile(const AmxTile<D>& tile, int64_t base, float scale) {
    alignas(64) float s[16 * TILE];
    alignas(64) bf16 p[16 * TILE];
    int blocks32 = (std::min<int64_t>(TILE, longest - base) + 31) / 32;
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
    for (int m = 0; m < pairs; m++) soften(s + m * TILE, p + m * TILE, m, start[m] - base, length[m] - base, blocks32 * 2, scale);
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

  // One row of scores to probabilities; updates top, total and acc of pair m. It sees the keys from..valid-1 of this tile.
  void soften(float* s, bf16* p, int m, int64_t from, int64_t valid, int groups, float scale) {
    if (valid <= 0 || from >= TILE) { memset(p, 0, groups * 32); return; }
    if (groups == TILE / 16 && valid >= TILE && from <= 0) soften_groups<TILE / 16>(s, p, m, from, valid, groups, scale);
    else soften_groups<0>(s, p, m, from, valid, groups, scale);
  }

  template <int kGroups>  // of a whole tile, or 0: as many as ``groups``
  void soften_groups(float* s, bf16* p, int m, int64_t from, int64_t valid, int groups, float scale) {
    const int count = kGroups ? kGroups : groups;
    int full = kGroups ? kGroups : std::min<int64_t>(valid, count * 16) / 16;
    v16 high16 = splat(-INFINITY);
    for (int b = 0; b < count; b++) {
      v16 x = load16(s + b * 16) * scale;
      if (b >= full || b * 16 < from)
        for (int i = 0; i < 16; i++) if (b * 16 + i >= valid || b * 16 + i < from) x[i] = -INFINITY;
      store16(s + b * 16, x);
      high16 = vmax(high16, x);
    }
    float high = std::max(top[m], hmax(high16));
    v16 sum = {};
    for (int b = 0; b < count; b++) {
      v16 x = load16(s + b * 16);
      v16 e = x == -INFINITY ? v16{} : vexp(x - high);
      store16(p + b * 16, e);
      sum += e;
    }
    float fade = vexp(splat(top[m] - high))[0];  // of what is 0 where nothing came before
    total[m] = total[m] * fade + hsum(sum);
    top[m] = high;
    for (int d = 0; d < D; d += 16) store16(acc + m * D + d, load16(acc + m * D + d) * fade);
  }
};

static constexpr int RUN_BLOCKS = 8;  // blocks that share a tile's layout

// Rows [0, count) of one segment for one KV head: rows without tails, or nodes of a tree, whose prefixes are equally long.
// Nodes go through the tiles that lie in their prefix together. From the tile on in which it ends each has keys of its own,
// of which only the blocks of 32 that its tail reaches are laid out for it alone.
template <int D>
static void amx_attend_run(const bf16* q, const bf16* pool, int64_t page_size, int64_t Hq, int64_t Hk, int64_t head,
                           const int32_t* prefix, const int32_t* prefix_lens, int64_t count, const int32_t* tails,
                           const int64_t* tail_offsets, const Sight& sight, float scale, bf16* out) {
  static thread_local AmxBlock<D> blocks[RUN_BLOCKS], own;
  static thread_local AmxTile<D> tile, second;
  alignas(64) static const bf16 zeros[D] = {};
  const bf16 *keys[TILE], *values[TILE];
  int64_t G = Hq / Hk, per = 16 / G, row = Hk * D, longest = 0, earliest = INT64_MAX,
          shared = prefix_lens[0];
  bool tailed = tail_offsets[1] > tail_offsets[0];
  int used = (count + per - 1) / per, configured = -1;
  auto configure = [&](int pairs) { if (pairs != configured) amx_attend_configure(configured = pairs); };
  auto lay_out = [&](AmxTile<D>& to, int64_t base, int from, int64_t n, const int32_t* tail) {  // keys base..base+n-1
    int blocks32 = (n + 31) / 32;
    for (int64_t j = from * 32; j < n; j++) {
      int64_t at = base + j, slot = (tail && at >= shared) ? tail[at - shared] : prefix[at];
      keys[j] = pool + (slot / page_size) * 2 * page_size * row + (slot % page_size) * row + head * D;
      values[j] = keys[j] + page_size * row;
    }
    for (int64_t j = n; j < blocks32 * 32; j++) keys[j] = values[j] = zeros;
    to.load(keys, values, from, blocks32);
  };
  auto finish = [&](const AmxBlock<D>& block, int first, int64_t r) {  // row r, whose pairs begin at first
    for (int64_t g = 0; g < G; g++)
      for (int d = 0; d < D; d += 16)
        store16(out + (r * Hq + head * G + g) * D + d, load16(block.acc + (first + g) * D + d) / block.total[first + g]);
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
        block.top[block.pairs] = sight.top(head * G + g);
        block.total[block.pairs] = sight.total();
        block.start[block.pairs] = sight.first(length);
        block.length[block.pairs++] = length;
      }
      block.longest = std::max(block.longest, length);
      block.earliest = std::min(block.earliest, sight.first(length));
    }
    longest = std::max(longest, block.longest);
    earliest = std::min(earliest, block.earliest);
  }
  int64_t apart = tailed ? shared / TILE * TILE : longest;  // from where on the rows go alone
  for (int64_t base = earliest / TILE * TILE; base < apart; base += TILE) {
    lay_out(tile, base, 0, std::min<int64_t>(TILE, longest - base), nullptr);
    for (int b = 0; b < used; b++) {
      if (!blocks[b].sees(base)) continue;
      configure(blocks[b].pairs);
      blocks[b].add_tile(tile, base, scale);
    }
  }
  if (!tailed) {
    for (int64_t r = 0; r < count; r++) finish(blocks[r / per], r % per * G, r);
    return;
  }
  int whole = (shared - apart) / 32;  // blocks of the tile in which the prefix ends that no tail reaches
  if (whole) lay_out(tile, apart, 0, whole * 32, nullptr);
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
    for (int64_t base = apart; base < own.longest; base += TILE) {
      if (!own.sees(base)) continue;
      bool begins = base == apart;  // the tile that all rows begin alike
      AmxTile<D>& to = begins ? tile : second;
      lay_out(to, base, begins ? whole : 0, std::min<int64_t>(TILE, own.longest - base), tails + tail_offsets[r]);
      own.add_tile(to, base, scale);
    }
    finish(own, 0, r);
  }
}

template <int D>
static void amx_attend(const bf16* q, const bf16* pool, int64_t page_size, int64_t rows, int64_t Hq, int64_t Hk,
                       const int32_t* slots, const int64_t* slot_offsets, const int32_t* prefix_lens,
                       const int32_t* tails, const int64_t* tail_offsets, const Sight& sight, float scale, bf16* out) {
  std::vector<int64_t> starts;
  int64_t limit = RUN_BLOCKS * (16 / (Hq / Hk));
  auto tailed = [&](int64_t r) { return tail_offsets[r + 1] > tail_offsets[r]; };
  for (int64_t r = 0; r < rows; r++) {
    bool joins = r > 0 && tailed(r) == tailed(r - 1) && slot_offsets[r] == slot_offsets[r - 1] &&
                 r - starts.back() < limit && (!tailed(r) || prefix_lens[r] == prefix_lens[r - 1]);
    if (!joins) starts.push_back(r);
  }
  int64_t runs = starts.size();
  starts.push_back(rows);
  on_threads(runs * Hk > 1 ? pl_threads() : 1, [&] {
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < runs; i++)
      for (int64_t h = 0; h < Hk; h++) {
        int64_t r = starts[i];
        amx_attend_run<D>(q + r * Hq * D, pool, page_size, Hq, Hk, h, slots + slot_offsets[r], prefix_lens + r,
                          starts[i + 1] - r, tails, tail_offsets + r, sight, scale, out + r * Hq * D);
      }
    _tile_release();
  });
}
#endif

template <class T>
int attend(const T* q, const T* pool, int64_t page_size, int64_t rows, int64_t Hq, int64_t Hk, int64_t D,
                  const int32_t* slots, const int64_t* slot_offsets, const int32_t* prefix_lens, const int32_t* tails,
                  const int64_t* tail_offsets, int64_t window, const float* sinks, float scale, T* out) {
  int64_t parts = 1;  // of the query heads of a KV head, each at most 8
  while (Hq / Hk % parts || Hq / Hk / parts > 8) parts++;
  int64_t G = Hq / Hk / parts;
  Sight sight = {window, sinks};
  RowFn<T> fn = row_fn<T>(D, G);
  if (!fn) return 1;
#ifdef USE_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    auto run = D == 32 ? amx_attend<32> : D == 64 ? amx_attend<64> : D == 96 ? amx_attend<96> :
               D == 128 ? amx_attend<128> : D == 256 ? amx_attend<256> : nullptr;
    if (run && Hq / Hk <= 16) {
      run(q, pool, page_size, rows, Hq, Hk, slots, slot_offsets, prefix_lens, tails, tail_offsets, sight, scale, out);
      return 0;
    }
  }
#endif
  const int64_t at_once = std::min<int64_t>(4, std::max<int64_t>(1, rows * Hk * parts / 16));  // few rows go one by one
  on_threads(rows * Hk > 1 ? pl_threads() : 1, [&] {
#pragma omp for schedule(dynamic, at_once) collapse(2)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t h = 0; h < Hk * parts; h++) {
        int64_t tail = tail_offsets[r + 1] - tail_offsets[r];
        fn(q + (r * Hq + h * G) * D, pool, page_size, Hk, h / parts, h * G, slots + slot_offsets[r], prefix_lens[r],
           tails + tail_offsets[r], prefix_lens[r] + tail, sight, scale, out + (r * Hq + h * G) * D);
      }
  });
  return 0;
}

#define DEFINE_ATTEND(NAME, T)                                                                                        \
  template int attend(const T*, const T*, int64_t, int64_t, int64_t, int64_t, int64_t, const int32_t*,                \
                      const int64_t*, const int32_t*, const int32_t*, const int64_t*, int64_t, const float*, float,   \
                      T*);                                                                                            \
  extern "C" int pl_attend_##NAME(const T* q, const T* pool, int64_t page_size, int64_t rows, int64_t Hq, int64_t Hk, \
                                  int64_t D, const int32_t* slots, const int64_t* slot_offsets,                       \
                                  const int32_t* prefix_lens, const int32_t* tails, const int64_t* tail_offsets,      \
                                  int64_t window, const float* sinks, float scale, T* out) {                          \
    return attend(q, pool, page_size, rows, Hq, Hk, D, slots, slot_offsets, prefix_lens, tails, tail_offsets, window, \
                  sinks, scale, out);                                                                                 \
  }
