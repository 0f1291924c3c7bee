// Products of unsigned weight codes and signed activation codes, summed in int32: exact, so that every instruction set
// gives the same bits. No step saturates (vpmaddubsw would).
#pragma once
#include "integer_slabs.h"

// Codes: 64 bytes, 4 of k for each of 16 outputs. Ints: a sum for each of 16 outputs. Quad: 4 codes of a row of x.
// high_pairs: pair I of each byte's bits, on bits 4 and 5.
#if !defined(PACELINE_GENERIC) && defined(__AVX512BW__)
#define ROWS_AT_ONCE 6  // whose sums fit the registers
typedef __m512i Codes;
typedef __m512i Ints;
static inline Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline Codes low_halves(Codes c) { return _mm512_and_si512(c, _mm512_set1_epi8(15)); }
static inline Codes high_halves(Codes c) { return _mm512_and_si512(_mm512_srli_epi16(c, 4), _mm512_set1_epi8(15)); }
template <int I>
static inline Codes high_pairs(Codes c) {
  return _mm512_and_si512(I == 3 ? _mm512_srli_epi16(c, 2) : _mm512_slli_epi16(c, I == 3 ? 0 : 4 - 2 * I), _mm512_set1_epi8(48));
}
static inline Codes joined(Codes low, Codes high) { return _mm512_or_si512(low, high); }
static inline Ints splat_int(int32_t i) { return _mm512_set1_epi32(i); }
static inline v16 to_floats(Ints i) { return (v16)_mm512_cvtepi32_ps(i); }
#ifdef __AVX512VNNI__
typedef __m512i Quad;
static inline Quad make_quad(int32_t q) { return _mm512_set1_epi32(q); }
static inline Ints dot4(Ints sum, Codes c, Quad x) { return _mm512_dpbusd_epi32(sum, c, x); }
#else
struct Quad { __m512i even, odd; };  // as int16
static inline Quad make_quad(int32_t q) {
  __m512i x = _mm512_set1_epi32(q);
  return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
}
static inline Ints dot4(Ints sum, Codes c, Quad x) {
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(c, _mm512_set1_epi16(255)), x.even);
  return _mm512_add_epi32(sum, _mm512_add_epi32(even, _mm512_madd_epi16(_mm512_srli_epi16(c, 8), x.odd)));
}
#endif
#elif !defined(PACELINE_GENERIC) && defined(__AVX2__)
#define ROWS_AT_ONCE 2
struct Codes { __m256i half[2]; };
struct Quad { __m256i even, odd; };
typedef Codes Ints;
static inline Codes load_codes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
static inline __m256i low_halves(__m256i c) { return _mm256_and_si256(c, _mm256_set1_epi8(15)); }
static inline Codes low_halves(const Codes& c) { return {low_halves(c.half[0]), low_halves(c.half[1])}; }
static inline Codes high_halves(const Codes& c) {
  return {low_halves(_mm256_srli_epi16(c.half[0], 4)), low_halves(_mm256_srli_epi16(c.half[1], 4))};
}
template <int I>
static inline __m256i high_pairs(__m256i c) {
  return _mm256_and_si256(I == 3 ? _mm256_srli_epi16(c, 2) : _mm256_slli_epi16(c, I == 3 ? 0 : 4 - 2 * I), _mm256_set1_epi8(48));
}
template <int I>
static inline Codes high_pairs(const Codes& c) { return {high_pairs<I>(c.half[0]), high_pairs<I>(c.half[1])}; }
static inline Codes joined(const Codes& low, const Codes& high) {
  return {_mm256_or_si256(low.half[0], high.half[0]), _mm256_or_si256(low.half[1], high.half[1])};
}
static inline Ints splat_int(int32_t i) { return {_mm256_set1_epi32(i), _mm256_set1_epi32(i)}; }
static inline v16 to_floats(const Ints& i) {
  float f[16];
  for (int h = 0; h < 2; h++) _mm256_storeu_ps(f + 8 * h, _mm256_cvtepi32_ps(i.half[h]));
  return load16(f);
}
static inline Quad make_quad(int32_t q) {
  __m256i x = _mm256_set1_epi32(q);
  return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
}
static inline __m256i dot4(__m256i sum, __m256i c, const Quad& x) {
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(c, _mm256_set1_epi16(255)), x.even);
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, _mm256_madd_epi16(_mm256_srli_epi16(c, 8), x.odd)));
}
static inline Ints dot4(const Ints& sum, const Codes& c, const Quad& x) {
  return {dot4(sum.half[0], c.half[0], x), dot4(sum.half[1], c.half[1], x)};
}
#else
#define ROWS_AT_ONCE 2
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef u16x32 Codes;
typedef u16x32 Ints;  // adds without a sign, where wrapping around is defined
typedef int32_t Quad;
static inline Codes load_codes(const uint8_t* p) { return *(const u16x32*)p; }
static inline Codes low_halves(Codes c) { return c & 0x0f0f0f0fu; }
static inline Codes high_halves(Codes c) { return (c >> 4) & 0x0f0f0f0fu; }
template <int I>
static inline Codes high_pairs(Codes c) { return (I == 3 ? c >> 2 : c << (I == 3 ? 0 : 4 - 2 * I)) & 0x30303030u; }
static inline Codes joined(Codes low, Codes high) { return low | high; }
static inline Ints splat_int(int32_t i) { return u16x32{} + (uint32_t)i; }
static inline v16 to_floats(Ints i) { return __builtin_convertvector((i32x16)i, v16); }
static inline Quad make_quad(int32_t q) { return q; }
static inline Ints dot4(Ints sum, Codes c, Quad x) {
  for (int j = 0; j < 4; j++) sum += ((c >> (8 * j)) & 255u) * (uint32_t)(int32_t)(int8_t)((uint32_t)x >> (8 * j));
  return sum;
}
#endif

