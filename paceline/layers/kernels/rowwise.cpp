// Norms, activations and rotary positions: one row at a time.
#include "steps.h"

template <class T, class W>
void rms_norm(const T* x, T* residual, const W* weight, int64_t rows, int64_t n, float eps, T* y) {
  each_row(rows, [&](int64_t r) {
    const T* src = x + r * n;
    if (residual) {
      T* res = residual + r * n;
      int64_t i = 0;
      for (; i + 16 <= n; i += 16) store16(res + i, load16(res + i) + load16(src + i));
      for (; i < n; i++) put(res + i, to_float(res[i]) + to_float(src[i]));
      src = res;
    }
    v16 acc = {};
    float tail = 0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) { v16 v = load16(src + i); acc += v * v; }
    for (; i < n; i++) { float v = to_float(src[i]); tail += v * v; }
    float scale = 1.0f / std::sqrt((hsum(acc) + tail) / n + eps);
    T* dst = y + r * n;
    for (i = 0; i + 16 <= n; i += 16) {  // the normed value is rounded to W before the weight, as the models do
      W t[16];
      store16(t, load16(src + i) * scale);
      store16(dst + i, load16(t) * load16(weight + i));
    }
    for (; i < n; i++) {
      W t;
      put(&t, to_float(src[i]) * scale);
      put(dst + i, to_float(t) * to_float(weight[i]));
    }
  });
}

template <class T>
void silu_run(const T* gate, const T* up, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    v16 x = load16(gate + i);
    v16 e = vexp(x > 0.0f ? -x : x);
    v16 s = (x > 0.0f ? splat(1.0f) : e) / (1.0f + e);
    store16(out + i, x * s * load16(up + i));
  }
  for (; i < n; i++) { float x = to_float(gate[i]); put(out + i, x / (1.0f + std::exp(-x)) * to_float(up[i])); }
}

template <class T>
static void silu_mul(const T* gate_up, int64_t rows, int64_t n, T* out) {
  each_row(rows, [&](int64_t r) { silu_run(gate_up + r * 2 * n, gate_up + (r * 2 + 1) * n, n, out + r * n); });
}

template <class T>
void rope_write(const T* q, const T* k, const T* v, int64_t ldq, int64_t ldk, int64_t ldv, int64_t rows,
                       int64_t Hq, int64_t Hk, int64_t D, const float* table, const int64_t* positions, const int64_t* slots, int64_t page_size, T* q_out,
                       T* pool) {
  int64_t row = Hk * D;
  each_row(rows, [&](int64_t r) {
    const float* t = table + positions[r] * D;
    rope_row(q + r * ldq, Hq, D, t, q_out + r * Hq * D);
    T* page = pool + (slots[r] / page_size) * 2 * page_size * row + (slots[r] % page_size) * row;
    rope_row(k + r * ldk, Hk, D, t, page);
    memcpy(page + page_size * row, v + r * ldv, row * sizeof(T));
  });
}

#define DEFINE(NAME, T)                                                                                               \
  void pl_rms_norm_##NAME(const T* x, T* residual, const T* weight, int64_t rows, int64_t n, float eps, T* y) {       \
    rms_norm(x, residual, weight, rows, n, eps, y);                                                                   \
  }                                                                                                                   \
  void pl_rms_norm_wide_##NAME(const T* x, T* residual, const float* weight, int64_t rows, int64_t n, float eps,      \
                               T* y) {                                                                                \
    rms_norm(x, residual, weight, rows, n, eps, y);                                                                   \
  }                                                                                                                   \
  void pl_silu_mul_##NAME(const T* gate_up, int64_t rows, int64_t n, T* out) { silu_mul(gate_up, rows, n, out); }     \
  void pl_rope_write_##NAME(const T* q, const T* k, const T* v, int64_t ldq, int64_t ldk, int64_t ldv, int64_t rows,  \
                            int64_t Hq, int64_t Hk, int64_t D, const float* table, const int64_t* positions,         \
                            const int64_t* slots, int64_t page_size, T* q_out, T* pool) {                             \
    rope_write(q, k, v, ldq, ldk, ldv, rows, Hq, Hk, D, table, positions, slots, page_size, q_out, pool);                        \
  }

extern "C" {
DEFINE(bf16, bf16)
DEFINE(f32, float)
}

#define INSTANTIATE(T)                                                                                                \
  template void rms_norm(const T*, T*, const T*, int64_t, int64_t, float, T*);                                        \
  template void silu_run(const T*, const T*, int64_t, T*);                                                            \
  template void rope_write(const T*, const T*, const T*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,        \
                           int64_t, const float*, const int64_t*, const int64_t*, int64_t, T*, T*);
INSTANTIATE(bf16)
INSTANTIATE(float)
