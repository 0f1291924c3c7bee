// Row-invariant CPU kernels (design 5.6): every output element is computed by one fixed sequence of operations that
// depends on its own row and the weights alone. How many rows there are, which neighbours they have, how many
// threads run, where a key lies in the pool: none of it changes a bit.
//
// Plain C ABI, called through ctypes. T is bf16 (stored as uint16_t) or float. Compiled for the host's instruction set:
//   AMX-BF16 > AVX512-BF16 > any (GCC vector extensions) for bf16 products; vector extensions for fp32.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512F__) && !defined(PACELINE_GENERIC)
#define USE_AVX512BF16 1
#include <immintrin.h>
#endif
#if defined(USE_AVX512BF16) && defined(__AMX_BF16__) && !defined(PACELINE_NO_AMX)
#define USE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef uint16_t bf16;
typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16x32 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));

static int g_threads = 1;  // set once at start; the calling thread's own OpenMP setting is not what counts

static inline float to_float(bf16 x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }
static inline float to_float(float x) { return x; }
static inline void put(bf16* p, float f) {  // round to nearest even; NaN stays NaN
  uint32_t u; memcpy(&u, &f, 4);
  *p = (f != f) ? 0x7fc0 : (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline void put(float* p, float f) { *p = f; }
static inline v16 load16(const float* p) { return *(const v16*)p; }
static inline v16 load16(const bf16* p) { return (v16)(__builtin_convertvector(*(const h16*)p, u16x32) << 16); }
static inline void store16(float* p, v16 x) { *(v16*)p = x; }
static inline void store16(bf16* p, v16 x) {
  u16x32 u = (u16x32)x;
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  *(h16*)p = __builtin_convertvector(u, h16);
}
static inline v16 splat(float f) { return v16{} + f; }
static inline float hsum(v16 x) {  // one fixed tree
#ifdef USE_AVX512BF16
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
#else
  float a[16]; memcpy(a, &x, 64);
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) a[i] += a[i + w];
  return a[0];
#endif
}
static inline float hmax(v16 x) {
#ifdef USE_AVX512BF16
  return _mm512_reduce_max_ps((__m512)x);
#else
  float high = x[0];
  for (int i = 1; i < 16; i++) high = std::max(high, x[i]);
  return high;
#endif
}
static inline v16 vmax(v16 a, v16 b) { return a > b ? a : b; }
static inline v16 vexp(v16 x) {  // 2^n * polynomial; relative error below 2e-7 for x <= 0
  x = vmax(x, splat(-87.0f));
  v16 n = x * 1.44269504f;
  v16 magic = splat(12582912.0f);  // rounds to an integer in the mantissa
  v16 r = (n + magic) - magic;
  v16 f = x - r * 0.693359375f;
  f = f - r * -2.12194440e-4f;
  v16 p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  typedef int32_t i32x16 __attribute__((vector_size(64)));
  i32x16 e = __builtin_convertvector(r, i32x16);
  return p * (v16)((e + 127) << 23);
}

// ---------------------------------------------------------------- linear
// Weights [N, K] are packed once. bf16: [N/16][K/32][16 pairs of k][16 n][2], zero padded (the AMX and VNNI order).
// fp32: [N/16][K][16].

extern "C" {

int64_t pl_packed_elems(int64_t N, int64_t K, int is_bf16) {
  int64_t n = (N + 15) / 16, k = is_bf16 ? (K + 31) / 32 * 32 : K;
  return n * 16 * k;
}

void pl_pack_bf16(const bf16* w, int64_t N, int64_t K, bf16* out) {
  int64_t KB = (K + 31) / 32;
#pragma omp parallel for schedule(static) num_threads(g_threads)
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
#pragma omp parallel for schedule(static) num_threads(g_threads)
  for (int64_t nb = 0; nb < (N + 15) / 16; nb++)
    for (int64_t k = 0; k < K; k++)
      for (int n = 0; n < 16; n++) out[(nb * K + k) * 16 + n] = (nb * 16 + n < N) ? w[(nb * 16 + n) * K + k] : 0.0f;
}

const char* pl_isa() {
#if defined(USE_AMX)
  return "amx_bf16";
#elif defined(USE_AVX512BF16)
  return "avx512_bf16";
#elif defined(__AVX512F__)
  return "generic512";
#elif defined(__AVX2__)
  return "generic_avx2";
#else
  return "generic";
#endif
}
}

template <class O>
static inline void store_cols(O* out, v16 acc, const float* bias, int64_t n0, int64_t N) {
  float t[16];
  store16(t, acc);
  int64_t count = std::min<int64_t>(16, N - n0);
  for (int64_t i = 0; i < count; i++) put(out + n0 + i, bias ? t[i] + bias[n0 + i] : t[i]);
}

// Columns [n0, n0 + 16 NB) of M rows with vector registers; M <= 6 keeps M * NB accumulators in registers.
template <int M, int NB, class O>
static void block_f32(const float* x, int64_t ldx, const float* w, int64_t K, O* out, int64_t ldo, const float* bias,
                      int64_t n0, int64_t N) {
  v16 acc[M][NB] = {};
  for (int64_t k = 0; k < K; k++)
    for (int b = 0; b < NB; b++) {
      v16 wv = load16(w + (b * K + k) * 16);
      for (int m = 0; m < M; m++) acc[m][b] += wv * x[m * ldx + k];
    }
  for (int m = 0; m < M; m++)
    for (int b = 0; b < NB; b++) store_cols(out + m * ldo, acc[m][b], bias, n0 + b * 16, N);
}

template <int M, int NB, class O>
static void block_bf16(const bf16* x, int64_t ldx, const bf16* w, int64_t KB, O* out, int64_t ldo, const float* bias,
                       int64_t n0, int64_t N) {
  v16 acc[M][NB] = {};
  for (int64_t kp = 0; kp < KB * 16; kp++)
    for (int b = 0; b < NB; b++) {
      const bf16* wp = w + ((int64_t)b * KB * 16 + kp) * 32;
#ifdef USE_AVX512BF16
      __m512bh wv = (__m512bh)_mm512_loadu_si512(wp);
      for (int m = 0; m < M; m++) {
        uint32_t pair; memcpy(&pair, x + m * ldx + kp * 2, 4);
        acc[m][b] = (v16)_mm512_dpbf16_ps((__m512)acc[m][b], (__m512bh)_mm512_set1_epi32(pair), wv);
      }
#else
      u16x32 both = *(const u16x32*)wp;
      v16 even = (v16)(both << 16), odd = (v16)(both & 0xffff0000u);
      for (int m = 0; m < M; m++) {
        acc[m][b] += even * to_float(x[m * ldx + kp * 2]);
        acc[m][b] += odd * to_float(x[m * ldx + kp * 2 + 1]);
      }
#endif
    }
  for (int m = 0; m < M; m++)
    for (int b = 0; b < NB; b++) store_cols(out + m * ldo, acc[m][b], bias, n0 + b * 16, N);
}

#define BY_ROWS(M, CALL)                                          \
  switch (M) {                                                    \
    case 1: { constexpr int R = 1; CALL; break; }                 \
    case 2: { constexpr int R = 2; CALL; break; }                 \
    case 3: { constexpr int R = 3; CALL; break; }                 \
    case 4: { constexpr int R = 4; CALL; break; }                 \
    case 5: { constexpr int R = 5; CALL; break; }                 \
    default: { constexpr int R = 6; CALL; break; }                \
  }

#ifdef USE_AMX
struct alignas(64) TileConfig { uint8_t palette, start_row, reserved[14]; uint16_t colsb[16]; uint8_t rows[16]; };

static bool amx_ready() {  // the kernel grants tile state once per process
  static bool ok = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return ok;
}

// Tiles: 0-3 sums (2 row blocks x 2 column blocks), 4-5 x, 6-7 w. rows: of the first and second row block.
static void amx_configure(int rows0, int rows1) {
  TileConfig c = {};
  c.palette = 1;
  c.rows[0] = c.rows[1] = c.rows[4] = rows0;
  c.rows[2] = c.rows[3] = c.rows[5] = rows1;
  c.rows[6] = c.rows[7] = 16;
  for (int t = 0; t < 8; t++) c.colsb[t] = c.rows[t] ? 64 : 0;  // an unused tile must have neither
  _tile_loadconfig(&c);
}

template <class O>
static void amx_store(const float* tile, int rows, O* out, int64_t ldo, const float* bias, int64_t n0, int64_t N) {
  for (int m = 0; m < rows; m++) {
    v16 v = load16(tile + m * 16);
    if (!bias && n0 + 16 <= N) store16(out + m * ldo + n0, v);
    else store_cols(out + m * ldo, v, bias, n0, N);
  }
}

// Up to 32 rows, 32 columns (two = whether the second 16 exist).
template <class O>
static void amx_block(const bf16* x, int64_t ldx, int rows0, int rows1, const bf16* w, int64_t KB, bool two, O* out,
                      int64_t ldo, const float* bias, int64_t n0, int64_t N) {
  alignas(64) float sums[4][256];
  const bf16* x1 = x + 16 * ldx;
  const bf16* w1 = w + KB * 512;
  _tile_zero(0); _tile_zero(1);
  if (rows1) { _tile_zero(2); _tile_zero(3); }
  for (int64_t kb = 0; kb < KB; kb++) {
    _tile_loadd(4, x + kb * 32, ldx * 2);
    _tile_loadd(6, w + kb * 512, 64);
    _mm_prefetch((const char*)(w + kb * 512 + 4096), _MM_HINT_T0);
    _tile_dpbf16ps(0, 4, 6);
    if (two) { _tile_loadd(7, w1 + kb * 512, 64); _tile_dpbf16ps(1, 4, 7); }
    if (rows1) {
      _tile_loadd(5, x1 + kb * 32, ldx * 2);
      _tile_dpbf16ps(2, 5, 6);
      if (two) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], 64);
  amx_store(sums[0], rows0, out, ldo, bias, n0, N);
  if (two) { _tile_stored(1, sums[1], 64); amx_store(sums[1], rows0, out, ldo, bias, n0 + 16, N); }
  if (rows1) {
    _tile_stored(2, sums[2], 64);
    amx_store(sums[2], rows1, out + 16 * ldo, ldo, bias, n0, N);
    if (two) { _tile_stored(3, sums[3], 64); amx_store(sums[3], rows1, out + 16 * ldo, ldo, bias, n0 + 16, N); }
  }
}
#endif

template <class O>
static void linear_bf16(const bf16* x, int64_t M, int64_t ldx, const bf16* w, int64_t N, int64_t K, const float* bias,
                        O* out) {
  int64_t KB = (K + 31) / 32, blocks = (N + 31) / 32, NB16 = (N + 15) / 16;
  std::vector<bf16> padded;
  if (K % 32) {  // tiny models only
    padded.assign(M * KB * 32, 0);
    for (int64_t m = 0; m < M; m++) memcpy(&padded[m * KB * 32], x + m * ldx, K * 2);
    x = padded.data();
    ldx = KB * 32;
  }
#pragma omp parallel num_threads(g_threads)
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

constexpr int64_t kAhead = 2048;  // bytes

// One row; for the few hundred bytes of one a call of memcpy costs as much as its bytes. Past the caches, where the target
// allows it, for one that is written whole and read much later: its lines need not be read first. Else ``to`` runs straight
// on with the rows that follow, and their lines are asked for ahead: it is larger than the nearest caches.
template <bool kStream>
static inline void copy_row(uint8_t* to, const uint8_t* from, int64_t size) {
  if (!kStream)
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(to + kAhead + at, 1);
#ifdef USE_AVX512BF16
  if (!kStream || reinterpret_cast<uintptr_t>(to) % 64 == 0)
    for (; size >= 64; size -= 64, to += 64, from += 64) {
      __m512i line = _mm512_loadu_si512(from);
      kStream ? _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line) : _mm512_storeu_si512(to, line);
    }
  if (size == 0) return;
#endif
  memcpy(to, from, size);
}

extern "C" {

void pl_set_threads(int n) { g_threads = n > 1 ? n : 1; }

// Reads n floats as fast as plain loads go; the benchmark's measure of memory bandwidth.
float pl_read(const float* x, int64_t n) {
  float total = 0;
#pragma omp parallel for schedule(static) num_threads(g_threads) reduction(+ : total)
  for (int64_t b = 0; b < n / 4096; b++) {
    v16 acc[8] = {};
    for (int64_t i = b * 4096; i < (b + 1) * 4096; i += 128)
      for (int j = 0; j < 8; j++) acc[j] += load16(x + i + j * 16);
    for (int j = 0; j < 8; j++) total += hsum(acc[j]);
  }
  return total;
}

// Tokens of a paged pool, layer after layer, into flat memory or back. layers: [num_layers, 4] of address, bytes of a
// part, bytes from row to row, parts (K and V, or one latent). A page holds page_size rows of K, then as many of V; flat
// memory holds each token's parts together. Neighbouring slots of a page are copied token by token, so that flat memory
// runs straight on and each part does too. Returns 1, and nothing has moved, when a slot is outside 0..pool_slots-1.
int pl_move_rows(const int64_t* layers, int64_t num_layers, const int64_t* slots, int64_t num_slots,
                 int64_t pool_slots, int64_t page_size, uint8_t* flat, int to_pool) {
  for (int64_t i = 0; i < num_slots; i++)
    if (slots[i] < 0 || slots[i] >= pool_slots) return 1;
  for (const int64_t* layer = layers; layer < layers + 4 * num_layers; layer += 4) {
    uint8_t* base = reinterpret_cast<uint8_t*>(layer[0]);
    int64_t size = layer[1], stride = layer[2], parts = layer[3];
    for (int64_t first = 0, end; first < num_slots; first = end) {
      for (end = first + 1; end < num_slots && slots[end] == slots[end - 1] + 1 && slots[end] % page_size; end++) {}
      uint8_t* row = base + (parts == 1 ? slots[first] : slots[first] + slots[first] / page_size * page_size) * stride;
      for (int64_t i = first; i < end; i++, row += stride) {
        uint8_t* pool = row;
        for (int64_t part = 0; part < parts; part++, pool += page_size * stride, flat += size)
          to_pool ? copy_row<true>(pool, flat, size) : copy_row<false>(flat, pool, size);
      }
    }
  }
#ifdef USE_AVX512BF16
  _mm_sfence();
#endif
  return 0;
}

int pl_init() {
#ifdef USE_AMX
  return amx_ready() ? 0 : 1;
#else
  return 0;
#endif
}

void pl_linear_bf16(const bf16* x, int64_t M, int64_t ldx, const bf16* w, int64_t N, int64_t K, const float* bias,
                    void* out, int out_f32) {
  if (out_f32) linear_bf16(x, M, ldx, w, N, K, bias, (float*)out);
  else linear_bf16(x, M, ldx, w, N, K, bias, (bf16*)out);
}

void pl_linear_f32(const float* x, int64_t M, int64_t ldx, const float* w, int64_t N, int64_t K, const float* bias,
                   float* out) {
  int64_t NB16 = (N + 15) / 16;
#pragma omp parallel for schedule(static) num_threads(g_threads)
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

// ---------------------------------------------------------------- row-wise

// y = norm(x) * weight; with residual: residual += x first (rounded to T), y = norm(residual) * weight.
template <class T>
static void rms_norm(const T* x, T* residual, const T* weight, int64_t rows, int64_t n, float eps, T* y) {
#pragma omp parallel for schedule(static) num_threads(g_threads) if (g_threads > 1 && rows > 16)
  for (int64_t r = 0; r < rows; r++) {
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
    for (i = 0; i + 16 <= n; i += 16) {  // the normed value is rounded to T before the weight, as the models do
      T t[16];
      store16(t, load16(src + i) * scale);
      store16(dst + i, load16(t) * load16(weight + i));
    }
    for (; i < n; i++) {
      T t;
      put(&t, to_float(src[i]) * scale);
      put(dst + i, to_float(t) * to_float(weight[i]));
    }
  }
}

template <class T>
static void silu_mul(const T* gate_up, int64_t rows, int64_t n, T* out) {
#pragma omp parallel for schedule(static) num_threads(g_threads) if (g_threads > 1 && rows > 16)
  for (int64_t r = 0; r < rows; r++) {
    const T *g = gate_up + r * 2 * n, *u = g + n;
    T* o = out + r * n;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      v16 x = load16(g + i);
      v16 e = vexp(x > 0.0f ? -x : x);
      v16 s = x > 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
      store16(o + i, x * s * load16(u + i));
    }
    for (; i < n; i++) { float x = to_float(g[i]); put(o + i, x / (1.0f + std::exp(-x)) * to_float(u[i])); }
  }
}

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

template <class T>
static void rope_write(const T* q, const T* k, const T* v, int64_t ldq, int64_t ldk, int64_t ldv, int64_t rows,
                       int64_t Hq, int64_t Hk, int64_t D, const float* table, const int64_t* positions, const int64_t* slots, int64_t page_size, T* q_out,
                       T* pool) {
  int64_t row = Hk * D;
#pragma omp parallel for schedule(static) num_threads(g_threads) if (g_threads > 1 && rows > 16)
  for (int64_t r = 0; r < rows; r++) {
    const float* t = table + positions[r] * D;
    rope_row(q + r * ldq, Hq, D, t, q_out + r * Hq * D);
    T* page = pool + (slots[r] / page_size) * 2 * page_size * row + (slots[r] % page_size) * row;
    rope_row(k + r * ldk, Hk, D, t, page);
    memcpy(page + page_size * row, v + r * ldv, row * sizeof(T));
  }
}

// ---------------------------------------------------------------- attention
// A row sees positions 0..length-1 of its sequence, in tiles of TILE positions counted from 0, each tile in groups of 16.

static constexpr int TILE = 128;

#ifdef USE_AVX512BF16
static inline v16 sum_each(const __m512* a) {  // element i = sum of a[i]'s 16 elements, one fixed tree
  __m512 t[8], u[4];
  for (int i = 0; i < 8; i++) t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    __m512d p = (__m512d)t[2 * i], q = (__m512d)t[2 * i + 1];
    u[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(p, q), (__m512)_mm512_unpackhi_pd(p, q));
  }
  __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return (v16)_mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}

template <int D>
static inline void dots16(const bf16* q, const bf16* const* keys, float* out) {
  __m512 acc[16];
  for (int j = 0; j < 16; j++) {
    acc[j] = _mm512_setzero_ps();
    int d = 0;
    for (; d + 32 <= D; d += 32)
      acc[j] = _mm512_dpbf16_ps(acc[j], (__m512bh)_mm512_loadu_si512(q + d), (__m512bh)_mm512_loadu_si512(keys[j] + d));
    for (; d < D; d += 16) acc[j] = (__m512)((v16)acc[j] + load16(q + d) * load16(keys[j] + d));
  }
  store16(out, sum_each(acc));
}
#else
template <int D>
static inline void dots16(const bf16* q, const bf16* const* keys, float* out) {
  for (int j = 0; j < 16; j++) {
    v16 acc = {};
    for (int d = 0; d < D; d += 16) acc += load16(q + d) * load16(keys[j] + d);
    out[j] = hsum(acc);
  }
}
#endif
template <int D>
static inline void dots16(const float* q, const float* const* keys, float* out) {
  for (int j = 0; j < 16; j++) {
    v16 acc = {};
    for (int d = 0; d < D; d += 16) acc += load16(q + d) * load16(keys[j] + d);
    out[j] = hsum(acc);
  }
}

// G query heads of one row over one KV head.
template <int D, int G, class T>
static void attend_row(const T* q, const T* pool, int64_t page_size, int64_t Hk, int64_t head, const int32_t* prefix,
                       int64_t prefix_len, const int32_t* tail, int64_t length, float scale, T* out) {
  constexpr int DV = D / 16;
  alignas(64) float s[G][TILE];
  alignas(64) static const T zeros[D] = {};
  const T *keys[TILE], *values[TILE];
  v16 acc[G][DV] = {};
  float top[G], total[G];
  for (int g = 0; g < G; g++) { top[g] = -INFINITY; total[g] = 0; }
  int64_t row = Hk * D;
  for (int64_t base = 0; base < length; base += TILE) {
    int n = std::min<int64_t>(TILE, length - base), groups = (n + 15) / 16;
    for (int j = 0; j < n; j++) {
      int64_t at = base + j, slot = at < prefix_len ? prefix[at] : tail[at - prefix_len];
      keys[j] = pool + (slot / page_size) * 2 * page_size * row + (slot % page_size) * row + head * D;
      values[j] = keys[j] + page_size * row;
    }
    for (int j = n; j < groups * 16; j++) keys[j] = values[j] = zeros;
    for (int g = 0; g < G; g++) {
      v16 m = splat(-INFINITY);
      for (int b = 0; b < groups; b++) {
        dots16<D>(q + g * D, keys + b * 16, s[g] + b * 16);
        for (int j = b * 16; j < b * 16 + 16; j++) s[g][j] = j < n ? s[g][j] * scale : -INFINITY;
        m = vmax(m, load16(s[g] + b * 16));
      }
      float high = top[g];
      for (int i = 0; i < 16; i++) high = std::max(high, m[i]);
      v16 sum = {};
      for (int b = 0; b < groups; b++) {
        v16 e = vexp(load16(s[g] + b * 16) - high);
        store16(s[g] + b * 16, e);
        sum += e;
      }
      for (int j = n; j < groups * 16; j++) s[g][j] = 0;
      float fade = base ? vexp(splat(top[g] - high))[0] : 0.0f;
      // The masked lanes hold exp(-87), not 0: take them off by summing again where a tile is partial.
      if (n < groups * 16) { sum = v16{}; for (int b = 0; b < groups; b++) sum += load16(s[g] + b * 16); }
      total[g] = total[g] * fade + hsum(sum);
      top[g] = high;
      for (int d = 0; d < DV; d++) acc[g][d] *= fade;
    }
    for (int j = 0; j < n; j++) {
      v16 v[DV];
      for (int d = 0; d < DV; d++) v[d] = load16(values[j] + d * 16);
      for (int g = 0; g < G; g++)
        for (int d = 0; d < DV; d++) acc[g][d] += v[d] * s[g][j];
    }
  }
  for (int g = 0; g < G; g++)
    for (int d = 0; d < DV; d++) store16(out + g * D + d * 16, acc[g][d] / total[g]);
}

template <class T>
using RowFn = void (*)(const T*, const T*, int64_t, int64_t, int64_t, const int32_t*, int64_t, const int32_t*, int64_t,
                       float, T*);

template <int D, class T>
static RowFn<T> by_group(int64_t G) {
  switch (G) {
    case 1: return attend_row<D, 1, T>;
    case 2: return attend_row<D, 2, T>;
    case 3: return attend_row<D, 3, T>;
    case 4: return attend_row<D, 4, T>;
    case 5: return attend_row<D, 5, T>;
    case 6: return attend_row<D, 6, T>;
    case 7: return attend_row<D, 7, T>;
    case 8: return attend_row<D, 8, T>;
  }
  return nullptr;
}

template <class T>
static RowFn<T> row_fn(int64_t D, int64_t G) {
  switch (D) {
    case 16: return by_group<16, T>(G);
    case 32: return by_group<32, T>(G);
    case 64: return by_group<64, T>(G);
    case 96: return by_group<96, T>(G);
    case 128: return by_group<128, T>(G);
  }
  return nullptr;
}

#ifdef USE_AMX
// The same attention on AMX tiles, for bf16. A block holds up to 16 (row, query head) pairs of one KV head; keys and values
// of a tile are laid out once for all blocks of a run. Probabilities are rounded to bf16 for the product with the values.
// A row's result does not depend on its block: a tile product works row by row, and keys past a row's own length enter
// with probability 0, which adds exact zeros.

static inline void transpose16(const bf16* const* rows, int64_t offset, bf16* out) {  // 16 x 16 pairs
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + offset);
  for (int i = 0; i < 8; i++) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      a[4 * i + 2 * j] = _mm512_unpacklo_epi64(b[4 * i + j], b[4 * i + 2 + j]);
      a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(b[4 * i + j], b[4 * i + 2 + j]);
    }
  // a[4 i + c]: column c of every 128-bit lane, rows 4 i to 4 i + 3.
  for (int c = 0; c < 4; c++) {
    __m512i x0 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), x1 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    __m512i y0 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88), y1 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_storeu_si512(out + (0 + c) * 32, _mm512_shuffle_i32x4(x0, y0, 0x88));
    _mm512_storeu_si512(out + (8 + c) * 32, _mm512_shuffle_i32x4(x0, y0, 0xdd));
    _mm512_storeu_si512(out + (4 + c) * 32, _mm512_shuffle_i32x4(x1, y1, 0x88));
    _mm512_storeu_si512(out + (12 + c) * 32, _mm512_shuffle_i32x4(x1, y1, 0xdd));
  }
}

