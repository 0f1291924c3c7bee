// Attention over codes of 8 bits where no tile products run: a tile of one KV head becomes numbers once, in a buffer of the
// nearest caches, for all query heads of neighbouring rows. Each row then goes through it as attend_row does.
#pragma once
#include "attention_row.h"

static constexpr int CODED_ROWS = 16;  // that share a tile at most

// row_tile with its sums in memory. sums: [G][D].
template <int D, int G, class T>
static void kept_row_tile(const T* q, const T* const* keys, int from, int n, float scale, float* sums, float* top,
                          float* total) {
  v16 acc[G][D / 16];
  for (int g = 0; g < G; g++)
    for (int d = 0; d < D / 16; d++) acc[g][d] = load16(sums + g * D + d * 16);
  row_tile<D, G>(q, keys, TILE * D, from, n, scale, acc, top, total);
  for (int g = 0; g < G; g++)
    for (int d = 0; d < D / 16; d++) store16(sums + g * D + d * 16, acc[g][d]);
}

template <class T>
using TileFn = void (*)(const T*, const T* const*, int, int, float, float*, float*, float*);

template <int D, class T>
static TileFn<T> tile_fn(int64_t G) {
  static constexpr TileFn<T> of[] = {kept_row_tile<D, 1, T>, kept_row_tile<D, 2, T>, kept_row_tile<D, 3, T>,
                                     kept_row_tile<D, 4, T>, kept_row_tile<D, 5, T>, kept_row_tile<D, 6, T>,
                                     kept_row_tile<D, 7, T>, kept_row_tile<D, 8, T>};
  return of[G - 1];
}

// One tile as numbers: keys, then values.
template <int D, class T>
struct CodedTile {
  std::vector<T> memory = std::vector<T>(2 * TILE * D + 64 / sizeof(T));
  T* const start = (T*)(((uintptr_t)memory.data() + 63) / 64 * 64);
  const T* keys[TILE];

  CodedTile() {
    for (int j = 0; j < TILE; j++) keys[j] = start + j * D;
  }
  // Its rows from..n-1. slot_at: of a row.
  template <class SlotAt>
  void load(int64_t from, int64_t n, SlotAt slot_at, Places<int8_t>& places) {
    for (int64_t j = from; j < n; j++) {
      const int8_t* key = places.at(slot_at(j));
      unround_row<D>(key, start + j * D);
      unround_row<D>(key + places.to_value(), start + (TILE + j) * D);
    }
  }
};

// `count` neighbouring rows of one sequence over one KV head: rows without tails, or rows with tails whose prefixes are
// equally long. The query heads go in `parts` of G. What is computed is the part of the positions at `begin`.
template <int D, class T>
static void attend_coded(const T* q, const int8_t* pool, int64_t page_size, int64_t Hq, int64_t Hk, int64_t head,
                         const int32_t* prefix, const int32_t* prefix_lens, int64_t count, const int32_t* tails,
                         const int64_t* tail_offsets, int64_t parts, const Sight& sight, float scale, int64_t begin,
                         const States& states) {
  static thread_local CodedTile<D, T> tile, second;
  static thread_local std::vector<float> memory;
  const int64_t heads = Hq / Hk, G = heads / parts, shared = prefix_lens[0];
  const bool tailed = tail_offsets[1] > tail_offsets[0];
  Places<int8_t> places(pool, page_size, Hk, head, D);
  const TileFn<T> fn = tile_fn<D, T>(G);
  memory.assign(count * heads * (D + 2), 0.0f);
  float *sums = memory.data(), *top = sums + count * heads * D, *total = top + count * heads;  // of each row and query head
  int64_t length[CODED_ROWS], longest = 0, earliest = INT64_MAX;
  for (int64_t r = 0; r < count; r++) {
    length[r] = prefix_lens[r] + tail_offsets[r + 1] - tail_offsets[r];
    longest = std::max(longest, length[r]);
    earliest = std::min(earliest, sight.first(length[r]));
    for (int64_t g = 0; g < heads; g++) {
      top[r * heads + g] = sight.top(head * heads + g, length[r], begin);
      total[r * heads + g] = sight.total(length[r], begin);
    }
  }
  auto add = [&](int64_t r, int64_t base, const CodedTile<D, T>& to) {
    int64_t from = std::max<int64_t>(sight.first(length[r]) - base, 0), n = std::min<int64_t>(TILE, length[r] - base);
    if (from >= n) return;
    for (int64_t g = r * heads; g < (r + 1) * heads; g += G)
      fn(q + (r * Hq + head * heads + g - r * heads) * D, to.keys, from, n, scale, sums + g * D, top + g, total + g);
  };
  const int64_t end = begin + PART;
  int64_t apart = tailed ? shared / TILE * TILE : longest;  // from where on the rows go alone
  for (int64_t base = std::max(earliest / TILE * TILE, begin); base < std::min(apart, end); base += TILE) {
    tile.load(std::max<int64_t>(earliest - base, 0), std::min<int64_t>(TILE, longest - base),
              [&](int64_t j) { return prefix[base + j]; }, places);
    for (int64_t at = base + TILE; at < std::min({base + 2 * TILE, tailed ? shared : longest, end}); at++) {
      const int8_t* key = places.at(prefix[at]);
      ask_for(key, D);
      ask_for(key + places.to_value(), D);
    }
    for (int64_t r = 0; r < count; r++) add(r, base, tile);
  }
  if (tailed && apart < end) {
    int64_t own = shared - apart;  // where in its tile the prefix ends
    if (apart >= begin)
      tile.load(std::min(own, std::max<int64_t>(earliest - apart, 0)), own, [&](int64_t j) { return prefix[apart + j]; },
                places);
    for (int64_t r = 0; r < count; r++)
      for (int64_t base = std::max(apart, begin); base < std::min(length[r], end); base += TILE) {
        CodedTile<D, T>& to = base == apart ? tile : second;
        const int32_t* tail = tails + tail_offsets[r];
        to.load(std::max(shared - base, int64_t(0)), std::min<int64_t>(TILE, length[r] - base),
                [&](int64_t j) { return tail[base + j - shared]; }, places);
        add(r, base, to);
      }
  }
  for (int64_t r = 0; r < count; r++)
    for (int64_t g = 0; g < heads; g++) {
      int64_t i = r * heads + g;
      states.put(r, g, sums + i * D, D, top[i], total[i]);
    }
}

// What goes through rows, of numbers one after another and of codes together; null for a head dim that has no kernel.
template <int D, class T, class U>
static auto row_fn_of(int64_t G) {
  if constexpr (kCoded<U>) return &attend_coded<D, T>;
  else return by_group<D, T>(G);
}
template <class T, class U>
static auto row_fn(int64_t D, int64_t G) {
  decltype(row_fn_of<16, T, U>(G)) fn = nullptr;
  if (D == 16) fn = row_fn_of<16, T, U>(G);
  if constexpr (!kInBlocks<T>) switch (D) {
    case 32: fn = row_fn_of<32, T, U>(G); break;
    case 64: fn = row_fn_of<64, T, U>(G); break;
    case 96: fn = row_fn_of<96, T, U>(G); break;
    case 128: fn = row_fn_of<128, T, U>(G); break;
    case 256: fn = row_fn_of<256, T, U>(G); break;
  }
  return fn;
}
