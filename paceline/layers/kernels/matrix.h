// The weight of a linear layer: a dense matrix, or codes with scales. How each lies in memory.
//
// Dense: blocks.h. Codes: panels of 32 output features, each in the order in which a product reads it. A panel has tables
// (32 scales, then 32 minimums where the matrix has any) and codes for each group of the inner dimension, group after
// group; where a scale holds for a whole row, the table lies once, before the first group, and there are no minimums. Where
// a scale is a step times a whole number, tables are of whole numbers, and before the first group lie the steps (32 of
// scales, then 32 of minimums) of each run of `steps_span` groups. Where a scale is a float8 and a number of the output
// together (`numbers`), tables are of float8, and the 32 numbers lie before the first group. Codes of 8 bits:
// [k/4][32 outputs][4 of k]. Codes of 4 bits: [k/8][32 outputs][4], where the low halves of the bytes are the first four of
// k and the high halves the next four. Codes of 6 bits: for each 16 of k, their low halves like codes of 4 bits, then
// [32 outputs][4], where bits 2i and 2i + 1 of byte j are the high ones of k = 4i + j. A group is padded to a multiple of
// 8. Integer codes lie as code + 128, code + 32 or code + 8, so that they have no sign; codes that stand for a float8 or a
// float4 lie as its bits.
#pragma once
#include "common.h"
#if !defined(PACELINE_GENERIC) && defined(__x86_64__)
#include <immintrin.h>
#endif

enum Format : int64_t { DENSE = 0, INTEGER = 1, DEQUANTISED = 2, FLOAT8 = 3, FLOAT4 = 4 };
enum Numbers : int64_t { NONE = 0, TIMES = 1, OVER = 2 };  // a scale is a float8 times, or over, the number of its output

struct Matrix {  // of packed.py, field by field
  int64_t out_features, in_features;
  int64_t format;
  int64_t bits;          // of a code: 4 or 8; 6 of integers in groups of whole 16
  int64_t group;         // elements of a row, and of a row of x, that are added as integers
  int64_t row_scales;    // whether a row has one scale for all of its groups, and no minimum
  int64_t half_scales;   // whether scales and minimums are float16 in memory; else float
  int64_t has_minimums;
  int64_t steps_span;    // groups whose scales, int8 in memory, share a step in float16; 0: scales are numbers
  int64_t from_lowest;   // whether a minimum lies as the number of code -8, 8 scales below it
  int64_t numbers;       // see Numbers; only for FLOAT4
  int64_t slabs;         // runs of the inner dimension, of whole groups, that are added in a tree (blocks.h)
  const void* packed;
  const float* bias;  // or null
};

static constexpr int PANEL = 32;

static inline int64_t padded(int64_t length) { return (length + 7) / 8 * 8; }
static inline int64_t num_panels(const Matrix& w) { return (w.out_features + PANEL - 1) / PANEL; }
static inline int64_t num_groups(const Matrix& w) { return (w.in_features + w.group - 1) / w.group; }
static inline int64_t group_length(const Matrix& w, int64_t g) { return std::min(w.group, w.in_features - g * w.group); }
static inline int64_t table_bytes(const Matrix& w) {
  return PANEL * (w.steps_span || w.numbers ? 1 : w.half_scales ? 2 : 4);
}
static inline int64_t tables_bytes(const Matrix& w) { return table_bytes(w) * (w.has_minimums ? 2 : 1); }
static inline int64_t steps_bytes(const Matrix& w) { return PANEL * (w.has_minimums ? 4 : 2); }  // of one run
// What lies in a panel before its first group.
static inline int64_t head_bytes(const Matrix& w) {
  if (w.row_scales) return tables_bytes(w);
  if (w.numbers) return PANEL * sizeof(float);
  return w.steps_span ? (num_groups(w) + w.steps_span - 1) / w.steps_span * steps_bytes(w) : 0;
}
static inline int64_t lowest_code(const Matrix& w) { return -(1 << (w.bits - 1)); }
static inline int64_t codes_bytes(const Matrix& w, int64_t g) { return PANEL * padded(group_length(w, g)) * w.bits / 8; }
static inline int64_t panel_bytes(const Matrix& w) {
  int64_t last = num_groups(w) - 1;
  return head_bytes(w) + (w.row_scales ? 0 : last + 1) * tables_bytes(w) + last * codes_bytes(w, 0) + codes_bytes(w, last);
}

// float16 to float without instructions for it; finite numbers.
static inline v16 halves_to_floats(u16x32 halves) {
  v16 size = (v16)((halves & 0x7fff) << 13) * 0x1p112f;
  return (v16)((u16x32)size | (halves & 0x8000) << 16);
}
// 16 scales or minimums from `i` on.
static inline v16 load_table(const uint8_t* table, bool half, int i) {
  if (!half) return load16((const float*)table + i);
#if !defined(PACELINE_GENERIC) && defined(__AVX512F__)
  return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(table + 2 * i)));
#else
  return halves_to_floats(__builtin_convertvector(*(const h16*)(table + 2 * i), u16x32));
#endif
}

// 16 float8 without a sign as float16, which has their digits: each is 2^-8 of what it was.
static inline v16 load_float8(const uint8_t* table, int i) {
#if !defined(PACELINE_GENERIC) && defined(__AVX512F__)
  return (v16)_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(table + i))), 7));
#else
  typedef uint8_t u8x16 __attribute__((vector_size(16), aligned(1), may_alias));
  return halves_to_floats(__builtin_convertvector(*(const u8x16*)(table + i), u16x32) << 7);
#endif
}

// 16 whole numbers of a table that has steps.
static inline v16 load_whole(const uint8_t* table, int i) {
#if !defined(PACELINE_GENERIC) && defined(__AVX512F__)
  return (v16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(table + i))));
#else
  typedef int8_t i8x16 __attribute__((vector_size(16), aligned(1), may_alias));
  return __builtin_convertvector(*(const i8x16*)(table + i), v16);
#endif
}

// Where a group's tables lie, and the steps of its run.
struct GroupTables { const uint8_t *own, *steps; };

// Scales of 16 outputs from `i` on. A step times a whole number is exact: 11 bits times 8.
static inline v16 scales_of(const Matrix& w, GroupTables at, int i) {
  if (w.steps_span) return load_whole(at.own, i) * load_table(at.steps, true, i);
  return load_table(at.own, w.half_scales, i);
}
static inline v16 minimums_of(const Matrix& w, GroupTables at, int i, v16 scale) {
  const uint8_t* own = at.own + table_bytes(w);
  v16 minimum = w.steps_span ? load_whole(own, i) * load_table(at.steps + 2 * PANEL, true, i) : load_table(own, w.half_scales, i);
  return w.from_lowest ? minimum + scale * 8.0f : minimum;
}
// Scales of 16 outputs from `i` on, of codes that are multiplied as floats. panel: its beginning, with numbers that are 2^8
// times what they were (TIMES), or 2^-8: all is rounded once, as if the scale had been made before.
static inline v16 float_scales(const Matrix& w, const uint8_t* panel, const uint8_t* table, int i) {
  if (!w.numbers) return load_table(table, w.half_scales, i);
  v16 scale = load_float8(table, i), number = load16((const float*)panel + i);
  return w.numbers == TIMES ? scale * number : scale / number;
}
