// Tiles of positions, shared by both kinds of attention.
#pragma once
#include "common.h"

// A row sees positions 0..length-1 of its sequence, in tiles of TILE positions counted from 0, each tile in groups of 16.
// PART positions, counted from 0 too, have a softmax of their own; those of a row are joined in their order (attention.h), so
// that threads can share a long row and a row has its bits whoever computes its parts.

static constexpr int TILE = 128, PART = 4 * TILE;

#ifdef USE_AVX512BF16
template <class Join>
static inline v16 join_each(const __m512* a, Join join) {  // element i = a[i]'s 16 elements joined, by one fixed tree
  __m512 t[8], u[4];
  for (int i = 0; i < 8; i++) t[i] = join(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    __m512d p = (__m512d)t[2 * i], q = (__m512d)t[2 * i + 1];
    u[i] = join((__m512)_mm512_unpacklo_pd(p, q), (__m512)_mm512_unpackhi_pd(p, q));
  }
  __m512 x = join(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  __m512 y = join(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return (v16)join(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}
static inline v16 sum_each(const __m512* a) {
  return join_each(a, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); });
}
static inline v16 most_each(const __m512* a) {
  return join_each(a, [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); });
}

template <class RowAt>
static inline void transpose16(RowAt row_at, bf16* out) {  // 16 x 16 pairs; row_at(i): row i, 16 pairs
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = row_at(i);
  for (int i = 0; i < 8; i++) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      a[4 * i + 2 * j] = _mm512_unpacklo_epi64(b[4 * i + j], b[4 * i + 2 + j]);
      a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(b[4 * i + j], b[4 * i + 2 + j]);
    }
  // a[4 i + c]: column c of every 128-bit lane, rows 4 i to 4 i + 3.
  for (int c = 0; c < 4; c++) {
    __m512i x0 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), x1 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    __m512i y0 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88), y1 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_storeu_si512(out + (0 + c) * 32, _mm512_shuffle_i32x4(x0, y0, 0x88));
    _mm512_storeu_si512(out + (8 + c) * 32, _mm512_shuffle_i32x4(x0, y0, 0xdd));
    _mm512_storeu_si512(out + (4 + c) * 32, _mm512_shuffle_i32x4(x1, y1, 0x88));
    _mm512_storeu_si512(out + (12 + c) * 32, _mm512_shuffle_i32x4(x1, y1, 0xdd));
  }
}
#endif
