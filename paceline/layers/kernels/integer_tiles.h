// The same sums as integer_dots.h by AMX-INT8, for weights of 8 bits and many rows. Nobody has run this file on a processor
// that has AMX: it was tried with its instructions written out (tests/layers/test_quantized.py).
#pragma once
#include "blocks.h"
#include "integer_dots.h"

#if defined(USE_AMX) && defined(__AMX_INT8__)
#define USE_AMX_INT8 1

static constexpr int TILE_CODES = 64;  // of k, in a tile

static inline bool fits_tiles(const Matrix& w, int64_t rows) {
  return rows >= 8 && w.bits == 8 && w.in_features % TILE_CODES == 0 && w.group % TILE_CODES == 0;
}

// Up to 16 rows from `row` on; see dot_panel.
static void dot_panel_tiles(Tiles& tiles, const Matrix& w, const uint8_t* panel, const Rounded& x, int64_t row, int rows,
                            v16 (*total)[1][2]) {
  alignas(64) int32_t sums[2][16][16];
  tiles.configure(rows, 0);
  const uint8_t* codes = panel + (w.row_scales ? tables_bytes(w) : 0);
  Slabs<16> slabs;
  for (int64_t s = 0, g = 0; s < w.slabs; s++) {
    for (int m = 0; m < rows; m++) total[m][0][0] = total[m][0][1] = v16{};
    for (int64_t end = g + groups_of_slab(w); g < end; codes += codes_bytes(w, g), g++) {
      const uint8_t* tables = codes;
      if (!w.row_scales) codes += tables_bytes(w);
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t k = 0; k < group_length(w, g); k += TILE_CODES) {
        _tile_loadd(4, x.codes + row * x.stride + g * w.group + k, x.stride);
        _tile_loadd(6, codes + k * PANEL, 4 * PANEL);
        _tile_loadd(7, codes + k * PANEL + 64, 4 * PANEL);
        _tile_dpbsud(0, 4, 6);  // signed by unsigned
        _tile_dpbsud(1, 4, 7);
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      for (int m = 0; m < rows; m++) {
        const int64_t at = (row + m) * x.groups + g;
        Ints offset = splat_int(x.offsets[at]), sum[1][2];
        for (int b = 0; b < 2; b++) sum[0][b] = _mm512_add_epi32(offset, _mm512_load_si512(sums[b][m]));
        add_group<1>(w, tables, x, at, sum, total[m]);
      }
    }
    slabs.add(w, panel, s, rows, total[0]);
  }
}
#endif
