// Latent attention, and the linears of its heads.
#include "blocks.h"
#include "steps.h"
#include "tile.h"

// Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434): every query head reads the same row of a
// position, whose D elements are the key and whose first DV are the value. The row of a slot starts at slot * D, so the
// page size does not enter. A head's result is made of its own query and the rows in order of position, in the tiles
// of tile.h; that heads go through in blocks only shares the loads.

static constexpr int HEAD_BLOCK = 4;

static inline void sums16(const v16* a, float* out) {
#ifdef USE_AVX512BF16
  store16(out, sum_each((const __m512*)a));
#else
  for (int j = 0; j < 16; j++) out[j] = hsum(a[j]);
#endif
}

// Products of G query heads with 16 keys; s: G rows of TILE.
template <int G, class T>
static inline void latent_scores(const T* q, const T* const* keys, int64_t D, float* s) {
  alignas(64) v16 sums[G][16];
  float rest[G][16] = {};
  for (int j = 0; j < 16; j += 4) {
    v16 acc[4][G] = {};
    int64_t d = 0;
#ifdef USE_AVX512BF16
    if constexpr (std::is_same_v<T, bf16>)
      for (; d + 32 <= D; d += 32)
        for (int i = 0; i < 4; i++) {
          __m512bh key = (__m512bh)_mm512_loadu_si512(keys[j + i] + d);
          for (int g = 0; g < G; g++)
            acc[i][g] = (v16)_mm512_dpbf16_ps((__m512)acc[i][g], (__m512bh)_mm512_loadu_si512(q + g * D + d), key);
        }
#endif
    for (; d + 16 <= D; d += 16)
      for (int i = 0; i < 4; i++) {
        v16 key = load16(keys[j + i] + d);
        for (int g = 0; g < G; g++) acc[i][g] += load16(q + g * D + d) * key;
      }
    for (int i = 0; i < 4; i++)
      for (int g = 0; g < G; g++) {
        sums[g][j + i] = acc[i][g];
        for (int64_t e = d; e < D; e++) rest[g][j + i] += to_float(q[g * D + e]) * to_float(keys[j + i][e]);
      }
  }
  for (int g = 0; g < G; g++) {
    sums16(sums[g], s + g * TILE);
    store16(s + g * TILE, load16(s + g * TILE) + load16(rest[g]));
  }
}

// acc = acc * fade + sum of p * row over n rows, for G heads and 16 W elements from d on; acc: G rows of DV.
template <int G, int W, class T>
static inline void latent_values(const T* const* rows, int n, int64_t d, const float* p, const float* fade, float* acc,
                                 int64_t DV) {
  v16 sum[G][W];
  for (int g = 0; g < G; g++)
    for (int w = 0; w < W; w++) sum[g][w] = load16(acc + g * DV + d + w * 16) * fade[g];
  for (int j = 0; j < n; j++) {
    v16 v[W];
    for (int w = 0; w < W; w++) v[w] = load16(rows[j] + d + w * 16);
    for (int g = 0; g < G; g++)
      for (int w = 0; w < W; w++) sum[g][w] += v[w] * p[g * TILE + j];
  }
  for (int g = 0; g < G; g++)
    for (int w = 0; w < W; w++) store16(acc + g * DV + d + w * 16, sum[g][w]);
}

// One head's scores of a tile to probabilities; n of the 16 * groups are real. Returns the factor of what came before.
static inline float latent_soften(float* s, int n, int groups, bool first, float scale, float* top, float* total) {
  v16 most = splat(-INFINITY);
  for (int j = n; j < groups * 16; j++) s[j] = -INFINITY;
  for (int b = 0; b < groups; b++) {
    v16 x = load16(s + b * 16) * (scale * LOG2_E);
    store16(s + b * 16, x);
    most = vmax(most, x);
  }
  float high = first ? -INFINITY : *top;
  for (int i = 0; i < 16; i++) high = std::max(high, most[i]);
  v16 sum = {};
  for (int b = 0; b < groups; b++) {
    v16 x = load16(s + b * 16), e = x == -INFINITY ? v16{} : vexp2(x - high);
    store16(s + b * 16, e);
    sum += e;
  }
  float fade = first ? 0.0f : vexp2(splat(*top - high))[0];
  *total = (first ? 0.0f : *total * fade) + hsum(sum);
  *top = high;
  return fade;
}

