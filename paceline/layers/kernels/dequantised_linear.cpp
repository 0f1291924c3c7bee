// Linear layers over codes that are multiplied as floating numbers (float_dots.h). AMX has products of bf16 of its own:
// there a panel at a time is made dense, scales and minimums included, and multiplied like any other.
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
  if (memory.size() < needed) memory.resize(needed);
  auto rows = (typename A::Element*)memory.data();
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
  const uint8_t *tables = panel, *codes = panel + (by_groups ? 0 : tables_bytes(w));
  for (int64_t s = 0, g = 0, k = 0; s < w.slabs; s++) {
    for (int m = 0; m < M; m++) total[m][0] = total[m][1] = v16{};
    for (int64_t end = g + groups; g < end; g++) {
      const int64_t length = padded(by_groups ? group_length(w, g) : w.in_features / w.slabs);
      if (by_groups) { tables = codes; codes += tables_bytes(w); }
      v16 sum[M][2] = {};
      dot_numbers<A, M, KIND>(x.rows + row * x.stride + k, x.stride, KIND == MADE ? made : codes, length, sum);
      codes += PANEL * length * w.bits / 8;
      if (KIND == MADE) made += PANEL * length * sizeof(typename A::Element);
      k += length;
      for (int b = 0; b < 2; b++) {
        v16 scale = load_table(tables, w.half_scales, 16 * b);
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

// A panel's 32 outputs of all rows, in turns as even as they go.
template <class A, int KIND, class O>
static void panel_rows(const Matrix& w, const uint8_t* panel, const uint8_t* made, const Prepared<A>& x, int64_t M,
                       int64_t n0, O* out) {
  int64_t turns = (M + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  for (int64_t turn = 0; turn < turns; turn++) {
    int64_t row = M * turn / turns, rows = M * (turn + 1) / turns - row;
    if constexpr (ROWS_AT_ONCE == 2) {
      if (rows == 1) some_rows<1, A, KIND>(w, panel, made, x, row, n0, out);
      else some_rows<2, A, KIND>(w, panel, made, x, row, n0, out);
    } else {
      BY_ROWS(rows, (some_rows<R, A, KIND>(w, panel, made, x, row, n0, out)))
    }
  }
}

// Few rows take codes as they lie; for more of them a panel's numbers are made first.
template <class A, int KIND, class T, class O>
static void linear_codes(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out) {
  Prepared<A> rows = prepare_rows<A, KIND>(w, x, M, ldx);
  on_threads(pl_threads(), [&] {
    static thread_local std::vector<uint8_t> made;
    size_t needed = PANEL * padded(w.in_features) * sizeof(typename A::Element);
    if (M > FEW_ROWS && made.size() < needed) made.resize(needed);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels(w); p++) {
      const uint8_t* panel = (const uint8_t*)w.packed + p * panel_bytes(w);
      if (M <= FEW_ROWS) {
        panel_rows<A, KIND>(w, panel, nullptr, rows, M, p * PANEL, out);
        continue;
      }
      make_numbers<A, KIND>(w, panel, made.data());
      panel_rows<A, MADE>(w, panel, made.data(), rows, M, p * PANEL, out);
    }
  });
}

#ifdef USE_AMX
// 4 of k of 16 outputs, where a product reads them. bf16 is rounded to nearest, halves away from zero.
static inline void put_four(bf16* dense, int64_t k, const v16* y) {
  for (int pair = 0; pair < 2; pair++) {
    u16x32 low = (u16x32)y[2 * pair] + 0x8000, high = (u16x32)y[2 * pair + 1] + 0x8000;
    *(u16x32*)(dense + (k + 2 * pair) * 16) = low >> 16 | (high & 0xffff0000u);
  }
}

// dense: [2][column / 16][16], of two blocks of 16 outputs.
template <int KIND>
static void make_dense(const Matrix& w, const uint8_t* panel, bf16* dense, int64_t column) {
  constexpr int STEP = KIND == FOUR_BITS ? 8 : 4;
  const uint8_t* tables = panel;
  if (w.row_scales) panel += tables_bytes(w);
  for (int64_t g = 0; g < num_groups(w); g++) {
    if (!w.row_scales) { tables = panel; panel += tables_bytes(w); }
    for (int b = 0; b < 2; b++) {
      v16 scale = load_table(tables, w.half_scales, 16 * b);
      v16 minimum = w.has_minimums ? load_table(tables + table_bytes(w), w.half_scales, 16 * b) : v16{};
      for (int64_t k = 0; k < padded(group_length(w, g)); k += 4) {
        v16 y[4];
        Floats::decode<KIND>(panel + k / STEP * 128 + 64 * b, k % STEP, y);
        for (v16& each : y) each = each * scale + minimum;
        put_four(dense + b * column * 16, g * w.group + k, y);
      }
    }
    panel += codes_bytes(w, g);
  }
  int64_t made = padded(w.in_features);  // of a column; what follows is multiplied by zeros, but must be numbers
  for (int b = 0; b < 2 && made < column; b++)
    memset(dense + (b * column + made) * 16, 0, (column - made) * 16 * sizeof(bf16));
}

template <int KIND, class O>
static void linear_made(const Matrix& w, const bf16* x, int64_t M, int64_t ldx, O* out) {
  int64_t N = w.out_features, K = w.in_features, column = (K + 31) / 32 * 32;
  std::vector<bf16> memory;
  x = padded_rows(x, M, K, ldx, memory);
  on_threads(pl_threads(), [&] {
    Tiles tiles;
    static thread_local std::vector<bf16> dense;
    if ((int64_t)dense.size() < 2 * 16 * column) dense.resize(2 * 16 * column);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels(w); p++) {
      make_dense<KIND>(w, (const uint8_t*)w.packed + p * panel_bytes(w), dense.data(), column);
      panel_of(tiles, x, M, ldx, dense.data(), K, true, out, w.bias, p * PANEL, N, w.slabs);
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
#if defined(USE_AMX)
  linear_made<KIND>(w, x, M, ldx, out);
#elif defined(USE_AVX512BF16)
  linear_codes<Pairs, KIND>(w, x, M, ldx, out);
#else
  linear_codes<Floats, KIND>(w, x, M, ldx, out);
#endif
}

template <class T, class O>
void linear_dequantised(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out) {
  if (w.format == FLOAT8) linear_of<FLOAT8_BITS>(w, x, M, ldx, out);
  else if (w.bits == 8) linear_of<EIGHT_BITS>(w, x, M, ldx, out);
  else linear_of<FOUR_BITS>(w, x, M, ldx, out);
}

template void linear_dequantised(const Matrix&, const bf16*, int64_t, int64_t, bf16*);
template void linear_dequantised(const Matrix&, const bf16*, int64_t, int64_t, float*);
template void linear_dequantised(const Matrix&, const float*, int64_t, int64_t, float*);
