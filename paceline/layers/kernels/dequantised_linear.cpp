// Linear layers over codes that are multiplied as floating numbers (float_dots.h). With AMX, many rows are
// multiplied by tiles and few by vectors that sum as a tile does.
#include "float_dots.h"
#include "steps.h"

#if !defined(PACELINE_GENERIC) && defined(__AVX512F__)
static constexpr int ROWS_AT_ONCE = 6;  // whose sums fit the registers
#else
static constexpr int ROWS_AT_ONCE = 2;
#endif
static constexpr int64_t FEW_ROWS = 2 * ROWS_AT_ONCE;  // to make numbers of codes twice is cheaper than to keep them

template <class T>
static float sum_of(const T* x, int64_t n) {
  v16 sum = {};
  int64_t k = 0;
  for (; k + 16 <= n; k += 16) sum += load16(x + k);
  float rest = 0;
  for (; k < n; k++) rest += to_float(x[k]);
  return hsum(sum) + rest;
}

// The rows of x in memory of the calling thread's own, until its next call.
template <class A, int KIND, class T>
static Prepared<A> prepare_rows(const Matrix& w, const T* x, int64_t M, int64_t ldx) {
  static thread_local std::vector<uint8_t> memory;
  int64_t groups = w.has_minimums ? num_groups(w) : 0, K = w.in_features, stride = (K + 31) / 32 * 32;
  size_t needed = M * (stride * sizeof(typename A::Element) + groups * sizeof(float));
  auto rows = (typename A::Element*)in_lines(memory, needed);
  auto sums = (float*)(rows + M * stride);
  each_row(M, [&](int64_t m) {
    memset(rows + m * stride + K, 0, (stride - K) * sizeof *rows);
    A::template prepare<KIND>(x + m * ldx, K, rows + m * stride);
    for (int64_t g = 0; g < groups; g++) sums[m * groups + g] = sum_of(x + m * ldx + g * w.group, group_length(w, g));
  });
  return {rows, sums, stride, groups};
}

static inline v16 fused(v16 a, v16 b, v16 sum) {
#if !defined(PACELINE_GENERIC) && defined(__AVX512F__)
  return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
  return a * b + sum;
#endif
}

// A panel's 32 outputs for M rows from `row` on. made: the panel's numbers, where they are MADE.
template <int M, class A, int KIND, class O>
static void some_rows(const Matrix& w, const uint8_t* panel, const uint8_t* made, const Prepared<A>& x, int64_t row,
                      int64_t n0, O* out) {
  v16 total[M][2];
  Branches branches;
  const bool by_groups = !w.row_scales;  // with scales of whole rows, a slab is one group
  const int64_t groups = by_groups ? num_groups(w) / w.slabs : 1;
  const uint8_t *tables = panel, *codes = panel + head_bytes(w);
  for (int64_t s = 0, g = 0, k = 0; s < w.slabs; s++) {
    for (int m = 0; m < M; m++) total[m][0] = total[m][1] = v16{};
    for (int64_t end = g + groups; g < end; g++) {
      const int64_t length = padded(by_groups ? group_length(w, g) : w.in_features / w.slabs);
      if (by_groups) { tables = codes; codes += tables_bytes(w); }
      v16 sum[M][2] = {};
      const uint8_t* numbers = KIND == MADE ? made : codes;
#ifdef USE_AMX
      if constexpr (std::is_same_v<A, Alternating>)
        dot_alternating<M, KIND>(x.rows + row * x.stride + k, x.stride, numbers, length, sum);
      else
#endif
        dot_numbers<A, M, KIND>(x.rows + row * x.stride + k, x.stride, numbers, length, sum);
      codes += PANEL * length * w.bits / 8;
      if (KIND == MADE) made += PANEL * length * sizeof(typename A::Element);
      k += length;
      for (int b = 0; b < 2; b++) {
        v16 scale = float_scales(w, panel, tables, 16 * b);
        for (int m = 0; m < M; m++) total[m][b] = fused(sum[m][b], scale, total[m][b]);
        if (!w.has_minimums) continue;
        v16 minimum = load_table(tables + table_bytes(w), w.half_scales, 16 * b);
        for (int m = 0; m < M; m++) total[m][b] = fused(minimum, splat(x.sums[(row + m) * x.groups + g]), total[m][b]);
      }
    }
    if (w.slabs > 1) branches.add(w.slabs, s, total[0], 2 * M);
  }
  for (int m = 0; m < M; m++)
    for (int64_t b = 0, n = n0; b < 2 && n < w.out_features; b++, n += 16)
      store_cols(out + (row + m) * w.out_features, total[m][b], w.bias, n, w.out_features);
}

// A panel's 32 outputs of all rows.
template <class A, int KIND, class O>
static void panel_rows(const Matrix& w, const uint8_t* panel, const uint8_t* made, const Prepared<A>& x, int64_t M,
                       int64_t n0, O* out) {
  in_turns(M, ROWS_AT_ONCE, [&](int64_t row, int64_t rows) {
    if constexpr (ROWS_AT_ONCE == 2) {
      if (rows == 1) some_rows<1, A, KIND>(w, panel, made, x, row, n0, out);
      else some_rows<2, A, KIND>(w, panel, made, x, row, n0, out);
    } else {
      BY_ROWS(rows, (some_rows<R, A, KIND>(w, panel, made, x, row, n0, out)))
    }
  });
}

