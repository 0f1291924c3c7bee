// Attention of rows of one sequence over one KV head, for bf16 without AMX. Where many rows and query heads go together, some
// groups of 16 keys at a time are laid out for them, so that a vector holds 8 dims of 4 keys, or a pair of keys of 16 dims. A
// row does not depend on what it goes with: each of its dot products is four sums, of every fourth pair of dims, and the keys
// of a group that it does not see enter with weight 0.
#pragma once
#include "attention_row.h"

#if USE_ATTENTION_BLOCKS
static constexpr int BLOCK_PAIRS = 48;   // of a row and a query head that a run of several rows has at most
static constexpr int TOGETHER = 6;       // pairs whose sums stay in registers; more of them pay for laying values out
static constexpr int GROUPS = 4;         // of 16 keys that are laid out together
static constexpr int MOST_DIM = 256;

// A run's pairs.
struct RunPairs {
  std::vector<bf16> q;      // [pairs][D]
  std::vector<float> sums;  // [pairs][D]
  std::vector<v16> scores;  // [pairs][TILE] floats; weights in bf16 take their places
  std::vector<float> top, total;
  std::vector<int64_t> first, length;  // a pair sees the positions first..length-1

  void resize(int64_t pairs, int64_t D) {
    q.resize(pairs * D);
    sums.assign(pairs * D, 0.0f);
    scores.resize(pairs * TILE / 16);
    top.resize(pairs + 16), total.resize(pairs + 16);  // 16 are taken at once
    first.resize(pairs), length.resize(pairs);
  }
};

// The keys and values of a tile.
template <class U>
struct BlockTile {
  const U* found[2][TILE];
  const U** keys = found[0];  // of whole groups of 16: `none` where there is no key
  const U** next = found[1];  // of the next tile: asked for on the way, for all at once would be waited for
  int num_next = 0;
  const U* none;  // zeros
  int64_t to_value, D;
  alignas(64) bf16 room[GROUPS * 16 * MOST_DIM];

  __attribute__((always_inline)) void ask(int j, int count, int64_t offset) const {
    for (int end = std::min(j + count, num_next); j < end; j++) ask_for(next[j] + offset, D);
  }
  const U* value(int j) const { return keys[j] == none ? none : keys[j] + to_value; }
  // Groups b..end-1 to `room`: [groups][runs of 8 dims][4][keys i, i + 4, i + 8, i + 12][8].
  void lay_keys(int b, int end) {
    for (int j = b * 16; j < end * 16; j += 16) {
      ask(j, 16, 0);
      for (int64_t d = 0; d < D; d += 32)
        for (int i = 0; i < 4; i++) {
          auto row = [&](int n) { return numbers32(keys[j + i + 4 * n], D, d); };
          bf16* to = room + (j - b * 16) * D + d * 16 + i * 32;
          __m512i a = row(0), c = row(1), e = row(2), g = row(3);
          __m512i low0 = _mm512_shuffle_i32x4(a, c, 0x44), low1 = _mm512_shuffle_i32x4(e, g, 0x44);
          __m512i high0 = _mm512_shuffle_i32x4(a, c, 0xee), high1 = _mm512_shuffle_i32x4(e, g, 0xee);
          _mm512_store_si512(to, _mm512_shuffle_i32x4(low0, low1, 0x88));
          _mm512_store_si512(to + 128, _mm512_shuffle_i32x4(low0, low1, 0xdd));
          _mm512_store_si512(to + 256, _mm512_shuffle_i32x4(high0, high1, 0x88));
          _mm512_store_si512(to + 384, _mm512_shuffle_i32x4(high0, high1, 0xdd));
        }
    }
  }
  // The same of values: [pairs of keys][chunks of 32 dims][2][16 dims: see `in_order`][2].
  void lay_values(int b, int end) {
    for (int j = b * 16; j < end * 16; j += 2) {
      ask(j, 2, to_value);
      for (int64_t d = 0; d < D; d += 32) {
        bf16* to = room + (j - b * 16) * D + 2 * d;
        __m512i low, high;
        pair(j, d, low, high);
        _mm512_store_si512(to, low);
        _mm512_store_si512(to + 32, high);
      }
    }
  }
  // A chunk of the values of keys j and j + 1.
  void pair(int j, int64_t d, __m512i& low, __m512i& high) const {
    __m512i x = numbers32(value(j), D, d), y = numbers32(value(j + 1), D, d);
    low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
  }
};