struct Rounded {  // rows as int8 codes: element k of row m is scales[m, k / group] * codes[m * stride + k]
  int8_t* codes;
  int32_t* offsets;  // below zero: what weight codes without a sign add too much to a group's sum, [groups, rows]
  float* scales;     // [groups, rows]
  float* shifts;     // sums of the codes times their scale: what minimums are multiplied by, [groups, rows]
  int64_t stride, rows;
};

static inline Quad load_quad(const int8_t* x) { int32_t q; memcpy(&q, x, 4); return make_quad(q); }

// Four of k from `k` on, of codes that are bytes.
template <int M>
static inline __attribute__((always_inline)) void dot_quads(const int8_t* x, int64_t stride, int64_t k, Codes first,
                                                            Codes second, Ints (&sum)[M][2]) {
  for (int m = 0; m < M; m++) {
    Quad quad = load_quad(x + m * stride + k);
    sum[m][0] = dot4(sum[m][0], first, quad);
    sum[m][1] = dot4(sum[m][1], second, quad);
  }
}

// The same as `dot_group` of codes of 6 bits.
template <int M>
static inline __attribute__((always_inline)) void dot_sixes(const int8_t* x, int64_t stride, const uint8_t* codes,
                                                            int64_t length, Ints (&sum)[M][2]) {
  for (int64_t k = 0; k < length; k += 16, codes += 384) {
    Codes low[4], high[2];
    for (int i = 0; i < 4; i++) { low[i] = load_codes(codes + 64 * i); ask_ahead(codes + 64 * i); }
    for (int b = 0; b < 2; b++) { high[b] = load_codes(codes + 256 + 64 * b); ask_ahead(codes + 256 + 64 * b); }
    dot_quads<M>(x, stride, k, joined(low_halves(low[0]), high_pairs<0>(high[0])),
                 joined(low_halves(low[1]), high_pairs<0>(high[1])), sum);
    dot_quads<M>(x, stride, k + 4, joined(high_halves(low[0]), high_pairs<1>(high[0])),
                 joined(high_halves(low[1]), high_pairs<1>(high[1])), sum);
    dot_quads<M>(x, stride, k + 8, joined(low_halves(low[2]), high_pairs<2>(high[0])),
                 joined(low_halves(low[3]), high_pairs<2>(high[1])), sum);
    dot_quads<M>(x, stride, k + 12, joined(high_halves(low[2]), high_pairs<3>(high[0])),
                 joined(high_halves(low[3]), high_pairs<3>(high[1])), sum);
  }
}