template <int D>
struct AmxTile {
  alignas(64) bf16 keys[TILE / 16][D / 32][512];    // [16 keys][32 dims]: pairs of dims, keys, 2
  alignas(64) bf16 values[TILE / 32][D / 16][512];  // [32 keys][16 dims]: pairs of keys, dims, 2

  void load(const bf16* const* k, const bf16* const* v, int from, int blocks32) {  // its blocks of 32 keys from..blocks32-1
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 16; i++) {
      low[2 * i] = i; low[2 * i + 1] = 32 + i;
      high[2 * i] = 16 + i; high[2 * i + 1] = 48 + i;
    }
    __m512i pick_low = _mm512_load_si512(low), pick_high = _mm512_load_si512(high);
    for (int b = 2 * from; b < 2 * blocks32; b++)
      for (int d = 0; d < D / 32; d++) transpose16(k + b * 16, d * 32, keys[b][d]);
    for (int b = from; b < blocks32; b++)
      for (int p = 0; p < 16; p++)
        for (int d = 0; d < D / 32; d++) {
          __m512i x = _mm512_loadu_si512(v[b * 32 + 2 * p] + d * 32), y = _mm512_loadu_si512(v[b * 32 + 2 * p + 1] + d * 32);
          _mm512_store_si512(values[b][2 * d] + p * 32, _mm512_permutex2var_epi16(x, pick_low, y));
          _mm512_store_si512(values[b][2 * d + 1] + p * 32, _mm512_permutex2var_epi16(x, pick_high, y));
        }
  }
};

