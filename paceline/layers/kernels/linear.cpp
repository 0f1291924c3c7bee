// Linear layers over packed weights.
#include "blocks.h"
#include "steps.h"

extern "C" {

int64_t pl_packed_elems(int64_t N, int64_t K, int is_bf16) {
  int64_t n = (N + 15) / 16, k = is_bf16 ? (K + 31) / 32 * 32 : K;
  return n * 16 * k;
}

void pl_pack_bf16(const bf16* w, int64_t N, int64_t K, bf16* out) {
  int64_t KB = (K + 31) / 32;
#pragma omp parallel for schedule(static) num_threads(pl_threads())
  for (int64_t nb = 0; nb < (N + 15) / 16; nb++)
    for (int64_t kb = 0; kb < KB; kb++)
      for (int p = 0; p < 16; p++)
        for (int n = 0; n < 16; n++)
          for (int j = 0; j < 2; j++) {
            int64_t row = nb * 16 + n, col = kb * 32 + p * 2 + j;
            out[(((nb * KB + kb) * 16 + p) * 16 + n) * 2 + j] = (row < N && col < K) ? w[row * K + col] : 0;
          }
}

void pl_pack_f32(const float* w, int64_t N, int64_t K, float* out) {
#pragma omp parallel for schedule(static) num_threads(pl_threads())
  for (int64_t nb = 0; nb < (N + 15) / 16; nb++)
    for (int64_t k = 0; k < K; k++)
      for (int n = 0; n < 16; n++) out[(nb * K + k) * 16 + n] = (nb * 16 + n < N) ? w[(nb * 16 + n) * K + k] : 0.0f;
}
}

template <class O>
void linear_bf16(const bf16* x, int64_t M, int64_t ldx, const bf16* w, int64_t N, int64_t K, const float* bias,
                        O* out) {
  int64_t KB = (K + 31) / 32, blocks = (N + 31) / 32, NB16 = (N + 15) / 16;
  std::vector<bf16> padded;
  if (K % 32) {  // tiny models only
    padded.assign(M * KB * 32, 0);
    for (int64_t m = 0; m < M; m++) memcpy(&padded[m * KB * 32], x + m * ldx, K * 2);
    x = padded.data();
    ldx = KB * 32;
  }
#pragma omp parallel num_threads(pl_threads())
  {
#ifdef USE_AMX
    int rows0 = -1, rows1 = -1;
#endif
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
      const bf16* wb = w + b * 2 * KB * 512;
      bool two = b * 2 + 1 < NB16;
#ifdef USE_AMX
      for (int64_t m = 0; m < M; m += 32) {
        int r0 = std::min<int64_t>(16, M - m), r1 = std::max<int64_t>(0, std::min<int64_t>(16, M - m - 16));
        if (r0 != rows0 || r1 != rows1) amx_configure(rows0 = r0, rows1 = r1);
        amx_block(x + m * ldx, ldx, r0, r1, wb, KB, two, out + m * N, N, bias, b * 32, N);
      }
#else
      for (int64_t m = 0; m < M; m += 6) {
        const bf16* xm = x + m * ldx;
        O* om = out + m * N;
        if (two) { BY_ROWS(M - m, (block_bf16<R, 2>(xm, ldx, wb, KB, om, N, bias, b * 32, N))) }
        else { BY_ROWS(M - m, (block_bf16<R, 1>(xm, ldx, wb, KB, om, N, bias, b * 32, N))) }
      }
#endif
    }
#ifdef USE_AMX
    _tile_release();
#endif
  }
}

template void linear_bf16(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const float*, bf16*);
template void linear_bf16(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const float*, float*);

extern "C" {

void pl_linear_bf16(const bf16* x, int64_t M, int64_t ldx, const bf16* w, int64_t N, int64_t K, const float* bias,
                    void* out, int out_f32) {
  if (out_f32) linear_bf16(x, M, ldx, w, N, K, bias, (float*)out);
  else linear_bf16(x, M, ldx, w, N, K, bias, (bf16*)out);
}

void pl_linear_f32(const float* x, int64_t M, int64_t ldx, const float* w, int64_t N, int64_t K, const float* bias,
                   float* out) {
  int64_t NB16 = (N + 15) / 16;
#pragma omp parallel for schedule(static) num_threads(pl_threads())
  for (int64_t b = 0; b < (NB16 + 1) / 2; b++) {
    const float* wb = w + b * 2 * K * 16;
    bool two = b * 2 + 1 < NB16;
    for (int64_t m = 0; m < M; m += 6) {
      const float* xm = x + m * ldx;
      float* om = out + m * N;
      if (two) { BY_ROWS(M - m, (block_f32<R, 2>(xm, ldx, wb, K, om, N, bias, b * 32, N))) }
      else { BY_ROWS(M - m, (block_f32<R, 1>(xm, ldx, wb, K, om, N, bias, b * 32, N))) }
    }
  }
}
}