// Few rows take codes as they lie; for more of them a panel's numbers are made first.
template <class A, int KIND, class T, class O>
static void linear_codes(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out) {
  Prepared<A> rows = prepare_rows<A, KIND>(w, x, M, ldx);
  on_threads(pl_threads(), [&] {
    static thread_local std::vector<uint8_t> memory;
    uint8_t* made = M > FEW_ROWS ? in_lines(memory, PANEL * padded(w.in_features) * sizeof(typename A::Element)) : nullptr;
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels(w); p++) {
      const uint8_t* panel = (const uint8_t*)w.packed + p * panel_bytes(w);
      if (M <= FEW_ROWS) {
        panel_rows<A, KIND>(w, panel, nullptr, rows, M, p * PANEL, out);
        continue;
      }
      make_numbers<A, KIND>(w, panel, made);
      panel_rows<A, MADE>(w, panel, made, rows, M, p * PANEL, out);
    }
  });
}

#ifdef USE_AMX
static constexpr int64_t FEW_TILE_ROWS = 4;  // that vectors multiply sooner than tiles do

// Whether a group is of whole tiles. Others are multiplied without them, any number of rows.
static inline bool fits_tiles(const Matrix& w) {
  return w.in_features / w.slabs % 32 == 0 && (w.row_scales || w.group % 32 == 0);
}

// A panel's codes as `Pairs` multiplies them, for tiles: [2][in_features / 2][16 outputs][2 of k].
template <int KIND>
static void make_pairs(const Matrix& w, const uint8_t* panel, uint8_t* made) {
  constexpr int HALVES = in_halves(KIND) ? 2 : 1;
  uint8_t* second = made + 32 * w.in_features;
  panel += head_bytes(w);
  for (int64_t g = 0; g < num_groups(w); g++) {
    if (!w.row_scales) panel += tables_bytes(w);
    for (int64_t k = 0; k < group_length(w, g); k += 4 * HALVES, panel += 128) {
      for (int b = 0; b < 2; b++) ask_ahead(panel + 64 * b);
      for (int h = 0; h < HALVES; h++, made += 128, second += 128)
        for (int b = 0; b < 2; b++) {
          __m512i y[2];
          Pairs::decode<KIND>(panel + 64 * b, h, y);
          memcpy(b ? second : made, y, 128);
        }
    }
  }
}

