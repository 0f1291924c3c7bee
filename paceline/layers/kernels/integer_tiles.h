// The same sums as integer_dots.h by AMX-INT8, for many rows. 16 of them are multiplied by 16 outputs of a panel, whose
// totals stay in registers from group to group. Codes are made bytes once for all rows, with a sign: their sums have no
// offsets to lose.
#pragma once
#include "blocks.h"
#include "integer_dots.h"

#if defined(USE_AMX) && defined(__AMX_INT8__)
#define USE_AMX_INT8 1

static constexpr int TILE_ROWS = 16;
static constexpr int64_t FEWEST_TILED = 32;  // rows that pay for the bytes

// Codes of k in a tile; a group is one or several tiles.
static inline int64_t tile_codes(const Matrix& w) { return w.group % 64 == 0 ? 64 : 32; }

static inline bool fits_tiles(const Matrix& w, int64_t rows) {
  return rows >= FEWEST_TILED && w.in_features % w.group == 0 && w.group % 32 == 0;
}

// A panel's codes as bytes: [2][in_features / 4][16 outputs][4 of k], of two blocks of 16 outputs.
static void make_bytes(const Matrix& w, const uint8_t* panel, uint8_t* made) {
  const __m512i lowest = _mm512_set1_epi8((char)lowest_code(w));
  auto put = [&](int b, Codes first, Codes second) {  // eight of k
    uint8_t* to = made + b * 16 * w.in_features;
    _mm512_storeu_si512(to, _mm512_add_epi8(first, lowest));
    _mm512_storeu_si512(to + 64, _mm512_add_epi8(second, lowest));
  };
  panel += head_bytes(w);
  for (int64_t g = 0; g < num_groups(w); g++) {
    if (!w.row_scales) panel += tables_bytes(w);
    for (int64_t k = 0; k < w.group && w.bits == 8; k += 4, panel += 128, made += 64)
      for (int b = 0; b < 2; b++) {
        ask_ahead(panel + 64 * b);
        _mm512_storeu_si512(made + b * 16 * w.in_features, _mm512_add_epi8(load_codes(panel + 64 * b), lowest));
      }
    for (int64_t k = 0; k < w.group && w.bits == 4; k += 8, panel += 128, made += 128)
      for (int b = 0; b < 2; b++) {
        ask_ahead(panel + 64 * b);
        Codes codes = load_codes(panel + 64 * b);
        put(b, low_halves(codes), high_halves(codes));
      }
    for (int64_t k = 0; k < w.group && w.bits == 6; k += 16, panel += 384) {
      Codes high[2] = {load_codes(panel + 256), load_codes(panel + 320)};
      for (int b = 0; b < 2; b++) {
        Codes codes = load_codes(panel + 64 * b);
        put(b, joined(low_halves(codes), high_pairs<0>(high[b])), joined(high_halves(codes), high_pairs<1>(high[b])));
      }
      made += 128;
      for (int b = 0; b < 2; b++) {
        Codes codes = load_codes(panel + 128 + 64 * b);
        put(b, joined(low_halves(codes), high_pairs<2>(high[b])), joined(high_halves(codes), high_pairs<3>(high[b])));
      }
      made += 128;
    }
  }
}

// Groups that are multiplied before the sums of one are added: a sum comes out of memory some time after a tile goes in.
static constexpr int64_t AHEAD_OF_SUMS = 2, SUMS_HELD = 4;

// One slab's groups, of 16 rows and 16 outputs, into totals; see add_group. weight: their bytes. at: the first group of the
// first row; g0: that of the slab; b: which 16 outputs of the panel.
template <bool ROW_SCALES, bool MINIMUMS>
static void add_tiles(const Matrix& w, const uint8_t* panel, int64_t g0, int b, const uint8_t* weight, const Rounded& x,
                      const int8_t* codes, int64_t at, v16 (&out)[TILE_ROWS]) {
  alignas(64) int32_t sums[SUMS_HELD][TILE_ROWS][16];
  const int64_t taken = tile_codes(w), next = tables_bytes(w) + codes_bytes(w, 0), groups = groups_of_slab(w);
  GroupTables tables = {panel + head_bytes(w) + g0 * next, panel};
  v16 total[TILE_ROWS] = {}, scale = {}, minimum = {};
  before_tiles();
  auto multiply = [&](auto odd) {  // a tile's number is written out: g++ 12 takes no name for it
    constexpr bool ODD = decltype(odd)::value;
    if (ODD) _tile_zero(1);
    else _tile_zero(0);
    for (int64_t k = 0; k < w.group; k += taken, codes += taken, weight += 16 * taken) {
      _tile_loadd(4, codes, x.stride);
      _tile_loadd(6, weight, 64);
      if (ODD) _tile_dpbssd(1, 4, 6);
      else _tile_dpbssd(0, 4, 6);
    }
  };
  for (int64_t g = 0; g < groups + AHEAD_OF_SUMS; g++) {
    if (g < groups && g % 2) {
      multiply(std::true_type());
      _tile_stored(1, sums[g % SUMS_HELD], 64);
    } else if (g < groups) {
      multiply(std::false_type());
      _tile_stored(0, sums[g % SUMS_HELD], 64);
    }
    if (g < AHEAD_OF_SUMS) continue;
    const float *scales = x.scales + at, *shifts = x.shifts + at;
    if (w.steps_span) tables.steps = panel + (g0 + g - AHEAD_OF_SUMS) / w.steps_span * steps_bytes(w);
    if (!ROW_SCALES) scale = scales_of(w, tables, 16 * b);
    if (MINIMUMS) minimum = minimums_of(w, tables, 16 * b, scale);
    const auto& held = sums[(g - AHEAD_OF_SUMS) % SUMS_HELD];
#pragma GCC unroll 16
    for (int m = 0; m < TILE_ROWS; m++) {
      v16 sum = to_floats(_mm512_load_si512(held[m]));
      total[m] = total[m] + (ROW_SCALES ? sum : sum * scale) * scales[m];
      if (MINIMUMS) total[m] = total[m] + minimum * shifts[m];
    }
    at += x.rows;
    tables.own += next;
  }
  for (int m = 0; m < TILE_ROWS; m++) out[m] = total[m];
}

// 16 rows from `row` on, of which x has memory even where there are fewer, and 16 outputs: block b of a panel, whose bytes
// are in `made`.
static void dot_tiles(const Matrix& w, const uint8_t* panel, int b, const uint8_t* made, const Rounded& x, int64_t row,
                      v16 (&total)[TILE_ROWS]) {
  const int64_t groups = groups_of_slab(w), width = groups * w.group;
  const uint8_t* weight = made + b * 16 * w.in_features;
  const int8_t* codes = x.codes + row * x.stride;
  Branches branches;
  for (int64_t s = 0, at = row; s < w.slabs; s++, at += groups * x.rows, weight += 16 * width, codes += width) {
    if (w.row_scales) add_tiles<true, false>(w, panel, s * groups, b, weight, x, codes, at, total);
    else if (w.has_minimums) add_tiles<false, true>(w, panel, s * groups, b, weight, x, codes, at, total);
    else add_tiles<false, false>(w, panel, s * groups, b, weight, x, codes, at, total);
    if (w.slabs == 1) return;
    if (w.row_scales)
      for (v16& each : total) each = each * load_table(panel, w.half_scales, 16 * b);
    branches.add(w.slabs, s, total, TILE_ROWS);
  }
}
#endif
