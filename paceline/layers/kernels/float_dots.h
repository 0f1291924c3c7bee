// Products of codes with numbers, for codes that are multiplied as floats. A code is multiplied as the whole number,
// float8 or float4 that it is, exactly. A group of k is summed from zero in the order of k; where bf16 is multiplied in pairs, they
// are (0, 2), (1, 3) of each four. Then groups are added in their order: total += sum * scale, total += sum of x *
// minimum, each fused. Neither the number of rows nor how codes are read changes a bit.
#pragma once
#include "blocks.h"
#include "matrix.h"

enum Kind { EIGHT_BITS, FOUR_BITS, FLOAT8_BITS, FLOAT4_BITS, MADE };  // MADE: numbers that lie in memory as a product takes them

static constexpr bool in_halves(int kind) { return kind == FOUR_BITS || kind == FLOAT4_BITS; }  // two codes in a byte

typedef int32_t i32x16 __attribute__((vector_size(64)));

// Bits of a bf16 that is the float8 of these 7 bits: e4m3fn, whose exponent's bias is 7 where bf16 has 127.
static constexpr uint16_t float8_bits(int magnitude) {
  int exponent = magnitude >> 3, mantissa = magnitude & 7;
  if (magnitude == 0x7f) return 0x7fc0;
  if (exponent == 0 && mantissa == 0) return 0;
  for (exponent = exponent ? exponent : 1; magnitude < 8 && mantissa < 8; exponent--) mantissa *= 2;
  return (uint16_t)((exponent + 120) << 7 | (mantissa & 7) << 4);
}

// One of k at a time.
struct Floats {
  typedef float Element;  // of prepared rows
  typedef v16 Lanes;      // TAKEN of k, of 16 outputs
  static constexpr int TAKEN = 1;

  static v16 add(v16 sum, v16 y, const float* x) { return sum + y * *x; }

  static v16 float8_number(u16x32 byte) {
    u16x32 bits = byte & 0x7f;
    v16 size = (v16)(bits << 20) * 0x1p120f;
    size = bits == 0x7f ? splat(NAN) : size;
    return (v16)((u16x32)size | (byte & 0x80) << 24);
  }
  // e2m1, whose exponent's bias is 1. code: in the low 4 bits, and what does not count above.
  static v16 float4_number(u16x32 code) {
    v16 size = (v16)((code & 7) << 22) * 0x1p126f;
    return (v16)((u16x32)size | (code & 8) << 28);
  }
  // Four of k: those of 64 bytes, or their low halves, or their high ones.
  template <int KIND>
  static inline __attribute__((always_inline)) void decode(const uint8_t* codes, bool high, v16 (&y)[4]) {
    u16x32 bytes = *(const u16x32*)codes;
    constexpr int BITS = in_halves(KIND) ? 4 : 8;
    for (int j = 0; j < 4; j++) {
      if (KIND == MADE) y[j] = load16((const float*)codes + 16 * j);
      else if (KIND == FLOAT8_BITS) y[j] = float8_number(bytes >> (8 * j));
      else if (KIND == FLOAT4_BITS) y[j] = float4_number(bytes >> (8 * j + 4 * high));
      else {  // codes lie without a sign: it is put where it was, and the code to the top
        u16x32 with_sign = bytes ^ (BITS == 4 ? 0x88888888u : 0x80808080u);
        y[j] = __builtin_convertvector((i32x16)(with_sign << (32 - BITS - 8 * j - 4 * high)) >> (32 - BITS), v16);
      }
    }
  }
  template <int KIND, class T>
  static void prepare(const T* x, int64_t n, float* out) {
    for (int64_t k = 0; k < n; k++) out[k] = to_float(x[k]);
  }
};