// Two vectors of sums, of a chunk of 32 dims as values have it, to dims one after another.
static inline void in_order(float* sums) {
  __m512i low = _mm512_loadu_si512(sums), high = _mm512_loadu_si512(sums + 16);
  __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  _mm512_storeu_si512(sums, _mm512_permutex2var_epi64(low, first, high));
  _mm512_storeu_si512(sums + 16, _mm512_permutex2var_epi64(low, last, high));
}

static inline __m512bh splat_pair(const bf16* x) {
  uint32_t pair; memcpy(&pair, x, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// Scores of P pairs with a group of 16 keys, as `lay_keys` has them. out: of the first pair, [TILE].
template <int P>
static void block_dots(const bf16* q, const bf16* keys, int64_t D, float* out) {
  __m512 acc[P][4];
  for (int p = 0; p < P; p++)
    for (int i = 0; i < 4; i++) acc[p][i] = _mm512_setzero_ps();
  for (int64_t d = 0; d < D; d += 8) {
    __m512bh key[4];
    for (int i = 0; i < 4; i++) key[i] = (__m512bh)_mm512_load_si512(keys + d * 16 + i * 32);
    for (int p = 0; p < P; p++) {
      __m512bh dims = (__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(q + p * D + d)));
      for (int i = 0; i < 4; i++) acc[p][i] = _mm512_dpbf16_ps(acc[p][i], dims, key[i]);
    }
  }
  for (int p = 0; p < P; p++) {  // a lane of 4 has the sums of one key: 0 and 2 are added, 1 and 3, and then both
    const __m512* a = acc[p];
    __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    __m512 last = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    __m512d x = (__m512d)first, y = (__m512d)last;
    _mm512_storeu_ps(out + p * TILE, _mm512_add_ps((__m512)_mm512_unpacklo_pd(x, y), (__m512)_mm512_unpackhi_pd(x, y)));
  }
}

// sums += weights of `count` keys times their values, for P pairs and C chunks of dims. weights: of the first key and pair.
// pair_at(j, c, low, high): values j and j + 1 of chunk c.
template <int P, int C, class PairAt>
static inline __attribute__((always_inline)) void block_values(float* sums, int64_t D, const bf16* weights, int count, PairAt pair_at) {
  __m512 acc[P][2 * C];
  for (int p = 0; p < P; p++)
    for (int c = 0; c < 2 * C; c++) acc[p][c] = _mm512_loadu_ps(sums + p * D + c * 16);
  for (int j = 0; j < count; j += 2) {
    __m512i v[2 * C];
    for (int c = 0; c < C; c++) pair_at(j, c, v[2 * c], v[2 * c + 1]);
    for (int p = 0; p < P; p++) {
      __m512bh pair = splat_pair(weights + p * 2 * TILE + j);
      for (int c = 0; c < 2 * C; c++) acc[p][c] = _mm512_dpbf16_ps(acc[p][c], pair, (__m512bh)v[c]);
    }
  }
  for (int p = 0; p < P; p++)
    for (int c = 0; c < 2 * C; c++) _mm512_storeu_ps(sums + p * D + c * 16, acc[p][c]);
}

// The pairs from `at` to `end` through the tile at `base`, of which they see the groups from..stop-1 at most.
template <int D, class U>
static void block_tile(RunPairs& run, int64_t at, int64_t end, BlockTile<U>& tile, int from, int stop, int64_t base, float scale) {
  const bool few = end - at <= TOGETHER;  // these take values as they lie
  float* scores = (float*)run.scores.data();
  auto first_of = [&](int64_t i) { return (int)std::min<int64_t>(std::max<int64_t>(run.first[i] - base, 0), TILE); };
  auto end_of = [&](int64_t i) { return (int)std::min<int64_t>(std::max<int64_t>(run.length[i] - base, 0), TILE); };
  const bf16* q = run.q.data();
  for (int b = from; b < stop; b += GROUPS) {
    int count = std::min(GROUPS, stop - b);
    tile.lay_keys(b, b + count);
    for (int n = 0; n < count; n++)
      for (int64_t i = at; i < end; i += TOGETHER) {
        float* out = scores + i * TILE + (b + n) * 16;
        BY_ROWS(end - i, (block_dots<R>(q + i * D, tile.room + n * 16 * D, D, out)))
      }
  }
  for (int64_t i = at; i < end; i += 16) {
    alignas(64) float fade[16];
    const int count = (int)std::min<int64_t>(16, end - i);
    soften(scores + i * TILE, (bf16*)(scores + i * TILE), 2 * TILE,
           {count, &run.first[i], &run.length[i], &run.top[i], &run.total[i], fade}, base, from, stop, scale);
    for (int m = 0; m < count; m++)
      for (int64_t d = (i + m) * D; d < (i + m + 1) * D && fade[m] != 1; d += 16) store16(&run.sums[d], load16(&run.sums[d]) * fade[m]);
  }
  constexpr int STEP = TILE / 16;
  for (int b = from; b < stop; b += few ? STEP : GROUPS) {
    int b_end = few ? stop : std::min(b + GROUPS, stop);
    if (!few) tile.lay_values(b, b_end);
    // Groups g..g_end-1 for P pairs from i on.
    auto add = [&](auto P, int64_t i, int g, int g_end) {
      if (g >= g_end) return;
      const bf16* weights = (const bf16*)(scores + i * TILE) + g * 16;
      auto chunks = [&](auto C, int64_t d) {
        float* sums = &run.sums[i * D + d];
        int count = (g_end - g) * 16;
        if (few)
          block_values<P(), C()>(sums, D, weights, count, [&](int j, int c, __m512i& low, __m512i& high) {
            if (d == 0 && c == 0) tile.ask(g * 16 + j, 2, tile.to_value);
            tile.pair(g * 16 + j, d + 32 * c, low, high);
          });
        else
          block_values<P(), C()>(sums, D, weights, count, [&](int j, int c, __m512i& low, __m512i& high) {
            const bf16* from = tile.room + ((g - b) * 16 + j) * D + 2 * d + 64 * c;
            low = _mm512_load_si512(from), high = _mm512_load_si512(from + 32);
          });
      };
      for (int64_t d = 0; d + 64 <= D; d += 64) chunks(std::integral_constant<int, 2>(), d);
      if constexpr (D % 64 != 0) chunks(std::integral_constant<int, 1>(), D / 64 * 64);
    };
    for (int64_t i = at; i < end; i += TOGETHER) {
      int64_t rows = std::min<int64_t>(TOGETHER, end - i);
      int begin = b, close = b_end;  // all of them see these
      for (int64_t p = i; p < i + rows; p++) {
        begin = std::max(begin, first_of(p) / 16);
        close = std::min(close, first_of(p) < end_of(p) ? (end_of(p) + 15) / 16 : 0);
      }
      if (begin >= close) begin = close = b_end;
      // What a pair sees besides comes before and after that, in the order of its positions.
      auto alone = [&](int64_t p, int g, int g_end) {
        if (first_of(p) < end_of(p))
          add(std::integral_constant<int, 1>(), p, std::max(g, first_of(p) / 16), std::min(g_end, (end_of(p) + 15) / 16));
      };
      for (int64_t p = i; p < i + rows; p++) alone(p, b, begin);
      BY_ROWS(rows, (add(std::integral_constant<int, R>(), i, begin, close)))
      for (int64_t p = i; p < i + rows; p++) alone(p, close, b_end);
    }
  }
}

// `count` neighbouring rows of one sequence over one KV head: rows without tails, or rows with tails whose prefixes are
// equally long. These go through the tiles that lie in their prefix together, and from the tile on in which it ends alone.
// What is computed is the part at `begin`.
template <int D, class U>
static void attend_block(const bf16* q, const U* pool, int64_t page_size, int64_t Hq, int64_t Hk, int64_t head,
                         const int32_t* prefix, const int32_t* prefix_lens, int64_t count, const int32_t* tails,
                         const int64_t* tail_offsets, const Sight& sight, float scale, int64_t begin, const States& states) {
  static thread_local RunPairs run;
  static thread_local BlockTile<U> tile;
  alignas(64) static const U zeros[kept_width<U>(MOST_DIM)] = {};
  const int64_t G = Hq / Hk, pairs = count * G, shared = prefix_lens[0], end = begin + PART;
  const bool tailed = tail_offsets[1] > tail_offsets[0];
  Places<U> places(pool, page_size, Hk, head, D);
  tile.none = zeros, tile.to_value = places.to_value(), tile.D = D;
  int64_t earliest = INT64_MAX, longest = 0;
  run.resize(pairs, D);
  for (int64_t i = 0; i < pairs; i++) {
    int64_t r = i / G, g = head * G + i % G, length = prefix_lens[r] + tail_offsets[r + 1] - tail_offsets[r];
    run.top[i] = sight.top(g, length, begin);
    run.total[i] = sight.total(length, begin);
    run.first[i] = sight.first(length);
    run.length[i] = length;
    earliest = std::min(earliest, run.first[i]);
    longest = std::max(longest, length);
    memcpy(&run.q[i * D], q + (r * Hq + g) * D, D * sizeof(bf16));
  }
  // The keys at first..last-1 of the tile at `base`, and zeros around them in their groups of 16. tail: what follows the prefix.
  auto find = [&](int64_t base, int64_t first, int64_t last, const int32_t* tail, const U** keys) {
    for (int64_t at = first / 16 * 16; at < first; at++) keys[at - base] = zeros;
    for (int64_t at = first; at < last; at++)
      keys[at - base] = places.at(tail && at >= shared ? tail[at - shared] : prefix[at]);
    for (int64_t at = last; at % 16; at++) keys[at - base] = zeros;
  };
  auto add = [&](int64_t r, int64_t r_end, int64_t base, int64_t first, int64_t last) {
    block_tile<D>(run, r * G, r_end * G, tile, (int)(first - base) / 16, (int)(last - base + 15) / 16, base, scale);
  };
  const int64_t apart = tailed ? shared / TILE * TILE : longest;  // from where on the rows go alone
  const int64_t stop = std::min(apart, end), known = std::min(tailed ? shared : longest, end);
  bool found = false;
  for (int64_t base = std::max(earliest / TILE * TILE, begin), last; base < stop; base = last) {
    int64_t first = std::max(base, earliest);
    last = std::min(base + TILE, known);
    if (!found) {
      find(base, first, last, nullptr, tile.keys);
      for (int64_t j = first - base; j < last - base; j++) ask_for(tile.keys[j], D), ask_for(tile.keys[j] + tile.to_value, D);
    }
    found = true;
    int64_t next = std::min(last + TILE, known);
    tile.num_next = last % TILE ? 0 : (int)(next - last);
    if (tile.num_next) find(last, last, next, nullptr, tile.next);
    add(0, count, base, first, last);
    std::swap(tile.keys, tile.next);
  }
  tile.num_next = 0;
  for (int64_t r = 0; tailed && r < count; r++)
    for (int64_t base = std::max(apart, begin); base < std::min(run.length[r * G], end); base += TILE) {
      int64_t first = std::max(base, run.first[r * G]), last = std::min(base + TILE, run.length[r * G]);
      if (first >= last) continue;
      find(base, first, last, tails + tail_offsets[r], tile.keys);
      add(r, r + 1, base, first, last);
    }
  for (int64_t i = 0; i < pairs; i++) {
    for (int64_t d = 0; d < D; d += 32) in_order(&run.sums[i * D + d]);
    states.put(i / G, i % G, &run.sums[i * D], D, run.top[i], run.total[i]);
  }
}
#endif