// G query heads of one row. q: [G][D], out: [G][DV].
template <int G, class T>
static void latent_row(const T* q, const T* pool, int64_t D, int64_t DV, const int32_t* prefix, int64_t prefix_len,
                       const int32_t* tail, int64_t length, float scale, T* out) {
  alignas(64) float s[G * TILE];
  const T* rows[TILE];
  float top[G], total[G], fade[G];
  static thread_local std::vector<float> memory;
  memory.assign(G * DV, 0.0f);
  float* acc = memory.data();
  for (int64_t base = 0; base < length; base += TILE) {
    int n = std::min<int64_t>(TILE, length - base), groups = (n + 15) / 16;
    for (int j = 0; j < n; j++) {
      int64_t at = base + j, slot = at < prefix_len ? prefix[at] : tail[at - prefix_len];
      rows[j] = pool + slot * D;
    }
    for (int j = n; j < groups * 16; j++) rows[j] = rows[0];  // its scores are thrown away
    for (int b = 0; b < groups; b++) latent_scores<G>(q, rows + b * 16, D, s + b * 16);
    for (int g = 0; g < G; g++) fade[g] = latent_soften(s + g * TILE, n, groups, base == 0, scale, top + g, total + g);
    int64_t d = 0;
    for (; d + 64 <= DV; d += 64) latent_values<G, 4>(rows, n, d, s, fade, acc, DV);
    for (; d + 16 <= DV; d += 16) latent_values<G, 1>(rows, n, d, s, fade, acc, DV);
    for (; d < DV; d++)
      for (int g = 0; g < G; g++) {
        float sum = acc[g * DV + d] * fade[g];
        for (int j = 0; j < n; j++) sum += to_float(rows[j][d]) * s[g * TILE + j];
        acc[g * DV + d] = sum;
      }
  }
  for (int g = 0; g < G; g++)
    for (int64_t d = 0; d < DV; d++) put(out + g * DV + d, acc[g * DV + d] / total[g]);
}

template <class T>
static void attend_latent(const T* q, const T* pool, int64_t rows, int64_t H, int64_t D, int64_t DV,
                          const int32_t* slots, const int64_t* slot_offsets, const int32_t* prefix_lens,
                          const int32_t* tails, const int64_t* tail_offsets, float scale, T* out) {
  int64_t blocks = (H + HEAD_BLOCK - 1) / HEAD_BLOCK;
#pragma omp parallel for schedule(dynamic, 1) collapse(2) num_threads(pl_threads()) if (pl_threads() > 1 && rows * blocks > 1)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t b = 0; b < blocks; b++) {
      int64_t h = b * HEAD_BLOCK, length = prefix_lens[r] + tail_offsets[r + 1] - tail_offsets[r];
      auto run = H - h >= 4 ? latent_row<4, T> : H - h == 3 ? latent_row<3, T> : H - h == 2 ? latent_row<2, T> : latent_row<1, T>;
      run(q + (r * H + h) * D, pool, D, DV, slots + slot_offsets[r], prefix_lens[r], tails + tail_offsets[r], length,
          scale, out + (r * H + h) * DV);
    }
}

// Rotates each head's P query elements into the end of its row of q_out [rows][H][R + P], and stores the rows' latent:
// R normed elements, then P rotated ones.
template <class T>
static void latent_write(const T* q, int64_t q_row, int64_t q_head, const T* latent, int64_t latent_row, int64_t rows,
                         int64_t H, int64_t R, int64_t P, const T* norm, float eps, const float* table,
                         const int64_t* positions, const int64_t* slots, T* q_out, T* pool) {
  int64_t D = R + P;
#pragma omp parallel for schedule(static) num_threads(pl_threads()) if (pl_threads() > 1 && rows > 16)
  for (int64_t r = 0; r < rows; r++) {
    const float* t = table + positions[r] * P;
    for (int64_t h = 0; h < H; h++) rope_row(q + r * q_row + h * q_head, 1, P, t, q_out + (r * H + h) * D + R);
    T* row = pool + slots[r] * D;
    rms_norm<T>(latent + r * latent_row, nullptr, norm, 1, R, eps, row);
    rope_row(latent + r * latent_row + R, 1, P, t, row + R);
  }
}

// One linear per head: out[r][h] = w[h] x[r][h]. Each w[h] is packed like a linear's weight.
static void linear_heads(const float* x, int64_t x_row, int64_t x_head, int64_t M, int64_t H, const float* w, int64_t N,
                         int64_t K, float* out, int64_t out_row, int64_t out_head) {
  int64_t NB16 = (N + 15) / 16, blocks = (NB16 + 1) / 2;
#pragma omp parallel for schedule(static) collapse(2) num_threads(pl_threads())
  for (int64_t h = 0; h < H; h++)
    for (int64_t b = 0; b < blocks; b++) {
      const float* wb = w + (h * NB16 + b * 2) * K * 16;
      bool two = b * 2 + 1 < NB16;
      for (int64_t m = 0; m < M; m += 6) {
        const float* xm = x + m * x_row + h * x_head;
        float* om = out + m * out_row + h * out_head;
        if (two) { BY_ROWS(M - m, (block_f32<R, 2>(xm, x_row, wb, K, om, out_row, nullptr, b * 32, N))) }
        else { BY_ROWS(M - m, (block_f32<R, 1>(xm, x_row, wb, K, om, out_row, nullptr, b * 32, N))) }
      }
    }
}