// Tiles: 0-3 sums, 4 left operand, 5 right operand.
static void amx_attend_configure(int rows) {
  TileConfig c = {};
  c.palette = 1;
  for (int t = 0; t < 5; t++) { c.rows[t] = rows; c.colsb[t] = 64; }
  c.rows[5] = 16; c.colsb[5] = 64;
  _tile_loadconfig(&c);
}

template <int D>
struct AmxBlock {  // up to 16 (row, query head) pairs
  alignas(64) bf16 q[16 * D];
  alignas(64) float acc[16 * D];
  float top[16], total[16];
  int64_t length[16];
  int pairs;
  int64_t longest;

  void add_tile(const AmxTile<D>& tile, int64_t base, float scale) {
    alignas(64) float s[16 * TILE];
    alignas(64) bf16 p[16 * TILE];
    int blocks32 = (std::min<int64_t>(TILE, longest - base) + 31) / 32;
    for (int b = 0; b < blocks32 * 2; b += 2) {
      _tile_zero(0); _tile_zero(1);
      for (int d = 0; d < D / 32; d++) {
        _tile_loadd(4, q + d * 32, D * 2);
        _tile_loadd(5, tile.keys[b][d], 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, tile.keys[b + 1][d], 64);
        _tile_dpbf16ps(1, 4, 5);
      }
      _tile_stored(0, s + b * 16, TILE * 4);
      _tile_stored(1, s + b * 16 + 16, TILE * 4);
    }
    for (int m = 0; m < pairs; m++) soften(s + m * TILE, p + m * TILE, m, length[m] - base, blocks32 * 2, base == 0, scale);
    for (int d = 0; d < D / 16; d += 2) {
      _tile_loadd(0, acc + d * 16, D * 4);
      _tile_loadd(1, acc + d * 16 + 16, D * 4);
      for (int b = 0; b < blocks32; b++) {
        _tile_loadd(4, p + b * 32, TILE * 2);
        _tile_loadd(5, tile.values[b][d], 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, tile.values[b][d + 1], 64);
        _tile_dpbf16ps(1, 4, 5);
      }
      _tile_stored(0, acc + d * 16, D * 4);
      _tile_stored(1, acc + d * 16 + 16, D * 4);
    }
  }