// Sums of up to 32 rows (rows1: beyond 16) and a panel's 32 outputs over the groups of one slab, into total: two blocks of 16
// rows by two of 16 outputs. tables: of group `first`. made: what `make_pairs` made, from the slab's first of k on.
static void add_groups(const Matrix& w, const uint8_t* panel, const uint8_t* tables, int64_t first, const bf16* x,
                       int64_t ldx, const float* x_sums, int64_t x_groups, int rows0, int rows1, const bf16* made,
                       v16 (&total)[2][2][16]) {
  alignas(64) float sums[2][2][16][16];
  const int64_t groups = w.row_scales ? 1 : num_groups(w) / w.slabs;
  const int rows[2] = {rows0, rows1};
  memset(total, 0, sizeof total);
  before_tiles();
  for (int64_t g = 0; g < groups; g++, tables += tables_bytes(w) + codes_bytes(w, 0)) {
    _tile_zero(0); _tile_zero(1);
    if (rows1) { _tile_zero(2); _tile_zero(3); }
    const int64_t length = w.row_scales ? w.in_features / w.slabs : group_length(w, first + g);
    for (int64_t k = 0; k < length; k += 32, x += 32, made += 512) {
      _tile_loadd(4, x, ldx * 2);
      _tile_loadd(6, made, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, made + 16 * w.in_features, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (!rows1) continue;
      _tile_loadd(5, x + 16 * ldx, ldx * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0][0], 64); _tile_stored(1, sums[0][1], 64);
    if (rows1) { _tile_stored(2, sums[1][0], 64); _tile_stored(3, sums[1][1], 64); }
    for (int b = 0; b < 2; b++) {
      v16 scale = float_scales(w, panel, tables, 16 * b);
      v16 minimum = w.has_minimums ? load_table(tables + table_bytes(w), w.half_scales, 16 * b) : v16{};
      for (int r = 0; r < 2; r++)
        for (int m = 0; m < rows[r]; m++) {
          v16 sum = fused(load16(sums[r][b][m]), scale, total[r][b][m]);
          total[r][b][m] = w.has_minimums ? fused(minimum, splat(x_sums[(16 * r + m) * x_groups + g]), sum) : sum;
        }
    }
  }
}

// A panel's 32 outputs of all rows. made: the panel's codes.
template <class O>
static void panel_tiles(Tiles& tiles, const Matrix& w, const uint8_t* panel, const bf16* made, const Prepared<Pairs>& x,
                        int64_t M, int64_t n0, O* out) {
  const int64_t groups = num_groups(w) / w.slabs, width = w.in_features / w.slabs;
  const int64_t step = w.row_scales ? 0 : groups * (tables_bytes(w) + codes_bytes(w, 0));
  for (int64_t row = 0; row < M; row += 32) {
    const int rows[2] = {(int)std::min<int64_t>(16, M - row), (int)std::max<int64_t>(0, std::min<int64_t>(16, M - row - 16))};
    tiles.configure(rows[0], rows[1]);
    v16 total[2][2][16];
    Branches branches[2][2];
    for (int64_t s = 0; s < w.slabs; s++) {
      const uint8_t* tables = w.row_scales ? panel : panel + head_bytes(w) + s * step;
      add_groups(w, panel, tables, s * groups, x.rows + row * x.stride + s * width, x.stride,
                 x.sums + row * x.groups + s * groups, x.groups, rows[0], rows[1], made + 16 * s * width, total);
      for (int i = 0; w.slabs > 1 && i < 4; i++)
        if (rows[i / 2]) branches[i / 2][i % 2].add(w.slabs, s, total[i / 2][i % 2], rows[i / 2]);
    }
    for (int r = 0; r < 2; r++)
      for (int m = 0; m < rows[r]; m++)
        for (int b = 0; b < 2 && n0 + 16 * b < w.out_features; b++)
          store_cols(out + (row + 16 * r + m) * w.out_features, total[r][b][m], w.bias, n0 + 16 * b, w.out_features);
  }
}

// Denormal numbers are zeros until the end of the block, as for AMX.
struct Flushed {
  const unsigned before = _mm_getcsr();
  Flushed() { _mm_setcsr(before | 0x8040); }
  ~Flushed() { _mm_setcsr(before); }
};

template <int KIND, class O>
static void linear_few(const Matrix& w, const bf16* x, int64_t M, int64_t ldx, O* out) {
  Prepared<Alternating> rows = prepare_rows<Alternating, KIND>(w, x, M, ldx);
  on_threads(pl_threads(), [&] {
    Flushed flushed;
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels(w); p++) {
      const uint8_t* panel = (const uint8_t*)w.packed + p * panel_bytes(w);
      switch (M) {
        case 1: some_rows<1, Alternating, KIND>(w, panel, nullptr, rows, 0, p * PANEL, out); break;
        case 2: some_rows<2, Alternating, KIND>(w, panel, nullptr, rows, 0, p * PANEL, out); break;
        case 3: some_rows<3, Alternating, KIND>(w, panel, nullptr, rows, 0, p * PANEL, out); break;
        default: some_rows<4, Alternating, KIND>(w, panel, nullptr, rows, 0, p * PANEL, out);
      }
    }
  });
}

template <int KIND, class O>
static void linear_tiles(const Matrix& w, const bf16* x, int64_t M, int64_t ldx, O* out) {
  Prepared<Pairs> rows = prepare_rows<Pairs, KIND>(w, x, M, ldx);
  on_threads(pl_threads(), [&] {
    Tiles tiles;
    Flushed flushed;
    static thread_local std::vector<uint8_t> memory;
    uint8_t* made = in_lines(memory, 64 * w.in_features);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels(w); p++) {
      const uint8_t* panel = (const uint8_t*)w.packed + p * panel_bytes(w);
      make_pairs<KIND>(w, panel, made);
      panel_tiles(tiles, w, panel, (const bf16*)made, rows, M, p * PANEL, out);
    }
  });
}
#endif

template <int KIND, class O>
static void linear_of(const Matrix& w, const float* x, int64_t M, int64_t ldx, O* out) {
  linear_codes<Floats, KIND>(w, x, M, ldx, out);
}
template <int KIND, class O>
static void linear_of(const Matrix& w, const bf16* x, int64_t M, int64_t ldx, O* out) {
#ifdef USE_AMX
  if (fits_tiles(w)) {
    if (M <= FEW_TILE_ROWS) linear_few<KIND>(w, x, M, ldx, out);
    else linear_tiles<KIND>(w, x, M, ldx, out);
    return;
  }
#endif
#ifdef USE_AVX512BF16
  linear_codes<Pairs, KIND>(w, x, M, ldx, out);
#else
  linear_codes<Floats, KIND>(w, x, M, ldx, out);
#endif
}

template <class T, class O>
void linear_dequantised(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out) {
  if (w.format == FLOAT8) linear_of<FLOAT8_BITS>(w, x, M, ldx, out);
  else if (w.format == FLOAT4) linear_of<FLOAT4_BITS>(w, x, M, ldx, out);
  else if (w.bits == 8) linear_of<EIGHT_BITS>(w, x, M, ldx, out);
  else linear_of<FOUR_BITS>(w, x, M, ldx, out);
}

template void linear_dequantised(const Matrix&, const bf16*, int64_t, int64_t, bf16*);
template void linear_dequantised(const Matrix&, const bf16*, int64_t, int64_t, float*);
template void linear_dequantised(const Matrix&, const float*, int64_t, int64_t, float*);
