// Codes, scales and minimums into panels (matrix.h).
#include "matrix.h"

static void pack_codes(const Matrix& w, const uint8_t* codes, int64_t n0, int64_t g, uint8_t* out) {
  int64_t length = group_length(w, g), first = g * w.group;
  uint8_t offset = w.format == FLOAT8 ? 0 : (uint8_t)-lowest_code(w);
  auto code = [&](int64_t n, int64_t k) -> uint8_t {
    bool inside = n0 + n < w.out_features && k < length;
    return inside ? (uint8_t)(codes[(n0 + n) * w.in_features + first + k] + offset) : offset;
  };
  // [32 outputs][4] bytes from k on, each made by `byte` of an output and a k.
  auto put = [&](int64_t k, auto byte) {
    for (int64_t n = 0; n < PANEL; n++)
      for (int64_t j = 0; j < 4; j++) *out++ = (uint8_t)byte(n, k + j);
  };
  auto halves = [&](int64_t n, int64_t k) { return (code(n, k) & 15) | code(n, k + 4) << 4; };
  auto pairs = [&](int64_t n, int64_t k) {
    int byte = 0;
    for (int i = 0; i < 4; i++) byte |= code(n, k + 4 * i) >> 4 << (2 * i);
    return byte;
  };
  for (int64_t k = 0; k < padded(length); k += w.bits == 8 ? 4 : w.bits == 4 ? 8 : 16) {
    if (w.bits == 8) { put(k, code); continue; }
    put(k, halves);
    if (w.bits == 6) { put(k + 8, halves); put(k, pairs); }
  }
}

// values: [out_features, 1 or groups], of the type that the table has.
template <class V>
static void pack_table(const Matrix& w, const V* values, int64_t n0, int64_t g, V* out) {
  int64_t columns = w.row_scales ? 1 : num_groups(w);
  for (int64_t n = 0; n < PANEL; n++) out[n] = n0 + n < w.out_features ? values[(n0 + n) * columns + g] : 0;
}
static void pack_table(const Matrix& w, const void* values, int64_t n0, int64_t g, uint8_t* out) {
  if (w.half_scales) pack_table(w, (const uint16_t*)values, n0, g, (uint16_t*)out);
  else pack_table(w, (const float*)values, n0, g, (float*)out);
}

// values: whole numbers, int8 [out_features, groups].
static void pack_whole(const Matrix& w, const int8_t* values, int64_t n0, int64_t g, uint8_t* out) {
  for (int64_t n = 0; n < PANEL; n++) out[n] = n0 + n < w.out_features ? (uint8_t)values[(n0 + n) * num_groups(w) + g] : 0;
}

// Steps of a panel's runs. scales, minimums (or null): float16 [out_features, runs].
static void pack_steps(const Matrix& w, const uint16_t* scales, const uint16_t* minimums, int64_t n0, uint16_t* out) {
  int64_t runs = head_bytes(w) / steps_bytes(w);
  for (int64_t r = 0; r < runs; r++)
    for (const uint16_t* values : {scales, minimums})
      for (int64_t n = 0; values && n < PANEL; n++) *out++ = n0 + n < w.out_features ? values[(n0 + n) * runs + r] : 0;
}

// Numbers of a panel's outputs. values: [out_features].
static void pack_numbers(const Matrix& w, const float* values, int64_t n0, float* out) {
  for (int64_t n = 0; n < PANEL; n++) out[n] = n0 + n < w.out_features ? values[n0 + n] : 1;
}

extern "C" {

int64_t pl_panels_bytes(const Matrix* w) { return num_panels(*w) * panel_bytes(*w); }

// codes: a byte each, [out_features, in_features]; scales, minimums (or null): [out_features, 1 or groups], whole numbers
// where the matrix has steps; those: [out_features, runs] each; numbers, where it has them: [out_features].
void pl_pack_panels(const Matrix* w, const uint8_t* codes, const void* scales, const void* minimums,
                    const uint16_t* scale_steps, const uint16_t* minimum_steps, const float* numbers, uint8_t* out) {
#pragma omp parallel for schedule(static) num_threads(pl_threads())
  for (int64_t p = 0; p < num_panels(*w); p++) {
    uint8_t* at = out + p * panel_bytes(*w);
    if (w->steps_span) {
      pack_steps(*w, scale_steps, minimum_steps, p * PANEL, (uint16_t*)at);
      at += head_bytes(*w);
    }
    if (w->numbers) {
      pack_numbers(*w, numbers, p * PANEL, (float*)at);
      at += head_bytes(*w);
    }
    for (int64_t g = 0; g < num_groups(*w); at += codes_bytes(*w, g), g++) {
      if (w->steps_span || w->numbers) {
        pack_whole(*w, (const int8_t*)scales, p * PANEL, g, at);
        if (minimums) pack_whole(*w, (const int8_t*)minimums, p * PANEL, g, at + table_bytes(*w));
        at += tables_bytes(*w);
      } else if (g == 0 || !w->row_scales) {
        pack_table(*w, scales, p * PANEL, g, at);
        if (minimums) pack_table(*w, minimums, p * PANEL, g, at + table_bytes(*w));
        at += tables_bytes(*w);
      }
      pack_codes(*w, codes, p * PANEL, g, at);
    }
  }
}
}