  // One row of scores to probabilities; updates top, total and acc of pair m. valid: keys of this tile that it sees.
  void soften(float* s, bf16* p, int m, int64_t valid, int groups, bool first, float scale) {
    if (valid <= 0) { memset(p, 0, groups * 32); return; }
    if (groups == TILE / 16 && valid >= TILE) soften_groups<TILE / 16>(s, p, m, valid, groups, first, scale);
    else soften_groups<0>(s, p, m, valid, groups, first, scale);
  }

  template <int kGroups>  // of a whole tile, or 0: as many as ``groups``
  void soften_groups(float* s, bf16* p, int m, int64_t valid, int groups, bool first, float scale) {
    const int count = kGroups ? kGroups : groups;
    int full = kGroups ? kGroups : std::min<int64_t>(valid, count * 16) / 16;
    v16 high16 = splat(-INFINITY);
    for (int b = 0; b < count; b++) {
      v16 x = load16(s + b * 16) * scale;
      if (b >= full) for (int i = 0; i < 16; i++) if (b * 16 + i >= valid) x[i] = -INFINITY;
      store16(s + b * 16, x);
      high16 = vmax(high16, x);
    }
    float high = std::max(first ? -INFINITY : top[m], hmax(high16));
    v16 sum = {};
    for (int b = 0; b < count; b++) {
      v16 x = load16(s + b * 16);
      v16 e = x == -INFINITY ? v16{} : vexp(x - high);
      store16(p + b * 16, e);
      sum += e;
    }
    float fade = first ? 0.0f : vexp(splat(top[m] - high))[0];
    total[m] = (first ? 0.0f : total[m] * fade) + hsum(sum);
    top[m] = high;
    for (int d = 0; d < D; d += 16) store16(acc + m * D + d, load16(acc + m * D + d) * fade);
  }
};

