// KV rows of 8 bits. A head's row is D codes and one float32 scale behind them: D + 4 bytes, of one token, K and V each. The
// file rounds after every operation, so that all instruction sets and torch write the same bits.
#include <cfloat>

#include "kv_rows.h"
#include "steps.h"

// scale = largest / 127, codes to nearest even. A row of zeros, or one whose scale would be subnormal, has scale 0 and codes 0.
template <class T>
static void round_row(const T* row, int64_t D, int8_t* out) {
  float largest = 0;
  for (int64_t d = 0; d < D; d++) largest = std::max(largest, std::fabs(to_float(row[d])));
  float scale = largest / 127.0f;
  if (scale < FLT_MIN) scale = 0;
  memcpy(out + D, &scale, SCALE_BYTES);
  for (int64_t d = 0; d < D; d++) {
    float code = scale > 0.0f ? std::nearbyint(to_float(row[d]) / scale) : 0.0f;
    out[d] = (int8_t)std::min(127.0f, std::max(-127.0f, code));
  }
}

// rows: [2, count, Hk, D], keys, then values. pages: [num_pages, 2, page_size, Hk, D + 4].
template <class T>
void round_rows(const T* rows, int64_t count, int64_t Hk, int64_t D, const int64_t* slots, int64_t page_size, int8_t* pages) {
  int64_t width = Hk * (D + SCALE_BYTES);
  each_row(count, [&](int64_t r) {
    int8_t* key = pages + (slots[r] / page_size * 2 * page_size + slots[r] % page_size) * width;
    for (int64_t h = 0; h < Hk; h++) {
      round_row(rows + (r * Hk + h) * D, D, key + h * (D + SCALE_BYTES));
      round_row(rows + ((count + r) * Hk + h) * D, D, key + page_size * width + h * (D + SCALE_BYTES));
    }
  });
}

#define DEFINE_KV(NAME, T)                                                                                              \
  template void round_rows(const T*, int64_t, int64_t, int64_t, const int64_t*, int64_t, int8_t*);                     \
  extern "C" void pl_kv8_write_##NAME(const T* rows, int64_t count, int64_t Hk, int64_t D, const int64_t* slots,        \
                                      int64_t page_size, int8_t* pages) {                                               \
    round_rows(rows, count, Hk, D, slots, page_size, pages);                                                            \
  }
DEFINE_KV(bf16, bf16)
DEFINE_KV(f32, float)
