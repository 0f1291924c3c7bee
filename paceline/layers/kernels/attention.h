// Attention over a paged pool, grouped query heads. Each element type has a file of its own, to be compiled beside the other.
#pragma once
#include "attention_amx.h"
#include "attention_block.h"
#include "attention_coded.h"
#include "attention_row.h"

// Where runs of rows begin that may go together, and the end of the last: neighbours of one sequence without tails, or, where
// `trees`, with tails behind prefixes that are equally long.
static inline std::vector<int64_t> runs_of(int64_t rows, const Seen& seen, int64_t limit, bool trees) {
  std::vector<int64_t> starts;
  for (int64_t r = 0; r < rows; r++) {
    bool alike = r > 0 && seen.tailed(r) == seen.tailed(r - 1) && seen.slot_offsets[r] == seen.slot_offsets[r - 1];
    bool fits = alike && (!seen.tailed(r) || (trees && seen.prefix_lens[r] == seen.prefix_lens[r - 1]));
    if (!fits || r - starts.back() >= limit) starts.push_back(r);
  }
  starts.push_back(rows);
  return starts;
}

// F for head dims whose rows go together; null for others.
#define BY_DIM(F, D, U)                                                                                               \
  ((D) == 32 ? F<32, U> : (D) == 64 ? F<64, U> : (D) == 96 ? F<96, U> : (D) == 128 ? F<128, U> :                      \
   (D) == 256 ? F<256, U> : nullptr)

static constexpr int64_t SPLIT_BYTES = 32 << 20;  // that the parts of rows may take which threads share
static constexpr int64_t UNITS = 4;                // for each thread, from which on parts are not shared out

// The softmax of a further part joins that of those before it; see States. Compiled once, for the same bits everywhere.
static __attribute__((noinline)) void join(float* to, const float* part, int64_t D) {
  float top = std::max(to[D], part[D]);
  float kept = faded(to[D], top), taken = faded(part[D], top);
  for (int64_t d = 0; d < D; d += 16) store16(to + d, load16(to + d) * kept + load16(part + d) * taken);
  to[D] = top;
  to[D + 1] = to[D + 1] * kept + part[D + 1] * taken;
}