static constexpr int RUN_BLOCKS = 8;  // blocks that share a tile's layout

// Rows [0, count) of one segment for one KV head: rows without tails, or nodes of a tree, whose prefixes are equally long.
// Nodes go through the tiles that lie in their prefix together. From the tile on in which it ends each has keys of its own,
// of which only the blocks of 32 that its tail reaches are laid out for it alone.
template <int D>
static void amx_attend_run(const bf16* q, const bf16* pool, int64_t page_size, int64_t Hq, int64_t Hk, int64_t head,
                           const int32_t* prefix, const int32_t* prefix_lens, int64_t count, const int32_t* tails,
                           const int64_t* tail_offsets, float scale, bf16* out) {
  static thread_local AmxBlock<D> blocks[RUN_BLOCKS], own;
  static thread_local AmxTile<D> tile, second;
  alignas(64) static const bf16 zeros[D] = {};
  const bf16 *keys[TILE], *values[TILE];
  int64_t G = Hq / Hk, per = 16 / G, row = Hk * D, longest = 0, shared = prefix_lens[0];
  bool tailed = tail_offsets[1] > tail_offsets[0];
  int used = (count + per - 1) / per, configured = -1;
  auto configure = [&](int pairs) { if (pairs != configured) amx_attend_configure(configured = pairs); };
  auto lay_out = [&](AmxTile<D>& to, int64_t base, int from, int64_t n, const int32_t* tail) {  // keys base..base+n-1
    int blocks32 = (n + 31) / 32;
    for (int64_t j = from * 32; j < n; j++) {
      int64_t at = base + j, slot = (tail && at >= shared) ? tail[at - shared] : prefix[at];
      keys[j] = pool + (slot / page_size) * 2 * page_size * row + (slot % page_size) * row + head * D;
      values[j] = keys[j] + page_size * row;
    }
    for (int64_t j = n; j < blocks32 * 32; j++) keys[j] = values[j] = zeros;
    to.load(keys, values, from, blocks32);
  };
  auto finish = [&](const AmxBlock<D>& block, int first, int64_t r) {  // row r, whose pairs begin at first
    for (int64_t g = 0; g < G; g++)
      for (int d = 0; d < D; d += 16)
        store16(out + (r * Hq + head * G + g) * D + d, load16(block.acc + (first + g) * D + d) / block.total[first + g]);
  };
  for (int b = 0; b < used; b++) {
    AmxBlock<D>& block = blocks[b];
    block.pairs = 0;
    block.longest = 0;
    memset(block.acc, 0, sizeof block.acc);
    for (int64_t r = b * per; r < std::min<int64_t>(count, (b + 1) * per); r++) {
      int64_t length = prefix_lens[r] + tail_offsets[r + 1] - tail_offsets[r];
      for (int64_t g = 0; g < G; g++) {
        memcpy(block.q + block.pairs * D, q + (r * Hq + head * G + g) * D, D * 2);
        block.length[block.pairs++] = length;
      }
      block.longest = std::max(block.longest, length);
    }
    longest = std::max(longest, block.longest);
  }
  int64_t apart = tailed ? shared / TILE * TILE : longest;  // from where on the rows go alone
  for (int64_t base = 0; base < apart; base += TILE) {
    lay_out(tile, base, 0, std::min<int64_t>(TILE, longest - base), nullptr);
    for (int b = 0; b < used; b++) {
      if (blocks[b].longest <= base) continue;
      configure(blocks[b].pairs);
      blocks[b].add_tile(tile, base, scale);
    }
  }
  if (!tailed) {
    for (int64_t r = 0; r < count; r++) finish(blocks[r / per], r % per * G, r);
    return;
  }
  int whole = (shared - apart) / 32;  // blocks of the tile in which the prefix ends that no tail reaches
  if (whole) lay_out(tile, apart, 0, whole * 32, nullptr);
  own.pairs = G;
  configure(G);
  for (int64_t r = 0; r < count; r++) {
    const AmxBlock<D>& block = blocks[r / per];
    int64_t first = r % per * G;
    own.longest = block.length[first];
    std::fill_n(own.length, G, own.longest);
    memcpy(own.q, block.q + first * D, G * D * sizeof(bf16));
    memcpy(own.acc, block.acc + first * D, G * D * sizeof(float));
    memcpy(own.top, block.top + first, G * sizeof(float));
    memcpy(own.total, block.total + first, G * sizeof(float));
    for (int64_t base = apart; base < own.longest; base += TILE) {
      bool begins = base == apart;  // the tile that all rows begin alike
      AmxTile<D>& to = begins ? tile : second;
      lay_out(to, base, begins ? whole : 0, std::min<int64_t>(TILE, own.longest - base), tails + tail_offsets[r]);
      own.add_tile(to, base, scale);
    }
    finish(own, 0, r);
  }
}

