// Attention of one row over a paged pool, and what all ways of computing it share.
#pragma once
#include <type_traits>

#include "blocks.h"
#include "kv_rows.h"
#include "steps.h"
#include "tile.h"

#if defined(USE_AVX512BF16) && !defined(USE_AMX)
#define USE_ATTENTION_BLOCKS 1
#else
#define USE_ATTENTION_BLOCKS 0
#endif
// Whether rows of T go through attention_block.h, but those of heads whose dims are no multiple of 32.
template <class T>
static constexpr bool kInBlocks = USE_ATTENTION_BLOCKS && std::is_same_v<T, bf16>;

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
  int64_t first_part(int64_t length) const { return first(length) / PART; }
  // The highest of the scores, times LOG2_E, and the total of the weights, before any key of the part at `begin`: the first
  // part that a row sees has the sinks.
  float top(int64_t head, int64_t length, int64_t begin) const {
    return sinks && begin == first_part(length) * PART ? sinks[head] * LOG2_E : -INFINITY;
  }
  float total(int64_t length, int64_t begin) const { return sinks && begin == first_part(length) * PART ? 1.0f : 0.0f; }
};

// Where the softmaxes of one part go, each of a row and a query head: D sums, then the highest score times LOG2_E, then the
// sum of weights. What rows that see nothing of the part have there means nothing.
struct States {
  float* first;
  int64_t row, step;  // floats from row to row, from head to head

  float* at(int64_t r, int64_t g) const { return first + r * row + g * step; }
  void put(int64_t r, int64_t g, const float* acc, int64_t D, float top, float total) const {
    float* to = at(r, g);
    memcpy(to, acc, D * sizeof(float));
    to[D] = top, to[D + 1] = total;
  }
};

// What weights of earlier tiles are multiplied by when the highest score, times LOG2_E, becomes `high`: 0 where none came.
static inline float faded(float top, float high) { return top == high ? 1.0f : vexp2(splat(top - high))[0]; }

// Scores of a tile's keys to weights, for a row that sees from..n-1 of them: others get 0, those in the groups of 16 that it
// sees nothing of stay as they are. Returns what weights of earlier tiles are multiplied by.
static __attribute__((noinline)) float weigh(float* s, int from, int n, float scale, float& top, float& total) {
  int groups = (n + 15) / 16, group0 = from / 16;
  v16 m = splat(-INFINITY);
  for (int b = group0; b < groups; b++) {
    for (int j = b * 16; j < b * 16 + 16; j++) s[j] = j >= from && j < n ? s[j] * (scale * LOG2_E) : -INFINITY;
    m = vmax(m, load16(s + b * 16));
  }
  float high = top;
  for (int i = 0; i < 16; i++) high = std::max(high, m[i]);
  for (int b = group0; b < groups; b++) store16(s + b * 16, vexp2(load16(s + b * 16) - high));
  for (int j = group0 * 16; j < from; j++) s[j] = 0;  // not 2^-125
  for (int j = n; j < groups * 16; j++) s[j] = 0;
  v16 sum = {};
  for (int b = group0; b < groups; b++) sum += load16(s + b * 16);
  float fade = faded(top, high);
  total = total * fade + hsum(sum);
  top = high;
  return fade;
}

#ifdef USE_AVX512BF16
// A tile's keys that pairs of a row and a query head see, of which there are `count`, at most 16.
struct Pairs16 {
  int count;
  const int64_t *first, *length;  // pair m sees the positions first[m]..length[m]-1
  float *top, *total, *fade;      // of 16: what is not a pair's keeps its value; fade: what sums of earlier tiles are multiplied by

  __mmask16 sees(int m, int64_t at) const {  // of the 16 keys at a position
    auto below = [&](int64_t end) { return (1u << std::min<int64_t>(std::max<int64_t>(end - at, 0), 16)) - 1; };
    return (__mmask16)(below(length[m]) & ~below(first[m]));
  }
  bool see_all(int64_t base) const {
    bool all = true;
    for (int m = 0; m < count; m++) all = all && first[m] <= base && length[m] >= base + TILE;
    return all;
  }
};

template <bool ALL>
static inline __attribute__((always_inline)) void soften_groups(const float* s, bf16* weights, int64_t step, const Pairs16& pairs,
                                                                int64_t base, int from, int stop, float scale) {
  const v16 steps = splat(scale * LOG2_E), none = splat(-INFINITY);
  alignas(64) float high[16];
  __m512 each[16];
  for (int m = 0; m < 16; m++) {
    v16 most = none;
    for (int b = from; m < pairs.count && b < stop; b++) {
      v16 x = load16(s + m * TILE + b * 16);
      if (!ALL) x = (v16)_mm512_mask_mov_ps((__m512)none, pairs.sees(m, base + b * 16), (__m512)x);
      most = vmax(most, x);
    }
    each[m] = (__m512)most;
  }
  v16 before = load16(pairs.top), now = vmax(before, most_each(each) * steps);
  v16 kept = before == now ? splat(1.0f) : vexp2(before - now);
  store16(high, now);
  store16(pairs.fade, kept);
  store16(pairs.top, now);
  for (int m = 0; m < 16; m++) {
    v16 sum = {}, peak = splat(high[m]);
    for (int b = from; m < pairs.count && b < stop; b++) {
      v16 e = vexp2((v16)_mm512_fmsub_ps((__m512)load16(s + m * TILE + b * 16), (__m512)steps, (__m512)peak));
      if (!ALL) e = (v16)_mm512_maskz_mov_ps(pairs.sees(m, base + b * 16), (__m512)e);
      _mm256_storeu_si256((__m256i*)(weights + m * step + b * 16), (__m256i)_mm512_cvtneps_pbh((__m512)e));
      sum += e;
    }
    each[m] = (__m512)sum;
  }
  store16(pairs.total, load16(pairs.total) * kept + sum_each(each));
}