// Rows in runs, over `heads` heads each, part by part of their positions: by a thread that takes a run and a head, or, where
// there are few of these, by threads that share out the parts. unit(i, h, begin, states): run i over head h, its part at
// `begin`. done(): once on each thread, before it does something else.
template <class T, class Unit, class Done>
static void in_parts(const std::vector<int64_t>& starts, int64_t heads, int64_t at_once, int64_t Hq, int64_t D,
                     const Seen& seen, const Sight& sight, T* out, Unit unit, Done done) {
  const int64_t runs = (int64_t)starts.size() - 1, rows = starts.back(), per = Hq / heads, state = D + 16;
  auto length_of = [&](int64_t r) { return seen.length(r); };
  auto sees = [&](int64_t r, int64_t part) { return part >= sight.first_part(length_of(r)) && part * PART < length_of(r); };
  auto first_of = [&](int64_t i) {
    int64_t first = INT64_MAX;
    for (int64_t r = starts[i]; r < starts[i + 1]; r++) first = std::min(first, sight.first_part(length_of(r)));
    return first;
  };
  auto end_of = [&](int64_t i) {
    int64_t longest = 0;
    for (int64_t r = starts[i]; r < starts[i + 1]; r++) longest = std::max(longest, length_of(r));
    return (longest + PART - 1) / PART;
  };
  auto write = [&](int64_t r, int64_t h, int64_t g, const float* from) {
    for (int64_t d = 0; d < D; d += 16) store16(out + (r * Hq + h * per + g) * D + d, load16(from + d) / from[D + 1]);
  };
  int64_t most = 0;
  for (int64_t i = 0; i < runs; i++) most = std::max(most, end_of(i));
  // In a region all threads count the same, whatever a region would begin with now.
  const int64_t threads = omp_get_level() > 0 ? omp_get_num_threads() : pl_threads(), floats = rows * Hq * state;
  const bool split = most > 1 && threads > 1 && runs * heads < UNITS * threads && floats * most * 4 <= SPLIT_BYTES;
  on_threads(runs * heads * (split ? most : 1) > 1 ? pl_threads() : 1, [&] {
    static thread_local std::vector<float> memory;
    auto room = [&](size_t size) {
      if (memory.size() < size) memory.resize(size);
      return memory.data();
    };
    if (!split) {
#pragma omp for schedule(dynamic, at_once) collapse(2)
      for (int64_t i = 0; i < runs; i++)
        for (int64_t h = 0; h < heads; h++) {
          int64_t count = starts[i + 1] - starts[i], size = count * per * state, first = first_of(i), end = end_of(i);
          float* all = room(2 * size);
          States whole = {all, per * state, state}, one = {all + size, per * state, state};
          for (int64_t part = first; part < end; part++) {
            unit(i, h, part * PART, part == first ? whole : one);
            for (int64_t r = 0; part > first && r < count; r++) {
              if (!sees(starts[i] + r, part)) continue;
              if (sees(starts[i] + r, part - 1))
                for (int64_t g = 0; g < per; g++) join(whole.at(r, g), one.at(r, g), D);
              else memcpy(whole.at(r, 0), one.at(r, 0), per * state * sizeof(float));
            }
          }
          for (int64_t r = 0; r < count; r++)
            for (int64_t g = 0; g < per; g++) write(starts[i] + r, h, g, whole.at(r, g));
        }
      done();
      return;
    }
    float* shared;
#pragma omp single copyprivate(shared)
    shared = room(floats * most);
    auto states = [&](int64_t r, int64_t h, int64_t part) {
      return States{shared + part * floats + (r * Hq + h * per) * state, Hq * state, state};
    };
    const int64_t neighbours = runs * most >= 2 * threads ? heads : 1;
#pragma omp for schedule(dynamic, neighbours) collapse(3)
    for (int64_t i = 0; i < runs; i++)
      for (int64_t part = 0; part < most; part++)
        for (int64_t h = 0; h < heads; h++)
          if (part >= first_of(i) && part < end_of(i)) unit(i, h, part * PART, states(starts[i], h, part));
    done();
#pragma omp for schedule(static) collapse(2)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t h = 0; h < heads; h++) {
        int64_t first = sight.first_part(length_of(r));
        States whole = states(r, h, first);
        for (int64_t g = 0; g < per; g++) {
          for (int64_t part = first + 1; sees(r, part); part++) join(whole.at(0, g), states(r, h, part).at(0, g), D);
          write(r, h, g, whole.at(0, g));
        }
      }
  });
}

