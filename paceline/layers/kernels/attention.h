// Attention over a paged pool, grouped query heads. Each element type has a file of its own, to be compiled beside the other.
#pragma once
#include "attention_amx.h"
#include "attention_block.h"
#include "attention_row.h"

// Where runs of rows begin that may go together, and the end of the last: rows without tails, neighbours of one sequence.
static inline std::vector<int64_t> runs_of(int64_t rows, const int64_t* slot_offsets, const int64_t* tail_offsets, int64_t limit) {
  std::vector<int64_t> starts;
  auto tailed = [&](int64_t r) { return tail_offsets[r + 1] > tail_offsets[r]; };
  for (int64_t r = 0; r < rows; r++) {
    bool joins = r > 0 && !tailed(r) && !tailed(r - 1) && slot_offsets[r] == slot_offsets[r - 1] && r - starts.back() < limit;
    if (!joins) starts.push_back(r);
  }
  starts.push_back(rows);
  return starts;
}

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
  auto attend_one = [&](int64_t r, int64_t h) {  // part h of the query heads of row r
    int64_t tail = tail_offsets[r + 1] - tail_offsets[r];
    fn(q + (r * Hq + h * G) * D, pool, page_size, Hk, h / parts, h * G, slots + slot_offsets[r], prefix_lens[r],
       tails + tail_offsets[r], prefix_lens[r] + tail, sight, scale, out + (r * Hq + h * G) * D);
  };
#ifdef USE_ATTENTION_BLOCKS
  if constexpr (std::is_same_v<T, bf16>) {
    auto block = D == 32 ? attend_block<32> : D == 64 ? attend_block<64> : D == 96 ? attend_block<96> :
                 D == 128 ? attend_block<128> : D == 256 ? attend_block<256> : nullptr;
    int64_t least = std::max<int64_t>(2, (BLOCK_PAIRS + Hq / Hk - 1) / (Hq / Hk));  // rows that pay for laying keys out
    // Every thread has some runs. In a region all of them count the same, whatever a region would begin with now.
    int64_t threads = omp_get_level() > 0 ? omp_get_num_threads() : pl_threads();
    int64_t limit = std::min<int64_t>(BLOCK_ROWS, rows * Hk / (4 * threads));
    std::vector<int64_t> starts = {rows};
    if (block && limit >= least) starts = runs_of(rows, slot_offsets, tail_offsets, limit);
    int64_t runs = (int64_t)starts.size() - 1, most = 0;
    for (int64_t i = 0; i < runs; i++) most = std::max(most, starts[i + 1] - starts[i]);
    if (most >= least) {
      on_threads(pl_threads(), [&] {
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t i = 0; i < runs; i++)
          for (int64_t h = 0; h < Hk; h++) {
            int64_t r = starts[i], count = starts[i + 1] - r;
            if (count >= least)
              block(q + r * Hq * D, pool, page_size, Hq, Hk, h, slots + slot_offsets[r], prefix_lens + r, count, sight,
                    scale, out + r * Hq * D);
            else
              for (; r < starts[i + 1]; r++)
                for (int64_t part = 0; part < parts; part++) attend_one(r, h * parts + part);
          }
      });
      return 0;
    }
  }
#endif
  const int64_t at_once = std::min<int64_t>(4, std::max<int64_t>(1, rows * Hk * parts / 16));  // few rows go one by one
  on_threads(rows * Hk > 1 ? pl_threads() : 1, [&] {
#pragma omp for schedule(dynamic, at_once) collapse(2)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t h = 0; h < Hk * parts; h++) attend_one(r, h);
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
