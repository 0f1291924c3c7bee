// Linear layers over packed weights.
#include "blocks.h"
#include "steps.h"

// 16 rows of a matrix [N, K] from n0 on, of 16 words from k0 on, to words [16 of k][16 of n], with zeros beyond N. A word
// is a float, as many as there are before K, or a pair of bf16, with zeros beyond K. Each row is read in one go: rows of
// a large power of two share a set of the cache, which does not hold 16 of them.
template <class Word, class T>
static void pack_block(const T* w, int64_t N, int64_t K, int64_t n0, int64_t k0, T* out) {
  constexpr int64_t EACH = sizeof(Word) / sizeof(T);
  Word rows[16][16] = {};
  int64_t height = std::min<int64_t>(16, N - n0), width = std::min(16 * EACH, K - k0);
  for (int64_t n = 0; n < height; n++) memcpy(rows[n], w + (n0 + n) * K + k0, width * sizeof(T));
  for (int64_t p = 0; p < (EACH == 1 ? width : 16); p++)
    for (int64_t n = 0; n < 16; n++) memcpy(out + (p * 16 + n) * EACH, &rows[n][p], sizeof(Word));
}

extern "C" {

int64_t pl_packed_elems(int64_t N, int64_t K, int is_bf16) {
  int64_t n = (N + 15) / 16, k = is_bf16 ? (K + 31) / 32 * 32 : K;
  return n * 16 * k;
}

void pl_pack_bf16(const bf16* w, int64_t N, int64_t K, bf16* out) {
  int64_t KB = (K + 31) / 32;
#pragma omp parallel for schedule(static) num_threads(pl_threads())
  for (int64_t nb = 0; nb < (N + 15) / 16; nb++)
    for (int64_t kb = 0; kb < KB; kb++) pack_block<uint32_t>(w, N, K, nb * 16, kb * 32, out + (nb * KB + kb) * 512);
}

void pl_pack_f32(const float* w, int64_t N, int64_t K, float* out) {
#pragma omp parallel for schedule(static) num_threads(pl_threads())
  for (int64_t nb = 0; nb < (N + 15) / 16; nb++)
    for (int64_t k = 0; k < K; k += 16) pack_block<float>(w, N, K, nb * 16, k, out + (nb * K + k) * 16);
}
}

template <class T, class O>
static void linear_dense(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out) {
  constexpr bool is_bf16 = std::is_same_v<T, bf16>;
  int64_t N = w.out_features, K = w.in_features, column = is_bf16 ? (K + 31) / 32 * 32 : K;
  std::vector<bf16> memory;
  if constexpr (is_bf16) x = padded_rows(x, M, K, ldx, memory);
  on_threads(pl_threads(), [&] {
    Tiles tiles;
#pragma omp for schedule(static)
    for (int64_t n0 = 0; n0 < N; n0 += PANEL)
      panel_of(tiles, x, M, ldx, (const T*)w.packed + n0 * column, K, n0 + 16 < N, out, w.bias, n0, N, w.slabs);
  });
}

template <class T, class O>
void linear(const Matrix& w, const T* x, int64_t M, int64_t ldx, O* out) {
  if (w.format == DENSE) linear_dense(w, x, M, ldx, out);
  else if (w.format == INTEGER) linear_integer(w, x, M, ldx, out);
  else linear_dequantised(w, x, M, ldx, out);
}

template void linear(const Matrix&, const bf16*, int64_t, int64_t, bf16*);
template void linear(const Matrix&, const bf16*, int64_t, int64_t, float*);
template void linear(const Matrix&, const float*, int64_t, int64_t, float*);

extern "C" {

void pl_linear_bf16(const Matrix* w, const bf16* x, int64_t M, int64_t ldx, void* out, int out_f32) {
  if (out_f32) linear(*w, x, M, ldx, (float*)out);
  else linear(*w, x, M, ldx, (bf16*)out);
}

void pl_linear_f32(const Matrix* w, const float* x, int64_t M, int64_t ldx, float* out, int) {
  linear(*w, x, M, ldx, out);
}
}
