// The steps that a decoder layer is made of, each in the file of its name; T is bf16 or float.
#pragma once
#include "matrix.h"

// In a parallel region, all of whose threads call it alike, a product or attention is shared out among them and ends when all
// are done. Elsewhere each has a region of its own. What else is here runs on the thread that calls it, or for many rows in
// a region of its own.

// out = x W^T + b. x: M rows at stride ldx. T: bf16 or float; O: T, or float for the sums themselves.
template <class T, class O>
void linear(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out);

// The same for each format (matrix.h) but the dense.
template <class T, class O>
void linear_integer(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out);
template <class T, class O>
void linear_dequantised(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out);

// y = norm(x) * weight; with residual: residual += x first (rounded to T), y = norm(residual) * weight. W: T, or float where a
// result is rounded once, after the weight.
template <class T, class W>
void rms_norm(const T* x, T* residual, const W* weight, int64_t rows, int64_t n, float eps, T* y);

// out = silu(gate) * up, of n elements of a row; a row may be cut at multiples of 16.
template <class T>
void silu_run(const T* gate, const T* up, int64_t n, T* out);

// Rotates q into q_out and k into the pool, where v goes too.
template <class T>
void rope_write(const T* q, const T* k, const T* v, int64_t ldq, int64_t ldk, int64_t ldv, int64_t rows, int64_t Hq,
                int64_t Hk, int64_t D, const float* table, const int64_t* positions, const int64_t* slots,
                int64_t page_size, T* q_out, T* pool);

// What each row sees: positions in its list of slots, then in its tail.
struct Seen {
  const int32_t* slots;
  const int64_t* slot_offsets;  // [rows]
  const int32_t *prefix_lens, *tails;
  const int64_t* tail_offsets;  // [rows + 1]

  bool tailed(int64_t r) const { return tail_offsets[r + 1] > tail_offsets[r]; }
  int64_t length(int64_t r) const { return prefix_lens[r] + tail_offsets[r + 1] - tail_offsets[r]; }
};
#define SEEN const int32_t *slots, const int64_t *offsets, const int32_t *lens, const int32_t *tails, const int64_t *ends

// A row sees the last `window` positions up to its own, or all where that is 0; sinks: a score of each query head that takes
// its share of the softmax, or null. U: T, or int8_t where the pool keeps codes (kv_rows.h). Returns 1, with nothing done, for
// a geometry that has no kernel.
template <class T, class U>
int attend(const T* q, const U* pool, int64_t page_size, int64_t rows, int64_t Hq, int64_t Hk, int64_t D, const Seen& seen,
           int64_t window, const float* sinks, float scale, T* out);

// Rounds keys, then values, [2, count, Hk, D], into a pool of codes.
template <class T>
void round_rows(const T* rows, int64_t count, int64_t Hk, int64_t D, const int64_t* slots, int64_t page_size, int8_t* pool);

// Rotate-half rope of `heads` heads of D elements, rows at stride ld, by table[position] = D/2 cosines, D/2 sines.
template <class T>
static inline void rope_row(const T* in, int64_t heads, int64_t D, const float* table, T* out) {
  int64_t half = D / 2;
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = 0; i < half; i++) {
      float a = to_float(in[h * D + i]), b = to_float(in[h * D + half + i]), c = table[i], s = table[half + i];
      put(out + h * D + i, a * c - b * s);
      put(out + h * D + half + i, b * c + a * s);
    }
}
