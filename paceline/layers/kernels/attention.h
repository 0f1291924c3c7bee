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

template <class T, class U>
int attend(const T* q, const U* pool, int64_t page_size, int64_t rows, int64_t Hq, int64_t Hk, int64_t D, const Seen& seen,
           int64_t window, const float* sinks, float scale, T* out) {
  int64_t parts = 1;  // of the query heads of a KV head, each at most 8
  while (Hq / Hk % parts || Hq / Hk / parts > 8) parts++;
  int64_t G = Hq / Hk / parts;
  Sight sight = {window, sinks};
  auto fn = row_fn<T, U>(D, G);
  if (!fn) return 1;
#ifdef USE_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    auto run = BY_DIM(amx_attend, D, U);
    if (run && Hq / Hk <= 16) {
      run(q, pool, page_size, runs_of(rows, seen, RUN_BLOCKS * (16 / (Hq / Hk)), true), Hq, Hk, seen, sight, scale, out);
      return 0;
    }
  }
#endif
  auto attend_one = [&](int64_t r, int64_t h) {  // part h of the query heads of row r
    if constexpr (!kCoded<U>) {
      int64_t tail = seen.tail_offsets[r + 1] - seen.tail_offsets[r];
      fn(q + (r * Hq + h * G) * D, pool, page_size, Hk, h / parts, h * G, seen.slots + seen.slot_offsets[r],
         seen.prefix_lens[r], seen.tails + seen.tail_offsets[r], seen.prefix_lens[r] + tail, sight, scale,
         out + (r * Hq + h * G) * D);
    }
  };
  auto attend_run = [&](int64_t r, int64_t end, int64_t h) {  // rows r..end-1 over KV head h
    if constexpr (kCoded<U>)
      fn(q + r * Hq * D, pool, page_size, Hq, Hk, h, seen.slots + seen.slot_offsets[r], seen.prefix_lens + r, end - r,
         seen.tails, seen.tail_offsets + r, parts, sight, scale, out + r * Hq * D);
    else
      for (; r < end; r++)
        for (int64_t part = 0; part < parts; part++) attend_one(r, h * parts + part);
  };
  // Every thread has some runs. In a region all of them count the same, whatever a region would begin with now.
  int64_t threads = omp_get_level() > 0 ? omp_get_num_threads() : pl_threads();
#ifdef USE_ATTENTION_BLOCKS
  if constexpr (std::is_same_v<T, bf16>) {
    auto block = BY_DIM(attend_block, D, U);
    int64_t least = std::max<int64_t>(2, (BLOCK_PAIRS + Hq / Hk - 1) / (Hq / Hk));  // rows that pay for laying keys out
    int64_t limit = std::min<int64_t>(BLOCK_ROWS, rows * Hk / (4 * threads));
    std::vector<int64_t> starts = {rows};
    if (block && limit >= least) starts = runs_of(rows, seen, limit, kCoded<U>);
    int64_t runs = (int64_t)starts.size() - 1;
    auto pays = [&](int64_t i) { return starts[i + 1] - starts[i] >= least && !seen.tailed(starts[i]); };
    bool any = false;
    for (int64_t i = 0; i < runs; i++) any |= pays(i);
    if (any) {
      on_threads(pl_threads(), [&] {
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t i = 0; i < runs; i++)
          for (int64_t h = 0; h < Hk; h++) {
            int64_t r = starts[i];
            if (pays(i))
              block(q + r * Hq * D, pool, page_size, Hq, Hk, h, seen.slots + seen.slot_offsets[r], seen.prefix_lens + r,
                    starts[i + 1] - r, sight, scale, out + r * Hq * D);
            else attend_run(r, starts[i + 1], h);
          }
      });
      return 0;
    }
  }
#endif
  if constexpr (kCoded<U>) {
    int64_t limit = std::max<int64_t>(1, std::min<int64_t>(CODED_ROWS, rows * Hk / (2 * threads)));
    std::vector<int64_t> starts = runs_of(rows, seen, limit, true);
    int64_t runs = (int64_t)starts.size() - 1;
    on_threads(runs * Hk > 1 ? pl_threads() : 1, [&] {
#pragma omp for schedule(dynamic, 1) collapse(2)
      for (int64_t i = 0; i < runs; i++)
        for (int64_t h = 0; h < Hk; h++) attend_run(starts[i], starts[i + 1], h);
    });
  } else {
    const int64_t at_once = std::min<int64_t>(4, std::max<int64_t>(1, rows * Hk * parts / 16));  // few rows go one by one
    on_threads(rows * Hk > 1 ? pl_threads() : 1, [&] {
#pragma omp for schedule(dynamic, at_once) collapse(2)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < Hk * parts; h++) attend_one(r, h);
    });
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
