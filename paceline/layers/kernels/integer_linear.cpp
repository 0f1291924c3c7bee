// Linear layers whose products are made of integers (docs/internals/exactness.md). Compiled without fused
// multiply-adds: every instruction set gives the bits of quantized_reference.py.
#include "integer_tiles.h"
#include "steps.h"

static constexpr float LEAST_PEAK = 1e-30f;  // rows below it are zeros: 127 / peak stays finite

static inline uint32_t bits_of(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16), aligned(1), may_alias));

static constexpr int64_t HELD = 4;  // vectors of a group that stay in registers while it is rounded

#if !defined(PACELINE_GENERIC) && defined(__AVX512F__)
static inline int32_t largest(i32x16 x) { return _mm512_reduce_max_epi32((__m512i)x); }
static inline int32_t added(i32x16 x) { return _mm512_reduce_add_epi32((__m512i)x); }
static inline void put_codes(int8_t* codes, i32x16 x) { _mm_storeu_si128((__m128i*)codes, _mm512_cvtepi32_epi8((__m512i)x)); }
#else
static inline int32_t largest(i32x16 x) {
  int32_t top = x[0];
  for (int i = 1; i < 16; i++) top = std::max(top, x[i]);
  return top;
}
static inline int32_t added(i32x16 x) {
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += x[i];
  return sum;
}
static inline void put_codes(int8_t* codes, i32x16 x) { *(i8x16*)codes = __builtin_convertvector(x, i8x16); }
#endif

// What becomes of a group whose largest |x| has the bits `top`: its scale, and whether that is all.
static inline bool only_scale(uint32_t top, float* scale, float* factor) {
  float peak; memcpy(&peak, &top, 4);
  bool none = top >= 0x7f800000u || peak < LEAST_PEAK;
  *scale = top >= 0x7f800000u ? NAN : none ? 0.0f : peak / 127.0f;
  *factor = none ? 0.0f : 127.0f / peak;
  return none;
}

// `round_group` of N vectors.
template <int N, class T>
static inline int32_t round_held(const T* x, float* scale, int8_t* codes) {
  v16 held[N];
  i32x16 tops = {}, sums = {};
  for (int i = 0; i < N; i++) {
    held[i] = load16(x + 16 * i);
    i32x16 size = (i32x16)((u16x32)held[i] & 0x7fffffffu);
    tops = size > tops ? size : tops;
  }
  float factor;
  if (only_scale(largest(tops), scale, &factor)) { memset(codes, 0, 16 * N); return 0; }
  for (int i = 0; i < N; i++) {
    i32x16 rounded = (i32x16)((u16x32)(held[i] * factor + 12582912.0f) << 24) >> 24;
    put_codes(codes + 16 * i, rounded);
    sums += rounded;
  }
  return added(sums);
}

// A group of a row to codes: x * (127 / peak), rounded half to even. One with a NaN or an infinity gets the scale NaN.
// Returns the sum of the codes.
template <class T>
static int32_t round_group(const T* x, int64_t length, float* scale, int8_t* codes) {
  if (length == 16 * HELD) return round_held<HELD>(x, scale, codes);
  if (length == 32) return round_held<2>(x, scale, codes);
  const int64_t whole = length / 16 * 16;
  i32x16 tops = {};
  for (int64_t k = 0; k < whole; k += 16) {
    i32x16 size = (i32x16)((u16x32)load16(x + k) & 0x7fffffffu);
    tops = size > tops ? size : tops;
  }
  uint32_t top = largest(tops);  // of the bits of |x|, which are ordered as the numbers are, NaN on top
  for (int64_t k = whole; k < length; k++) top = std::max(top, bits_of(to_float(x[k])) & 0x7fffffffu);
  float factor;
  if (only_scale(top, scale, &factor)) { memset(codes, 0, length); return 0; }
  i32x16 sums = {};
  for (int64_t k = 0; k < whole; k += 16) {  // the sum's last bits are the rounded number, in two's complement
    i32x16 rounded = (i32x16)((u16x32)(load16(x + k) * factor + 12582912.0f) << 24) >> 24;
    put_codes(codes + k, rounded);
    sums += rounded;
  }
  int32_t sum = added(sums);
  for (int64_t k = whole; k < length; k++) {
    int8_t code = (int8_t)(uint8_t)bits_of(to_float(x[k]) * factor + 12582912.0f);
    codes[k] = code;
    sum += code;
  }
  return sum;
}