// The scores of a tile's groups of 16 from..stop-1 to weights in bf16, of all pairs at once: one does not wait for another's
// sums. s: [count][TILE]; weights: `step` numbers from pair to pair, which may take the places of the scores. Keys that a pair
// does not see get 0.
static __attribute__((noinline)) void soften(const float* s, bf16* weights, int64_t step, const Pairs16& pairs, int64_t base,
                                             int from, int stop, float scale) {
  if (from == 0 && stop == TILE / 16 && pairs.see_all(base)) soften_groups<true>(s, weights, step, pairs, base, 0, TILE / 16, scale);
  else soften_groups<false>(s, weights, step, pairs, base, from, stop, scale);
}
#endif

// One tile for G query heads of a row that sees from..n-1 of it. keys: of its groups of 16, anything where it sees none;
// values lie `to_value` elements behind them. top, total: [G].
template <int D, int G, class T>
static inline __attribute__((always_inline)) void row_tile(const T* q, const T* const* keys, int64_t to_value, int from, int n,
                                                           float scale, v16 (&acc)[G][D / 16], float* top, float* total) {
  constexpr int DV = D / 16;
  alignas(64) float s[G][TILE];
  int groups = (n + 15) / 16, group0 = from / 16;  // what lies before is not seen
  for (int g = 0; g < G; g++) {
    for (int b = group0; b < groups; b++) dots16<D>(q + g * D, keys + b * 16, s[g] + b * 16);
    float fade = weigh(s[g], from, n, scale, top[g], total[g]);
    for (int d = 0; d < DV; d++) acc[g][d] *= fade;
  }
  for (int j = from; j < n; j++) {
    v16 v[DV];
    for (int d = 0; d < DV; d++) v[d] = load16(keys[j] + to_value + d * 16);
    for (int g = 0; g < G; g++)
      for (int d = 0; d < DV; d++) acc[g][d] += v[d] * s[g][j];
  }
}

// G query heads of one row, from `query_head` on, over one KV head: the part at `begin`, of which it sees something.
template <int D, int G, class T>
static void attend_row(const T* q, const T* pool, int64_t page_size, int64_t Hk, int64_t head, int64_t query_head,
                       const int32_t* prefix, int64_t prefix_len, const int32_t* tail, int64_t length,
                       const Sight& sight, float scale, int64_t begin, float* states, int64_t step) {
  constexpr int DV = D / 16;
  alignas(64) static const T zeros[D] = {};
  const T *seen[2][TILE];  // keys of this tile and of the next
  v16 acc[G][DV] = {};
  float top[G], total[G];
  for (int g = 0; g < G; g++) { top[g] = sight.top(query_head + g, length, begin); total[g] = sight.total(length, begin); }
  Places<T> places(pool, page_size, Hk, head, D);
  const int64_t first = std::max(sight.first(length), begin), last = std::min(length, begin + PART), to_value = places.to_value();
  // The keys of the tile at `base`, and their lines asked for.
  auto find = [&](int64_t base, const T** keys) {
    for (int64_t at = std::max(base, first), end = std::min<int64_t>(base + TILE, last); at < end; at++) {
      const T* key = places.at(at < prefix_len ? prefix[at] : tail[at - prefix_len]);
      keys[at - base] = key;
      ask_for(key, D);
      ask_for(key + to_value, D);
    }
  };
  int64_t start = first / TILE * TILE;
  find(start, seen[start / TILE % 2]);
  for (int64_t base = start; base < last; base += TILE) {
    const T** keys = seen[base / TILE % 2];
    if (base + TILE < last) find(base + TILE, seen[(base / TILE + 1) % 2]);
    int n = std::min<int64_t>(TILE, last - base), groups = (n + 15) / 16;
    int from = std::max<int64_t>(first - base, 0), group0 = from / 16;  // what lies before is not seen
    for (int j = group0 * 16; j < from; j++) keys[j] = zeros;
    for (int j = n; j < groups * 16; j++) keys[j] = zeros;
    row_tile<D, G>(q, keys, to_value, from, n, scale, acc, top, total);
  }
  for (int g = 0; g < G; g++, states += step) {
    for (int d = 0; d < DV; d++) store16(states + d * 16, acc[g][d]);
    states[D] = top[g], states[D + 1] = total[g];
  }
}

template <class T>
using RowFn = decltype(&attend_row<16, 1, T>);

template <int D, class T>
static RowFn<T> by_group(int64_t G) {
  static constexpr RowFn<T> of[] = {attend_row<D, 1, T>, attend_row<D, 2, T>, attend_row<D, 3, T>, attend_row<D, 4, T>,
                                    attend_row<D, 5, T>, attend_row<D, 6, T>, attend_row<D, 7, T>, attend_row<D, 8, T>};
  return of[G - 1];
}