#ifdef USE_AVX512BF16
struct Float8Table {
  alignas(64) uint16_t bits[128];
  constexpr Float8Table() : bits() { for (int i = 0; i < 128; i++) bits[i] = float8_bits(i); }
};
static constexpr Float8Table float8_table;
struct UpperHalves {  // of the lanes of two vectors: a lane of the first, then that of the second above it
  alignas(64) uint16_t places[32];
  constexpr UpperHalves() : places() { for (int i = 0; i < 32; i++) places[i] = (uint16_t)((i | 1) + i % 2 * 32); }
};
static constexpr UpperHalves upper_halves;
// -8 to 7, twice: the bit above an index of 4 bits does not count.
alignas(64) static constexpr uint16_t four_bits_table[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
    0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
    0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and the same below zero, twice.
alignas(64) static constexpr uint16_t float4_table[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
    0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
    0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

// Pairs of bf16. A lane's bytes are 4 of k: its two even bytes make a pair, and its two odd bytes.
struct Pairs {
  typedef bf16 Element;
  typedef __m512i Lanes;
  static constexpr int TAKEN = 2;

  static v16 add(v16 sum, __m512i y, const bf16* x) {
    uint32_t pair; memcpy(&pair, x, 4);
    return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)y);
  }

  // signs: those of the codes in bit 15; codes: in the low 7 bits of 16, and what does not count above.
  static inline __m512i float8_numbers(__m512i codes, __m512i signs) {
    const uint16_t* table = float8_table.bits;
    __m512i low = _mm512_permutex2var_epi16(_mm512_load_si512(table), codes, _mm512_load_si512(table + 32));
    __m512i high = _mm512_permutex2var_epi16(_mm512_load_si512(table + 64), codes, _mm512_load_si512(table + 96));
    __m512i size = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40)), high);
    return _mm512_ternarylogic_epi32(signs, _mm512_set1_epi16((short)0x8000), size, 0xea);  // signs & mask | size
  }
  // Byte j of each lane on top of it, as a float: 2^24 times what it is.
  static inline __m512i whole_number(__m512i bytes, int j) {
    const int from = j << 24 | 0x808080, next = 0x04000000;  // 0x80: a zero
    __m512i places = _mm512_broadcast_i32x4(_mm_setr_epi32(from, from + next, from + 2 * next, from + 3 * next));
    return (__m512i)_mm512_cvtepi32_ps(_mm512_shuffle_epi8(bytes, places));
  }
  template <int KIND>
  static inline __attribute__((always_inline)) void decode(const uint8_t* codes, bool high, __m512i (&y)[2]) {
    __m512i bytes = _mm512_loadu_si512(codes);
    if constexpr (KIND == MADE) {
      y[0] = bytes;
      y[1] = _mm512_loadu_si512(codes + 64);
    } else if constexpr (in_halves(KIND)) {
      __m512i table = _mm512_load_si512(KIND == FOUR_BITS ? four_bits_table : float4_table);
      y[0] = _mm512_permutexvar_epi16(high ? _mm512_srli_epi16(bytes, 4) : bytes, table);
      y[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, high ? 12 : 8), table);
    } else if constexpr (KIND == FLOAT8_BITS) {
      y[0] = float8_numbers(bytes, _mm512_slli_epi16(bytes, 8));
      y[1] = float8_numbers(_mm512_srli_epi16(bytes, 8), bytes);
    } else {  // 8 bits fit a bf16
      __m512i with_sign = _mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80));
      __m512i upper = _mm512_load_si512(upper_halves.places);
      y[0] = _mm512_permutex2var_epi16(whole_number(with_sign, 0), upper, whole_number(with_sign, 2));
      y[1] = _mm512_permutex2var_epi16(whole_number(with_sign, 1), upper, whole_number(with_sign, 3));
    }
  }
  // x as codes of KIND are multiplied with it: those of 8 bits are 2^24 times too large, which saves shifts.
  template <int KIND>
  static void prepare(const bf16* x, int64_t n, bf16* out) {
    const __m512 factor = _mm512_set1_ps(KIND == EIGHT_BITS ? 0x1p-24f : 1.0f);
    for (int64_t k = 0; k < n; k += 32) {
      __m512i row = _mm512_maskz_loadu_epi16(n - k < 32 ? (1u << (n - k)) - 1 : ~0u, x + k);
      __m512i even = (__m512i)_mm512_mul_ps((__m512)_mm512_slli_epi32(row, 16), factor);
      __m512i odd = (__m512i)_mm512_mul_ps((__m512)_mm512_and_si512(row, _mm512_set1_epi32(0xffff0000)), factor);
      row = _mm512_permutex2var_epi16(even, _mm512_load_si512(upper_halves.places), odd);
      _mm512_storeu_si512(out + k, _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(row, 0xd8), 0xd8));
    }
  }
};
#endif

#ifdef USE_AMX
// The products of an AMX tile, for few rows, to the same bits: tdpbf16ps sums the first and the second elements of 16 pairs
// apart from zero, each fused, and adds both to what it has. Pairs are those of `Pairs`. Files that use it flush denormal
// numbers, as AMX does.
struct Alternating {
  typedef float Element;