// The rows of x in memory of the calling thread's own, until its next call.
template <class T>
static Rounded round_rows(const Matrix& w, const T* x, int64_t M, int64_t ldx) {
  static thread_local std::vector<uint8_t> memory;
  int64_t groups = num_groups(w), stride = (w.in_features + 63) / 64 * 64, rows = (M + 15) / 16 * 16;  // tiles read 16
  int8_t* codes = (int8_t*)in_lines(memory, rows * (stride + 12 * groups));
  float *scales = (float*)(codes + rows * stride), *shifts = scales + rows * groups;
  Rounded out = {codes, (int32_t*)(shifts + rows * groups), scales, shifts, stride, rows};
  each_row(M, [&](int64_t m) {
    int8_t* row = out.codes + m * stride;
    memset(row + w.in_features, 0, stride - w.in_features);
    for (int64_t g = 0, k = 0, at = m; g < groups; g++, k += w.group, at += rows) {
      int32_t sum = round_group(x + m * ldx + k, group_length(w, g), out.scales + at, row + k);
      out.offsets[at] = lowest_code(w) * sum;
      out.shifts[at] = (float)sum * out.scales[at];
    }
  });
  return out;
}

// panel: its first table is of scales of whole rows, where the weight has them; slabs have taken them already.
template <class O>
static inline void store_row(const Matrix& w, const uint8_t* panel, const v16 (&total)[2], int64_t n0, O* out) {
  const float* bias = w.bias;
  for (int b = 0; b < 2; b++, n0 += 16) {
    v16 y = w.row_scales && w.slabs == 1 ? total[b] * load_table(panel, w.half_scales, 16 * b) : total[b];
    if (n0 + 16 <= w.out_features) {
      store16(out + n0, bias ? y + load16(bias + n0) : y);
      continue;
    }
    float t[16];
    store16(t, y);
    for (int64_t i = 0; i < w.out_features - n0; i++) put(out + n0 + i, bias ? t[i] + bias[n0 + i] : t[i]);
  }
}

template <int M, class O>
static void some_rows(const Matrix& w, const uint8_t* panel, const Rounded& x, int64_t row, int64_t n0, O* out) {
  v16 total[M][2];
  if (w.bits == 8) dot_panel<M, 8>(w, panel, x, row, total);
  else if (w.bits == 6) dot_panel<M, 6>(w, panel, x, row, total);
  else dot_panel<M, 4>(w, panel, x, row, total);
  for (int m = 0; m < M; m++) store_row(w, panel, total[m], n0, out + (row + m) * w.out_features);
}

template <class O>
static void all_rows(Tiles& tiles, const Matrix& w, const uint8_t* panel, const Rounded& x, int64_t M, int64_t n0, O* out) {
#ifdef USE_AMX_INT8
  if (fits_tiles(w, M)) {
    static thread_local std::vector<uint8_t> memory;
    uint8_t* made = in_lines(memory, PANEL * w.in_features);
    make_bytes(w, panel, made);
    tiles.configure(TILE_ROWS, 0, tile_codes(w));
    v16 total[2][TILE_ROWS];
    for (int64_t row = 0; row < M; row += TILE_ROWS) {
      for (int b = 0; b < 2; b++) dot_tiles(w, panel, b, made, x, row, total[b]);
      for (int m = 0; m < std::min<int64_t>(TILE_ROWS, M - row); m++) {
        v16 both[2] = {total[0][m], total[1][m]};
        store_row(w, panel, both, n0, out + (row + m) * w.out_features);
      }
    }
    return;
  }
#endif
  (void)tiles;
  in_turns(M, ROWS_AT_ONCE, [&](int64_t row, int64_t rows) {
    switch (rows) {
      case 1: some_rows<1>(w, panel, x, row, n0, out); break;
#if ROWS_AT_ONCE == 2
      default: some_rows<2>(w, panel, x, row, n0, out);
#else
      case 2: some_rows<2>(w, panel, x, row, n0, out); break;
      case 3: some_rows<3>(w, panel, x, row, n0, out); break;
      case 4: some_rows<4>(w, panel, x, row, n0, out); break;
      case 5: some_rows<5>(w, panel, x, row, n0, out); break;
      default: some_rows<6>(w, panel, x, row, n0, out);
#endif
    }
  });
}

template <class T, class O>
void linear_integer(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out) {
  Rounded rows = round_rows(w, x, M, ldx);
  on_threads(pl_threads(), [&] {
    Tiles tiles;
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels(w); p++)
      all_rows(tiles, w, (const uint8_t*)w.packed + p * panel_bytes(w), rows, M, p * PANEL, out);
  });
}

template void linear_integer(const Matrix&, const bf16*, int64_t, int64_t, bf16*);
template void linear_integer(const Matrix&, const bf16*, int64_t, int64_t, float*);
template void linear_integer(const Matrix&, const float*, int64_t, int64_t, float*);
