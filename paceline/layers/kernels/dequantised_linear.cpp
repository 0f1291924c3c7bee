// Linear layers over codes that are multiplied as floating numbers: a panel at a time is made dense, in the order of
// blocks.h, and multiplied like any other. Each element is rounded to T once, whatever rows there are.
#include "blocks.h"
#include "steps.h"

typedef int32_t i32x16 __attribute__((vector_size(64)));

// The numbers of byte j of each lane, of codes with a sign: in the whole byte, or in its low half.
template <int BITS>
static inline v16 number(u16x32 bytes, int j) {
  return __builtin_convertvector((i32x16)(bytes << (32 - BITS - 8 * j)) >> (32 - BITS), v16);
}

static inline v16 float8_number(u16x32 bytes, int j) {  // e4m3fn: the exponent's bias is 7, a float's 127
  u16x32 byte = bytes >> (8 * j), bits = byte & 0x7f;
  v16 size = (v16)(bits << 20) * 0x1p120f;
  size = bits == 0x7f ? splat(NAN) : size;
  return (v16)((u16x32)size | (byte & 0x80) << 24);
}

// 4 of k of 16 outputs, where a product of T reads them. bf16 is rounded to nearest, halves away from zero.
static inline void put_four(bf16* dense, int64_t, int64_t k, const v16 (&y)[4]) {
  for (int pair = 0; pair < 2; pair++) {
    u16x32 low = (u16x32)y[2 * pair] + 0x8000, high = (u16x32)y[2 * pair + 1] + 0x8000;
    *(u16x32*)(dense + (k + 2 * pair) * 16) = low >> 16 | (high & 0xffff0000u);
  }
}
static inline void put_four(float* dense, int64_t K, int64_t k, const v16 (&y)[4]) {
  for (int j = 0; j < 4 && k + j < K; j++) store16(dense + (k + j) * 16, y[j]);
}

// A group of 16 outputs. codes: 64 bytes of every 128.
template <int BITS, bool FLOAT, class T>
static void make_group(const uint8_t* codes, int64_t K, int64_t first, int64_t length, v16 scale, v16 minimum, T* dense) {
  const uint32_t sign = FLOAT ? 0 : BITS == 8 ? 0x80808080u : 0x88888888u;  // integer codes lie without one
  for (int64_t k = first; k < first + length; k += 32 / BITS, codes += 128) {
    u16x32 bytes = *(const u16x32*)codes ^ sign;
    v16 y[4];
    for (int j = 0; j < 4; j++) y[j] = (FLOAT ? float8_number(bytes, j) : number<BITS>(bytes, j)) * scale + minimum;
    put_four(dense, K, k, y);
    if (BITS == 8) continue;
    for (int j = 0; j < 4; j++) y[j] = number<BITS>(bytes >> 4, j) * scale + minimum;
    put_four(dense, K, k + 4, y);
  }
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
      if (w.format == FLOAT8) make_group<8, true>(codes, w.in_features, first, length, scale, minimum, block);
      else if (w.bits == 8) make_group<8, false>(codes, w.in_features, first, length, scale, minimum, block);
      else make_group<4, false>(codes, w.in_features, first, length, scale, minimum, block);
    }
  }
  int64_t made = padded(w.in_features);  // of a column; what follows is multiplied by zeros, but must be numbers
  for (int b = 0; b < 2 && made < column; b++)
    memset(dense + (b * column + made) * 16, 0, (column - made) * 16 * sizeof(T));
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
    static thread_local std::vector<T> dense;
    if ((int64_t)dense.size() < 2 * 16 * column) dense.resize(2 * 16 * column);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels(w); p++) {
      make_dense(w, (const uint8_t*)w.packed + p * panel_bytes(w), dense.data(), column);
      panel_of(tiles, x, M, ldx, dense.data(), K, true, out, w.bias, p * PANEL, N, w.slabs);
    }
  }
}

template void linear_dequantised(const Matrix&, const bf16*, int64_t, int64_t, bf16*);
template void linear_dequantised(const Matrix&, const bf16*, int64_t, int64_t, float*);
template void linear_dequantised(const Matrix&, const float*, int64_t, int64_t, float*);
