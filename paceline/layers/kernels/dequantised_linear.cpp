// Linear layers over codes that are multiplied as floating numbers: a panel at a time is made dense, in the order of
// blocks.h, and multiplied like any other. Each element is rounded to T once, whatever rows there are.
#include "blocks.h"
#include "steps.h"

// Codes of one byte in the low bits of each lane.
static inline v16 number(u16x32 byte, int64_t format, float offset) {
  typedef int32_t i32x16 __attribute__((vector_size(64)));
  if (format != FLOAT8) return __builtin_convertvector((i32x16)byte, v16) - offset;
  v16 size = (v16)((byte & 0x7f) << 20) * 0x1p120f;  // e4m3fn: the exponent's bias is 7, a float's 127
  size = (byte & 0x7f) == 0x7f ? splat(NAN) : size;
  return (v16)((u16x32)size | (byte & 0x80) << 24);
}

// k and k + 1 of 16 outputs, where a product of T reads them.
static inline void put_pair(bf16* dense, int64_t K, int64_t k, v16 even, v16 odd) {
  (void)K;
  u16x32 low = (u16x32)even, high = (u16x32)odd;
  low = (low + 0x7fff + ((low >> 16) & 1)) >> 16;
  high = (high + 0x7fff + ((high >> 16) & 1)) & 0xffff0000u;
  *(u16x32*)(dense + k * 16) = low | high;
}
static inline void put_pair(float* dense, int64_t K, int64_t k, v16 even, v16 odd) {
  if (k < K) store16(dense + k * 16, even);
  if (k + 1 < K) store16(dense + (k + 1) * 16, odd);
}

// 4 of k, from the bytes of 16 outputs' codes.
template <class T>
static inline void put_four(T* dense, int64_t K, int64_t k, const Matrix& w, u16x32 bytes, v16 scale, v16 minimum) {
  float offset = w.bits == 8 ? 128.0f : 8.0f;
  v16 y[4];
  for (int j = 0; j < 4; j++) y[j] = number((bytes >> (8 * j)) & 255u, w.format, offset) * scale + minimum;
  put_pair(dense, K, k, y[0], y[1]);
  put_pair(dense, K, k + 2, y[2], y[3]);
}

// dense: [2][column / 16 of T][16], of two blocks of 16 outputs.
template <class T>
static void make_dense(const Matrix& w, const uint8_t* panel, T* dense, int64_t column) {
  const uint8_t* tables = panel;
  if (w.row_scales) panel += tables_bytes(w);
  for (int64_t g = 0; g < num_groups(w); panel += codes_bytes(w, g), g++) {
    if (!w.row_scales) { tables = panel; panel += tables_bytes(w); }
    int64_t first = g * w.group, length = padded(group_length(w, g));
    for (int b = 0; b < 2; b++) {
      T* block = dense + b * column * 16;
      v16 scale = load_table(tables, w.half_scales, 16 * b);
      v16 minimum = w.has_minimums ? load_table(tables + table_bytes(w), w.half_scales, 16 * b) : v16{};
      const uint8_t* codes = panel + 64 * b;
      for (int64_t k = first; k < first + length; codes += 128) {
        u16x32 bytes = *(const u16x32*)codes;
        if (w.bits == 8) {
          put_four(block, w.in_features, k, w, bytes, scale, minimum);
          k += 4;
        } else {
          put_four(block, w.in_features, k, w, bytes & 0x0f0f0f0fu, scale, minimum);
          put_four(block, w.in_features, k + 4, w, (bytes >> 4) & 0x0f0f0f0fu, scale, minimum);
          k += 8;
        }
      }
    }
  }
}

template <class T, class O>
void linear_dequantised(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out) {
  constexpr bool is_bf16 = std::is_same_v<T, bf16>;
  int64_t N = w.out_features, K = w.in_features, column = is_bf16 ? (K + 31) / 32 * 32 : K;
  std::vector<bf16> memory;
  if constexpr (is_bf16) x = padded_rows(x, M, K, ldx, memory);
#pragma omp parallel num_threads(pl_threads())
  {
    Tiles tiles;
    std::vector<T> dense(2 * 16 * column);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels(w); p++) {
      make_dense(w, (const uint8_t*)w.packed + p * panel_bytes(w), dense.data(), column);
      panel_of(tiles, x, M, ldx, dense.data(), K, true, out, w.bias, p * PANEL, N);
    }
  }
}

template void linear_dequantised(const Matrix&, const bf16*, int64_t, int64_t, bf16*);
template void linear_dequantised(const Matrix&, const bf16*, int64_t, int64_t, float*);
template void linear_dequantised(const Matrix&, const float*, int64_t, int64_t, float*);