template <int D>
static void amx_attend(const bf16* q, const bf16* pool, int64_t page_size, int64_t rows, int64_t Hq, int64_t Hk,
                       const int32_t* slots, const int64_t* slot_offsets, const int32_t* prefix_lens,
                       const int32_t* tails, const int64_t* tail_offsets, float scale, bf16* out) {
  std::vector<int64_t> starts;
  int64_t limit = RUN_BLOCKS * (16 / (Hq / Hk));
  auto tailed = [&](int64_t r) { return tail_offsets[r + 1] > tail_offsets[r]; };
  for (int64_t r = 0; r < rows; r++) {
    bool joins = r > 0 && tailed(r) == tailed(r - 1) && slot_offsets[r] == slot_offsets[r - 1] &&
                 r - starts.back() < limit && (!tailed(r) || prefix_lens[r] == prefix_lens[r - 1]);
    if (!joins) starts.push_back(r);
  }
  int64_t runs = starts.size();
  starts.push_back(rows);
#pragma omp parallel num_threads(g_threads) if (g_threads > 1 && runs * Hk > 1)
  {
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < runs; i++)
      for (int64_t h = 0; h < Hk; h++) {
        int64_t r = starts[i];
        amx_attend_run<D>(q + r * Hq * D, pool, page_size, Hq, Hk, h, slots + slot_offsets[r], prefix_lens + r,
                          starts[i + 1] - r, tails, tail_offsets + r, scale, out + r * Hq * D);
      }
    _tile_release();
  }
}
#endif

template <class T>
static int attend(const T* q, const T* pool, int64_t page_size, int64_t rows, int64_t Hq, int64_t Hk, int64_t D,
                  const int32_t* slots, const int64_t* slot_offsets, const int32_t* prefix_lens, const int32_t* tails,
                  const int64_t* tail_offsets, float scale, T* out) {
  int64_t G = Hq / Hk;
  RowFn<T> fn = row_fn<T>(D, G);
  if (!fn) return 1;
#ifdef USE_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    auto run = D == 32 ? amx_attend<32> : D == 64 ? amx_attend<64> : D == 96 ? amx_attend<96> : D == 128 ? amx_attend<128> : nullptr;
    if (run) {
      run(q, pool, page_size, rows, Hq, Hk, slots, slot_offsets, prefix_lens, tails, tail_offsets, scale, out);
      return 0;
    }
  }
