// Tiles of positions, shared by both kinds of attention.
#pragma once
#include "common.h"

// A row sees positions 0..length-1 of its sequence, in tiles of TILE positions counted from 0, each tile in groups of 16.

static constexpr int TILE = 128;

#ifdef USE_AVX512BF16
static inline v16 sum_each(const __m512* a) {  // element i = sum of a[i]'s 16 elements, one fixed tree
  __m512 t[8], u[4];
  for (int i = 0; i < 8; i++) t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    __m512d p = (__m512d)t[2 * i], q = (__m512d)t[2 * i + 1];
    u[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(p, q), (__m512)_mm512_unpackhi_pd(p, q));
  }
  __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return (v16)_mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}
#endif
