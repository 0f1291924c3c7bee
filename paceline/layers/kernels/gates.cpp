// Gated activations beside SwiGLU: one row at a time.
#include "common.h"

static inline v16 clamped(v16 x, v16 low, v16 high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// gate * sigmoid(slope of the gate) * up, of 16 elements.
static inline v16 gated(v16 gate, v16 up, int kind, float alpha, float limit) {
  v16 z;
  if (kind == 0) {  // GELU by tanh (Hendrycks & Gimpel 2016): 0.5 (1 + tanh(u)) is the sigmoid of 2 u
    z = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  } else {  // gpt-oss: a clamped SwiGLU, up + 1
    gate = clamped(gate, splat(-INFINITY), splat(limit));
    up = clamped(up, splat(-limit), splat(limit)) + 1.0f;
    z = alpha * gate;
  }
  v16 e = vexp(z > 0.0f ? -z : z);
  v16 s = z > 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
  return gate * s * up;
}

template <class T>
static void gated_rows(const T* gate_up, int64_t rows, int64_t n, int kind, float alpha, float limit, T* out) {
#pragma omp parallel for schedule(static) num_threads(pl_threads()) if (pl_threads() > 1 && rows > 16)
  for (int64_t r = 0; r < rows; r++) {
    const T *g = gate_up + r * 2 * n, *u = g + n;
    T* o = out + r * n;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store16(o + i, gated(load16(g + i), load16(u + i), kind, alpha, limit));
    if (i < n) {
      T a[16] = {}, b[16] = {};
      memcpy(a, g + i, (n - i) * sizeof(T));
      memcpy(b, u + i, (n - i) * sizeof(T));
      store16(a, gated(load16(a), load16(b), kind, alpha, limit));
      memcpy(o + i, a, (n - i) * sizeof(T));
    }
  }
}

#define DEFINE(NAME, T)                                                                                               \
  void pl_gated_##NAME(const T* gate_up, int64_t rows, int64_t n, int kind, float alpha, float limit, T* out) {       \
    gated_rows(gate_up, rows, n, kind, alpha, limit, out);                                                            \
  }

extern "C" {
DEFINE(bf16, bf16)
DEFINE(f32, float)
}