// Sums of one group's products, for M rows and the 32 outputs of a panel. x: the group's first code in the first row.
template <int M, int BITS>
static inline __attribute__((always_inline)) void dot_group(const int8_t* x, int64_t stride, const uint8_t* codes,
                                                            int64_t length, Ints (&sum)[M][2]) {
  if (BITS == 6) return dot_sixes<M>(x, stride, codes, length, sum);
  for (int64_t k = 0; k < length; k += 32 / BITS, codes += 128) {
    Codes first = load_codes(codes), second = load_codes(codes + 64);
    for (int b = 0; b < 2; b++) ask_ahead(codes + 64 * b, BITS == 8 && M == 1 ? ONE_ROW_AHEAD : AHEAD);
    dot_quads<M>(x, stride, k, BITS == 8 ? first : low_halves(first), BITS == 8 ? second : low_halves(second), sum);
    if (BITS == 4) dot_quads<M>(x, stride, k + 4, high_halves(first), high_halves(second), sum);
  }
}

// One group's sums of M rows into their totals, every product rounded before its sum: files that use this are compiled
// without fused multiply-adds, which not every host has. tables: the group's, unless scales are of whole rows. at: the
// group of the first row in what x has of groups.
template <int M>
static inline __attribute__((always_inline)) void add_group(const Matrix& w, GroupTables tables, const Rounded& x,
                                                            int64_t at, const Ints (&sum)[M][2], v16 (&total)[M][2]) {
  const float *scales = x.scales + at, *shifts = x.shifts + at;
  if (w.row_scales) {
    for (int m = 0; m < M; m++)
      for (int b = 0; b < 2; b++) total[m][b] = total[m][b] + to_floats(sum[m][b]) * scales[m];
    return;
  }
  v16 scale[2] = {scales_of(w, tables, 0), scales_of(w, tables, 16)};
  for (int m = 0; m < M; m++)
    for (int b = 0; b < 2; b++) total[m][b] = total[m][b] + to_floats(sum[m][b]) * scale[b] * scales[m];
  if (!w.has_minimums) return;
  v16 minimum[2] = {minimums_of(w, tables, 0, scale[0]), minimums_of(w, tables, 16, scale[1])};
  for (int m = 0; m < M; m++)
    for (int b = 0; b < 2; b++) total[m][b] = total[m][b] + minimum[b] * shifts[m];
}

// A panel's 32 outputs for M rows from `row` on; with one slab, but for scales of whole rows of the weight. The groups of a
// slab are added in their order.
template <int M, int BITS>
static inline __attribute__((always_inline)) void dot_panel(const Matrix& w, const uint8_t* panel, const Rounded& x,
                                                            int64_t row, v16 (&total)[M][2]) {
  const uint8_t *codes = panel + head_bytes(w), *steps = panel;
  int64_t left = w.steps_span;  // groups of the run
  Slabs<M> slabs;
  for (int64_t s = 0, g = 0; s < w.slabs; s++) {
    for (int m = 0; m < M; m++) total[m][0] = total[m][1] = v16{};
    for (int64_t end = g + groups_of_slab(w); g < end; codes += codes_bytes(w, g), g++) {
      const GroupTables tables = {codes, steps};
      if (!w.row_scales) {
        for (int64_t i = 0; i < tables_bytes(w); i += 64) ask_ahead(codes + i);
        codes += tables_bytes(w);
      }
      if (w.steps_span && --left == 0) { left = w.steps_span; steps += steps_bytes(w); }
      const int64_t at = g * x.rows + row;
      Ints sum[M][2];
      for (int m = 0; m < M; m++) sum[m][0] = sum[m][1] = splat_int(x.offsets[at + m]);
      dot_group<M, BITS>(x.codes + row * x.stride + g * w.group, x.stride, codes, padded(group_length(w, g)), sum);
      add_group<M>(w, tables, x, at, sum, total);
    }
    slabs.add(w, panel, s, M, total);
  }
}
