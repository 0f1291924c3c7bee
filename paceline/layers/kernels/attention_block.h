// Attention of many rows at once, for bf16 without AMX: neighbouring rows of a sequence over one KV head. Keys of a tile are
// laid out so that a vector holds a pair of dims of 16 keys, and rows share what they load. A row keeps the bits that
// attend_row gives it: its dot products are the same sums of products, added in the order of `sum_each`, and its weights and
// values go through the same operations in the same order.
#pragma once
#include "attention_row.h"

#if defined(USE_AVX512BF16) && !defined(USE_AMX)
#define USE_ATTENTION_BLOCKS 1

static constexpr int BLOCK_ROWS = 16;
static constexpr int BLOCK_PAIRS = 8;  // of rows and query heads, from which on laying keys out pays

template <int D>
struct BlockTile {
  static constexpr int CHUNKS = D / 32;
  alignas(64) bf16 keys[TILE / 16][16][CHUNKS][32];  // [16 keys][pair of dims, in its chunk of 32][chunk]: keys, 2
  const bf16* values[TILE];

  // Its groups of 16 from `from` on, n keys in all. k: of all keys, to whole groups; numbers: [TILE][D], where values go that
  // are codes.
  template <class U>
  void load(const U* const* k, int64_t to_value, int from, int n, bf16* numbers) {
    alignas(64) bf16 turned[512];
    for (int b = from; b < (n + 15) / 16; b++)
      for (int c = 0; c < CHUNKS; c++) {
        transpose16([&](int i) { return numbers32<D>(k[b * 16 + i], c * 32); }, turned);
        for (int l = 0; l < 16; l++) memcpy(keys[b][l][c], turned + l * 32, 64);
      }
    for (int j = from * 16; j < n; j++) {
      if constexpr (kCoded<U>) {
        unround_row<D>(k[j] + to_value, numbers + j * D);
        values[j] = numbers + j * D;
      } else values[j] = k[j] + to_value;
    }
  }
};

template <int D>
struct RowState {  // one query head of one row
  alignas(64) float acc[D];
  float top, total;
  int64_t first, length;
};

// Dot products of P rows with the keys in groups from..end-1 of a tile: out[P][TILE].
template <int D, int P>
static inline __attribute__((always_inline)) void block_dots(const bf16* q, const BlockTile<D>& tile, int from, int end, float* out) {
  for (int b = from; b < end; b++) {
    __m512 quarter[4][P];
    auto lane = [&](int l, __m512 (&t)[P]) {
      for (int p = 0; p < P; p++) t[p] = _mm512_setzero_ps();
      for (int c = 0; c < D / 32; c++) {
        __m512bh key = (__m512bh)_mm512_load_si512(tile.keys[b][l][c]);
        for (int p = 0; p < P; p++) {
          uint32_t pair; memcpy(&pair, q + p * D + c * 32 + l * 2, 4);
          t[p] = _mm512_dpbf16_ps(t[p], (__m512bh)_mm512_set1_epi32(pair), key);
        }
      }
    };
    for (int i = 0; i < 4; i++) {
      __m512 t[P], u[P];
      lane(4 * i, quarter[i]);
      lane(4 * i + 2, t);
      for (int p = 0; p < P; p++) quarter[i][p] = _mm512_add_ps(quarter[i][p], t[p]);
      lane(4 * i + 1, u);
      lane(4 * i + 3, t);
      for (int p = 0; p < P; p++) quarter[i][p] = _mm512_add_ps(quarter[i][p], _mm512_add_ps(u[p], t[p]));
      if (i % 2)
        for (int p = 0; p < P; p++) quarter[i - 1][p] = _mm512_add_ps(quarter[i - 1][p], quarter[i][p]);
    }
    for (int p = 0; p < P; p++) _mm512_store_ps(out + p * TILE + b * 16, _mm512_add_ps(quarter[0][p], quarter[2][p]));
  }
}

// acc += weights of keys from..end-1 times their values, for P rows.
template <int D, int P>
static inline __attribute__((always_inline)) void block_values(RowState<D>* rows, const BlockTile<D>& tile, const float* s, int from, int end) {
  constexpr int DV = D / 16;
  if (from >= end) return;
  v16 acc[P][DV];
  for (int p = 0; p < P; p++)
    for (int d = 0; d < DV; d++) acc[p][d] = load16(rows[p].acc + d * 16);
  for (int j = from; j < end; j++) {
    v16 v[DV];
    for (int d = 0; d < DV; d++) v[d] = load16(tile.values[j] + d * 16);
    for (int p = 0; p < P; p++)
      for (int d = 0; d < DV; d++)
        acc[p][d] = (v16)_mm512_fmadd_ps((__m512)v[d], _mm512_set1_ps(s[p * TILE + j]), (__m512)acc[p][d]);
  }
  for (int p = 0; p < P; p++)
    for (int d = 0; d < DV; d++) store16(rows[p].acc + d * 16, acc[p][d]);
}