#endif
#pragma omp parallel for schedule(dynamic, 4) collapse(2) num_threads(g_threads) if (g_threads > 1 && rows * Hk > 1)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < Hk; h++) {
      int64_t tail = tail_offsets[r + 1] - tail_offsets[r];
      fn(q + (r * Hq + h * G) * D, pool, page_size, Hk, h, slots + slot_offsets[r], prefix_lens[r],
         tails + tail_offsets[r], prefix_lens[r] + tail, scale, out + (r * Hq + h * G) * D);
    }
  return 0;
}


#define DEFINE(NAME, T)                                                                                               \
  void pl_rms_norm_##NAME(const T* x, T* residual, const T* weight, int64_t rows, int64_t n, float eps, T* y) {       \
    rms_norm(x, residual, weight, rows, n, eps, y);                                                                   \
  }                                                                                                                   \
  void pl_silu_mul_##NAME(const T* gate_up, int64_t rows, int64_t n, T* out) { silu_mul(gate_up, rows, n, out); }     \
  void pl_rope_write_##NAME(const T* q, const T* k, const T* v, int64_t ldq, int64_t ldk, int64_t ldv, int64_t rows,  \
                            int64_t Hq, int64_t Hk, int64_t D, const float* table, const int64_t* positions,         \
                            const int64_t* slots, int64_t page_size, T* q_out, T* pool) {                             \
    rope_write(q, k, v, ldq, ldk, ldv, rows, Hq, Hk, D, table, positions, slots, page_size, q_out, pool);                        \
  }                                                                                                                   \
  int pl_attend_##NAME(const T* q, const T* pool, int64_t page_size, int64_t rows, int64_t Hq, int64_t Hk, int64_t D, \
                       const int32_t* slots, const int64_t* slot_offsets, const int32_t* prefix_lens,                 \
                       const int32_t* tails, const int64_t* tail_offsets, float scale, T* out) {                      \
    return attend(q, pool, page_size, rows, Hq, Hk, D, slots, slot_offsets, prefix_lens, tails, tail_offsets, scale,  \
                  out);                                                                                               \
  }

extern "C" {
DEFINE(bf16, bf16)
DEFINE(f32, float)
}

// ---------------------------------------------------------------- a decoder layer in one call
// The steps of a layer one after another, each the function above: the bits are those of separate calls.

struct Block {  // of block.py, field by field
  int64_t width, hidden, heads, kv_heads, dim, inter;  // width: of the rows that q, k and v are made of
  const void *qkv, *o, *gate_up, *down;                // packed
  const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // or null
  const void *q_norm, *k_norm, *post_norm;                    // the first two: of heads, or null
  float eps, scale;
};

struct Written {  // where the rows stand and where their keys and values go
  const float* table;
  const int64_t *positions, *slots;
  int64_t page_size;
};

struct Seen {  // what each row sees, as `attend` takes it
  const int32_t* slots;
  const int64_t* slot_offsets;
  const int32_t *prefix_lens, *tails;
  const int64_t* tail_offsets;
};

static void linear_of(const bf16* x, int64_t M, int64_t ldx, const void* w, int64_t N, int64_t K, const float* bias, bf16* out) {
  linear_bf16(x, M, ldx, (const bf16*)w, N, K, bias, out);
}
static void linear_of(const float* x, int64_t M, int64_t ldx, const void* w, int64_t N, int64_t K, const float* bias, float* out) {
  pl_linear_f32(x, M, ldx, (const float*)w, N, K, bias, out);
}

// x: [rows, width], normed; the rows' keys and values go to the pool. scratch: [rows, (heads + 2 kv_heads) * dim].
template <class T>
static void block_write(const Block& b, int64_t rows, const T* x, const Written& to, T* pool, T* scratch, T* q_out) {
  int64_t q_dim = b.heads * b.dim, kv_dim = b.kv_heads * b.dim, all = q_dim + 2 * kv_dim;
  linear_of(x, rows, b.width, b.qkv, all, b.width, b.qkv_bias, scratch);
  if (b.q_norm)
    for (int64_t i = 0; i < rows; i++) {
      T *q = scratch + i * all, *k = q + q_dim;
      rms_norm<T>(q, nullptr, (const T*)b.q_norm, b.heads, b.dim, b.eps, q);
      rms_norm<T>(k, nullptr, (const T*)b.k_norm, b.kv_heads, b.dim, b.eps, k);
    }
  rope_write<T>(scratch, scratch + q_dim, scratch + q_dim + kv_dim, all, all, all, rows, b.heads, b.kv_heads, b.dim,
                to.table, to.positions, to.slots, to.page_size, q_out, pool);
}

// q: [rows, heads, dim], of rows whose keys and values are in the pool. residual: [rows, hidden], to which what attention
// adds is added; out: what the MLP adds. scratch: [rows, heads * dim + 2 hidden + 3 inter]. Returns 1, with nothing done,
// for a geometry that has no kernel.
template <class T>
static int block_finish(const Block& b, int64_t rows, const T* q, const Seen& seen, const T* pool, int64_t page_size,
                        T* scratch, T* residual, T* out) {
  int64_t q_dim = b.heads * b.dim;
  T *attended = scratch, *added = attended + rows * q_dim, *normed = added + rows * b.hidden;
  T *gate_up = normed + rows * b.hidden, *acted = gate_up + rows * 2 * b.inter;
  if (attend(q, pool, page_size, rows, b.heads, b.kv_heads, b.dim, seen.slots, seen.slot_offsets, seen.prefix_lens,
             seen.tails, seen.tail_offsets, b.scale, attended))
    return 1;
  linear_of(attended, rows, q_dim, b.o, b.hidden, q_dim, b.o_bias, added);
  rms_norm<T>(added, residual, (const T*)b.post_norm, rows, b.hidden, b.eps, normed);
  linear_of(normed, rows, b.hidden, b.gate_up, 2 * b.inter, b.hidden, b.gate_up_bias, gate_up);
  silu_mul<T>(gate_up, rows, b.inter, acted);
  linear_of(acted, rows, b.inter, b.down, b.hidden, b.inter, b.down_bias, out);
  return 0;
}