  // Four of k as `Pairs` has them, as floats: of the first pair, then of the second.
  template <int KIND>
  static inline __attribute__((always_inline)) void decode(const uint8_t* codes, bool high, v16 (&y)[4]) {
    if constexpr (KIND == EIGHT_BITS) {
      __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(codes), _mm512_set1_epi8((char)0x80));
      constexpr int order[4] = {0, 2, 1, 3};
      for (int i = 0; i < 4; i++) y[i] = (v16)Pairs::whole_number(bytes, order[i]);
    } else {
      __m512i pairs[2];
      Pairs::decode<KIND>(codes, high, pairs);
      for (int i = 0; i < 2; i++) {
        y[2 * i] = (v16)_mm512_slli_epi32(pairs[i], 16);
        y[2 * i + 1] = (v16)_mm512_and_si512(pairs[i], _mm512_set1_epi32(0xffff0000));
      }
    }
  }
  template <int KIND>
  static void prepare(const bf16* x, int64_t n, float* out) {
    for (int64_t k = 0; k < n; k += 32) {
      alignas(64) bf16 some[32];
      Pairs::prepare<KIND>(x + k, std::min<int64_t>(32, n - k), some);
      for (int i = 0; i < 32; i += 16) store16(out + k + i, load16(some + i));
    }
  }
};

// See dot_numbers, for a length of whole tiles.
template <int M, int KIND>
static inline __attribute__((always_inline)) void dot_alternating(const float* x, int64_t stride, const uint8_t* codes,
                                                                  int64_t length, v16 (&sum)[M][2]) {
  constexpr int HALVES = in_halves(KIND) ? 2 : 1;
  for (int64_t tile = 0; tile < length; tile += 32) {
    __m512 sums[2][M][2] = {};
    for (int64_t k = tile; k < tile + 32; k += 4 * HALVES, codes += 128) {
      for (int b = 0; b < 2; b++) ask_ahead(codes + 64 * b);
      for (int h = 0; h < HALVES; h++)
        for (int b = 0; b < 2; b++) {
          v16 y[4];
          Alternating::decode<KIND>(codes + 64 * b, h, y);
          for (int i = 0; i < 4; i++)
            for (int m = 0; m < M; m++) {
              __m512& each = sums[i % 2][m][b];
              each = _mm512_fmadd_ps((__m512)y[i], _mm512_set1_ps(x[m * stride + k + 4 * h + i]), each);
            }
        }
    }
    for (int m = 0; m < M; m++)
      for (int b = 0; b < 2; b++) sum[m][b] = sum[m][b] + (v16)_mm512_add_ps(sums[0][m][b], sums[1][m][b]);
  }
}
#endif

template <class A>
struct Prepared {  // rows as ``A`` multiplies them
  const typename A::Element* rows;  // zeros follow a row's end, up to a multiple of 8
  const float* sums;                // of each group of a row, [rows, groups]: what minimums are multiplied by
  int64_t stride, groups;
};

// Sums of one group's products, for M rows and the 32 outputs of a panel. x: the group's first element of the first
// row.
template <class A, int M, int KIND>
static inline __attribute__((always_inline)) void dot_numbers(const typename A::Element* x, int64_t stride,
                                                              const uint8_t* codes, int64_t length, v16 (&sum)[M][2]) {
  constexpr int COUNT = 4 / A::TAKEN, HALVES = in_halves(KIND) ? 2 : 1, BYTES = KIND == MADE ? 64 * COUNT : 64;
  for (int64_t k = 0; k < length; k += 4 * HALVES, codes += 2 * BYTES) {
    for (int b = 0; KIND != MADE && b < 2; b++) ask_ahead(codes + 64 * b);
    for (int h = 0; h < HALVES; h++) {
      typename A::Lanes y[2][COUNT];
      for (int b = 0; b < 2; b++) A::template decode<KIND>(codes + b * BYTES, h, y[b]);
      for (int i = 0; i < COUNT; i++)
        for (int m = 0; m < M; m++)
          for (int b = 0; b < 2; b++) sum[m][b] = A::add(sum[m][b], y[b][i], x + m * stride + k + 4 * h + i * A::TAKEN);
    }
  }
}

// A panel's codes as numbers in memory, groups one after another.
template <class A, int KIND>
static void make_numbers(const Matrix& w, const uint8_t* panel, uint8_t* made) {
  constexpr int COUNT = 4 / A::TAKEN, HALVES = in_halves(KIND) ? 2 : 1;
  panel += head_bytes(w);
  for (int64_t g = 0; g < num_groups(w); g++) {
    if (!w.row_scales) panel += tables_bytes(w);
    for (int64_t k = 0; k < padded(group_length(w, g)); k += 4 * HALVES, panel += 128) {
      for (int b = 0; b < 2; b++) ask_ahead(panel + 64 * b);
      for (int h = 0; h < HALVES; h++)
        for (int b = 0; b < 2; b++, made += 64 * COUNT) {
          typename A::Lanes y[COUNT];
          A::template decode<KIND>(panel + 64 * b, h, y);
          memcpy(made, y, 64 * COUNT);
        }
    }
  }
}