// One tile for P rows, which all see some of it or none.
template <int D, int P>
static void block_tile(RowState<D>* rows, const bf16* q, const BlockTile<D>& tile, int64_t base, float scale) {
  alignas(64) float s[P * TILE];
  int from[P], end[P], least = TILE, most = 0, begin = 0, stop = TILE;
  for (int p = 0; p < P; p++) {
    from[p] = (int)std::min<int64_t>(std::max<int64_t>(rows[p].first - base, 0), TILE);
    end[p] = (int)std::min<int64_t>(std::max<int64_t>(rows[p].length - base, 0), TILE);
    if (from[p] >= end[p]) from[p] = end[p] = 0;  // it sees nothing here
    else { least = std::min(least, from[p]); most = std::max(most, end[p]); }
    begin = std::max(begin, from[p]);
    stop = std::min(stop, end[p]);
  }
  if (least >= most) return;
  block_dots<D, P>(q, tile, least / 16, (most + 15) / 16, s);
  for (int p = 0; p < P; p++) {
    if (from[p] >= end[p]) continue;
    float fade = weigh(s + p * TILE, from[p], end[p], scale, rows[p].top, rows[p].total);
    for (int d = 0; d < D; d += 16) store16(rows[p].acc + d, load16(rows[p].acc + d) * fade);
  }
  // All rows see begin..stop-1; what else one sees comes before and after that, in the order of its positions.
  if (begin >= stop) begin = stop = TILE;
  for (int p = 0; p < P; p++) block_values<D, 1>(rows + p, tile, s + p * TILE, from[p], std::min(begin, end[p]));
  block_values<D, P>(rows, tile, s, begin, stop);
  for (int p = 0; p < P; p++) block_values<D, 1>(rows + p, tile, s + p * TILE, std::max(stop, from[p]), end[p]);
}

// `count` rows without tails, neighbours of one sequence, over one KV head: the part at `begin`. lengths: of the rows.
template <int D, class U>
static void attend_block(const bf16* q, const U* pool, int64_t page_size, int64_t Hq, int64_t Hk, int64_t head,
                         const int32_t* slots, const int32_t* lengths, int64_t count, const Sight& sight, float scale,
                         int64_t begin, const States& states) {
  constexpr int P = D <= 64 ? 6 : D <= 96 ? 4 : D <= 128 ? 3 : 1;  // sums of so many rows stay in registers
  static thread_local std::vector<RowState<D>> memory;
  static thread_local std::vector<bf16> queries;
  static thread_local BlockTile<D> tile;
  constexpr int64_t W = kept_width<U>(D);
  alignas(64) static const U zeros[W] = {};
  alignas(64) static thread_local bf16 numbers[kCoded<U> ? TILE * D : 1];
  const int64_t G = Hq / Hk, pairs = count * G;
  Places<U> places(pool, page_size, Hk, head, D);
  const int64_t to_value = places.to_value();
  memory.resize(pairs);
  queries.resize(pairs * D);
  RowState<D>* rows = memory.data();
  int64_t earliest = INT64_MAX, longest = 0;
  for (int64_t i = 0; i < pairs; i++) {
    int64_t r = i / G, g = i % G;
    memset(rows[i].acc, 0, sizeof rows[i].acc);
    rows[i].top = sight.top(head * G + g, lengths[r], begin);
    rows[i].total = sight.total(lengths[r], begin);
    rows[i].length = lengths[r];
    rows[i].first = sight.first(lengths[r]);
    earliest = std::min(earliest, rows[i].first);
    longest = std::max(longest, rows[i].length);
    memcpy(&queries[i * D], q + (r * Hq + head * G + g) * D, D * sizeof(bf16));
  }
  const U* keys[TILE];
  for (int64_t base = std::max(earliest / TILE * TILE, begin); base < std::min(longest, begin + PART); base += TILE) {
    int n = (int)std::min<int64_t>(TILE, longest - base), groups = (n + 15) / 16;
    int group0 = (int)(std::max<int64_t>(earliest - base, 0) / 16);
    for (int j = group0 * 16; j < groups * 16; j++) keys[j] = j < n ? places.at(slots[base + j]) : zeros;
    tile.load(keys, to_value, group0, n, numbers);
    int64_t i = 0;
    for (; i + P <= pairs; i += P) block_tile<D, P>(rows + i, &queries[i * D], tile, base, scale);
    for (; i < pairs; i++) block_tile<D, 1>(rows + i, &queries[i * D], tile, base, scale);
  }
  for (int64_t i = 0; i < pairs; i++) states.put(i / G, i % G, rows[i].acc, D, rows[i].top, rows[i].total);
}
#endif