template <class T, class U>
int attend(const T* q, const U* pool, int64_t page_size, int64_t rows, int64_t Hq, int64_t Hk, int64_t D, const Seen& seen,
           int64_t window, const float* sinks, float scale, T* out) {
  int64_t turns = 1;  // for the query heads of a KV head, at most 8 in each
  while (Hq / Hk % turns || Hq / Hk / turns > 8) turns++;
  int64_t G = Hq / Hk / turns;
  Sight sight = {window, sinks};
  auto nothing = [] {};
  // In a region all threads count the same, whatever a region would begin with now.
  const int64_t threads = omp_get_level() > 0 ? omp_get_num_threads() : pl_threads();
#if USE_ATTENTION_BLOCKS
  if constexpr (kInBlocks<T>)
    if (auto block = BY_DIM(attend_block, D, U)) {
      int64_t longest = 0;
      for (int64_t r = 0; r < rows; r++) longest = std::max(longest, seen.length(r));
      int64_t parts = (longest + PART - 1) / PART;
      // Every thread has some runs, or some parts of them.
      int64_t limit = std::max<int64_t>(1, std::min<int64_t>(BLOCK_PAIRS * Hk / Hq, rows * Hk * parts / (2 * threads)));
      std::vector<int64_t> starts = runs_of(rows, seen, limit, true);
      auto unit = [&](int64_t i, int64_t h, int64_t begin, const States& states) {
        int64_t r = starts[i];
        block(q + r * Hq * D, pool, page_size, Hq, Hk, h, seen.slots + seen.slot_offsets[r], seen.prefix_lens + r,
              starts[i + 1] - r, seen.tails, seen.tail_offsets + r, sight, scale, begin, states);
      };
      in_parts(starts, Hk, 1, Hq, D, seen, sight, out, unit, nothing);
      return 0;
    }
#endif
  auto fn = row_fn<T, U>(D, G);
  if (!fn) return 1;
#ifdef USE_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    auto run = BY_DIM(amx_attend_run, D, U);
    if (run && Hq / Hk <= 16) {
      // Some blocks for each thread, and then as many as may share a tile.
      const int64_t per = 16 / (Hq / Hk), blocks = rows * Hk / (per * UNITS * threads);
      std::vector<int64_t> starts =
          runs_of(rows, seen, per * std::min<int64_t>(RUN_BLOCKS, std::max<int64_t>(LEAST_BLOCKS, blocks)), true);
      auto unit = [&](int64_t i, int64_t h, int64_t begin, const States& states) {
        int64_t r = starts[i];
        run(q + r * Hq * D, pool, page_size, Hq, Hk, h, seen.slots + seen.slot_offsets[r], seen.prefix_lens + r,
            starts[i + 1] - r, seen.tails, seen.tail_offsets + r, sight, scale, begin, states);
      };
      in_parts(starts, Hk, 1, Hq, D, seen, sight, out, unit, [] { _tile_release(); });
      return 0;
    }
  }
#endif
  if constexpr (kCoded<U>) {
    int64_t limit = std::max<int64_t>(1, std::min<int64_t>(CODED_ROWS, rows * Hk / (2 * threads)));
    std::vector<int64_t> starts = runs_of(rows, seen, limit, true);
    auto unit = [&](int64_t i, int64_t h, int64_t begin, const States& states) {
      int64_t r = starts[i];
      fn(q + r * Hq * D, pool, page_size, Hq, Hk, h, seen.slots + seen.slot_offsets[r], seen.prefix_lens + r,
         starts[i + 1] - r, seen.tails, seen.tail_offsets + r, turns, sight, scale, begin, states);
    };
    in_parts(starts, Hk, 1, Hq, D, seen, sight, out, unit, nothing);
  } else {
    const int64_t at_once = std::min<int64_t>(4, std::max<int64_t>(1, rows * Hk * turns / 16));  // few rows go one by one
    std::vector<int64_t> starts(rows + 1);
    for (int64_t r = 0; r <= rows; r++) starts[r] = r;
    auto unit = [&](int64_t r, int64_t h, int64_t begin, const States& states) {  // G query heads, from h G on
      fn(q + (r * Hq + h * G) * D, pool, page_size, Hk, h / turns, h * G, seen.slots + seen.slot_offsets[r],
         seen.prefix_lens[r], seen.tails + seen.tail_offsets[r], seen.length(r), sight, scale, begin, states.first,
         states.step);
    };
    in_parts(starts, Hk * turns, at_once, Hq, D, seen, sight, out, unit, nothing);
  }
  return 0;
}

// U: T, or int8_t for a pool of codes.
#define DEFINE_ATTEND(NAME, T, U)                                                                                     \
  template int attend(const T*, const U*, int64_t, int64_t, int64_t, int64_t, int64_t, const Seen&, int64_t,          \
                      const float*, float, T*);                                                                       \
  extern "C" int pl_attend_##NAME(const T* q, const U* pool, int64_t page_size, int64_t rows, int64_t Hq, int64_t Hk, \
                                  int64_t D, SEEN, int64_t window, const float* sinks, float scale, T* out) {         \
    return attend(q, pool, page_size, rows, Hq, Hk, D, {slots, offsets, lens, tails, ends}, window, sinks, scale,     \
                  out);                                                                                               \
  }