// A whole layer whose input norm is its own. added: [rows, hidden], what the layer before adds last. scratch:
// [rows, hidden + heads * dim] and the larger of the two above.
template <class T>
static int block_layer(const Block& b, int64_t rows, const T* added, const T* input_norm, const Written& to,
                       const Seen& seen, T* pool, T* scratch, T* residual, T* out) {
  T *normed = scratch, *q = normed + rows * b.hidden, *rest = q + rows * b.heads * b.dim;
  rms_norm<T>(added, residual, input_norm, rows, b.hidden, b.eps, normed);
  block_write<T>(b, rows, normed, to, pool, rest, q);
  return block_finish<T>(b, rows, q, seen, pool, to.page_size, rest, residual, out);
}

#define SEEN const int32_t *slots, const int64_t *offsets, const int32_t *lens, const int32_t *tails, const int64_t *ends
#define DEFINE_BLOCK(NAME, T)                                                                                         \
  void pl_block_write_##NAME(const Block* b, int64_t rows, const T* x, const float* table, const int64_t* positions,  \
                             const int64_t* to, int64_t page_size, T* pool, T* scratch, T* q_out) {                   \
    block_write<T>(*b, rows, x, {table, positions, to, page_size}, pool, scratch, q_out);                             \
  }                                                                                                                   \
  int pl_block_finish_##NAME(const Block* b, int64_t rows, const T* q, SEEN, const T* pool, int64_t page_size,        \
                             T* scratch, T* residual, T* out) {                                                       \
    return block_finish<T>(*b, rows, q, {slots, offsets, lens, tails, ends}, pool, page_size, scratch, residual, out);\
  }                                                                                                                   \
  int pl_block_layer_##NAME(const Block* b, int64_t rows, const T* added, const T* input_norm, const float* table,    \
                            const int64_t* positions, const int64_t* to, int64_t page_size, SEEN, T* pool,            \
                            T* scratch, T* residual, T* out) {                                                        \
    return block_layer<T>(*b, rows, added, input_norm, {table, positions, to, page_size},                             \
                          {slots, offsets, lens, tails, ends}, pool, scratch, residual, out);                         \
  }

extern "C" {
DEFINE_BLOCK(bf16, bf16)
DEFINE_BLOCK(f32, float)
}

// ---------------------------------------------------------------- latent attention
// Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434): every query head reads the same row of a
// position, whose D elements are the key and whose first DV are the value. The row of a slot starts at slot * D, so the
// page size does not enter. A head's result is made of its own query and the rows in order of position, in the tiles
// above; that heads go through in blocks only shares the loads.

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
    v16 x = load16(s + b * 16) * scale;
    store16(s + b * 16, x);
    most = vmax(most, x);
  }
  float high = first ? -INFINITY : *top;
  for (int i = 0; i < 16; i++) high = std::max(high, most[i]);
  v16 sum = {};
  for (int b = 0; b < groups; b++) {
    v16 x = load16(s + b * 16), e = x == -INFINITY ? v16{} : vexp(x - high);
    store16(s + b * 16, e);
    sum += e;
  }
  float fade = first ? 0.0f : vexp(splat(*top - high))[0];
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
#pragma omp parallel for schedule(dynamic, 1) collapse(2) num_threads(g_threads) if (g_threads > 1 && rows * blocks > 1)
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
#pragma omp parallel for schedule(static) num_threads(g_threads) if (g_threads > 1 && rows > 16)
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
#pragma omp parallel for schedule(static) collapse(2) num_threads(g_threads)
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
#pragma omp parallel num_threads(g_threads)
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

// ---------------------------------------------------------------- expert routing
// DeepSeek-V3's (arXiv 2412.19437, section 2.1.2): sigmoid scores; the correction bias takes part in the choice alone; a group
// counts by its two best; the best experts of the best groups. Of equals the first wins.

static int64_t take_best(float* scores, int64_t n) {  // index of the largest, which is then struck out
  int64_t best = std::max_element(scores, scores + n) - scores;
  scores[best] = -INFINITY;
  return best;
}

static void route_row(const float* logits, int64_t E, const float* bias, int64_t groups, int64_t top_groups, int64_t k,
                      bool normalise, float factor, int64_t* ids, float* weights) {
  int64_t padded = (E + 15) / 16 * 16, size = E / groups;
  std::vector<float> score(padded, 0.0f), choice(E), worth(groups), left(size);
  std::copy(logits, logits + E, score.begin());
  for (int64_t e = 0; e < padded; e += 16) {
    v16 x = load16(&score[e]), t = vexp(x > 0.0f ? -x : x);
    store16(&score[e], x > 0.0f ? 1.0f / (1.0f + t) : t / (1.0f + t));
  }
  for (int64_t e = 0; e < E; e++) choice[e] = score[e] + bias[e];
  for (int64_t g = 0; g < groups; g++) {
    std::copy(&choice[g * size], &choice[g * size] + size, left.begin());
    float first = choice[g * size + take_best(left.data(), size)];
    worth[g] = first + choice[g * size + take_best(left.data(), size)];
  }
  std::vector<char> open(groups, 0);
  for (int64_t i = 0; i < top_groups; i++) open[take_best(worth.data(), groups)] = 1;
  for (int64_t e = 0; e < E; e++) if (!open[e / size]) choice[e] = -INFINITY;
  float sum = 0;
  for (int64_t i = 0; i < k; i++) {
    ids[i] = take_best(choice.data(), E);
    sum += weights[i] = score[ids[i]];
  }
  for (int64_t i = 0; i < k; i++) weights[i] = (normalise ? weights[i] / (sum + 1e-20f) : weights[i]) * factor;
}

extern "C" void pl_route(const float* logits, int64_t rows, int64_t E, const float* bias, int64_t groups,
                         int64_t top_groups, int64_t k, int normalise, float factor, int64_t* ids, float* weights) {
#pragma omp parallel for schedule(static) num_threads(g_threads) if (g_threads > 1 && rows > 16)
  for (int64_t r = 0; r < rows; r++)
    route_row(logits + r * E, E, bias, groups, top_groups, k, normalise, factor, ids + r * k, weights + r * k);
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
