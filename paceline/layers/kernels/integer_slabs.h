// Slabs (blocks.h) of products of integers: each is a whole product of its own groups, scales of whole rows with it.
#pragma once
#include "blocks.h"
#include "matrix.h"

static inline int64_t groups_of_slab(const Matrix& w) { return num_groups(w) / w.slabs; }

// The totals of slab s of a panel's 32 outputs, for M rows; after the last slab they are the whole sums. With one slab
// they stay as they are, and who stores them multiplies by scales of whole rows.
template <int M>
struct Slabs {
  Branches branches[(M + 7) / 8];  // of 8 rows each
  void add(const Matrix& w, const uint8_t* panel, int64_t s, int rows, v16 (*total)[2]) {
    if (w.slabs == 1) return;
    for (int m = 0; w.row_scales && m < rows; m++)
      for (int b = 0; b < 2; b++) total[m][b] = total[m][b] * load_table(panel, w.half_scales, 16 * b);
    for (int m = 0; m < rows; m += 8) branches[m / 8].add(w.slabs, s, total[m], 2 * std::min(8, rows - m));
  }
};