static void linear_heads(const bf16* x, int64_t x_row, int64_t x_head, int64_t M, int64_t H, const bf16* w, int64_t N,
                         int64_t K, bf16* out, int64_t out_row, int64_t out_head) {
  int64_t KB = (K + 31) / 32, NB16 = (N + 15) / 16, blocks = (NB16 + 1) / 2;
  std::vector<bf16> padded;
  if (K % 32) {  // tiny models only
    padded.assign(M * H * KB * 32, 0);
    for (int64_t m = 0; m < M; m++)
      for (int64_t h = 0; h < H; h++) memcpy(&padded[(m * H + h) * KB * 32], x + m * x_row + h * x_head, K * 2);
    x = padded.data();
    x_row = H * KB * 32;
    x_head = KB * 32;
  }
#pragma omp parallel num_threads(pl_threads())
  {
#ifdef USE_AMX
    int rows0 = -1, rows1 = -1;
#endif
#pragma omp for schedule(static) collapse(2)
    for (int64_t h = 0; h < H; h++)
      for (int64_t b = 0; b < blocks; b++) {
        const bf16* wb = w + (h * NB16 + b * 2) * KB * 512;
        const bf16* xh = x + h * x_head;
        bf16* oh = out + h * out_head;
        bool two = b * 2 + 1 < NB16;
#ifdef USE_AMX
        for (int64_t m = 0; m < M; m += 32) {
          int r0 = std::min<int64_t>(16, M - m), r1 = std::max<int64_t>(0, std::min<int64_t>(16, M - m - 16));
          if (r0 != rows0 || r1 != rows1) amx_configure(rows0 = r0, rows1 = r1);
          amx_block<bf16>(xh + m * x_row, x_row, r0, r1, wb, KB, two, oh + m * out_row, out_row, nullptr, b * 32, N);
        }
#else
        for (int64_t m = 0; m < M; m += 6) {
          const bf16* xm = xh + m * x_row;
          bf16* om = oh + m * out_row;
          if (two) { BY_ROWS(M - m, (block_bf16<R, 2>(xm, x_row, wb, KB, om, out_row, nullptr, b * 32, N))) }
          else { BY_ROWS(M - m, (block_bf16<R, 1>(xm, x_row, wb, KB, om, out_row, nullptr, b * 32, N))) }
        }
#endif
      }
#ifdef USE_AMX
    _tile_release();
#endif
  }
}

#define DEFINE_LATENT(NAME, T)                                                                                        \
  void pl_attend_latent_##NAME(const T* q, const T* pool, int64_t rows, int64_t H, int64_t D, int64_t DV,             \
                               const int32_t* slots, const int64_t* slot_offsets, const int32_t* prefix_lens,         \
                               const int32_t* tails, const int64_t* tail_offsets, float scale, T* out) {              \
    attend_latent(q, pool, rows, H, D, DV, slots, slot_offsets, prefix_lens, tails, tail_offsets, scale, out);        \
  }                                                                                                                   \
  void pl_latent_write_##NAME(const T* q, int64_t q_row, int64_t q_head, const T* latent, int64_t latent_row,         \
                              int64_t rows, int64_t H, int64_t R, int64_t P, const T* norm, float eps,                \
                              const float* table, const int64_t* positions, const int64_t* slots, T* q_out,           \
                              T* pool) {                                                                              \
    latent_write(q, q_row, q_head, latent, latent_row, rows, H, R, P, norm, eps, table, positions, slots, q_out,      \
                 pool);                                                                                               \
  }                                                                                                                   \
  void pl_linear_heads_##NAME(const T* x, int64_t x_row, int64_t x_head, int64_t M, int64_t H, const T* w, int64_t N, \
                              int64_t K, T* out, int64_t out_row, int64_t out_head) {                                 \
    linear_heads(x, x_row, x_head, M, H, w, N, K, out, out_row, out_head);                                            \
  }

extern "C" {
DEFINE_LATENT(bf16, bf16)
DEFINE_LATENT(f32, float)
}
