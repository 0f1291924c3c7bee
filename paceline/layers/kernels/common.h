// Row-invariant CPU kernels (docs/internals/exactness.md): every output element is computed by one fixed sequence of operations that
// depends on its own row and the weights alone. How many rows there are, which neighbours they have, how many
// threads run, where a key lies in the pool: none of it changes a bit.
//
// Plain C ABI, called through ctypes. T is bf16 (stored as uint16_t) or float. Compiled for the host's instruction set:
//   AMX-BF16 > AVX512-BF16 > any (GCC vector extensions) for bf16 products; vector extensions for fp32.
#pragma once
#include <omp.h>

#include <time.h>

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
#endif

typedef uint16_t bf16;
typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16x32 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));

// How many threads a parallel region begins with now (host.cpp). The calling thread's own OpenMP setting is not what
// counts, and no bit depends on the number.
extern "C" int pl_threads();

static inline int64_t clock_ns(clockid_t clock) {
  timespec at;
  clock_gettime(clock, &at);
  return at.tv_sec * 1000000000L + at.tv_nsec;
}

// Whether somebody wants to know what threads miss (host.cpp).
bool notes_regions();
// A parallel region of several threads took took_ns, for missed_ns of which one of them was off its core, or came late.
void note_region(int threads, int64_t took_ns, int64_t missed_ns);

// Runs `work` in a parallel region of its own and notes what the region waited for. Threads that wait for each other look
// for the end of that wait all the time, so that what a thread misses is what its core did for somebody else.
template <class Work>
static inline void in_region(int threads, Work work) {
  const bool noted = threads > 1 && notes_regions();
  int64_t began = noted ? clock_ns(CLOCK_MONOTONIC) : 0, missed = 0;
#pragma omp parallel num_threads(threads) reduction(max : missed)
  {
    int64_t ran = noted ? clock_ns(CLOCK_THREAD_CPUTIME_ID) : 0;
    work();
    if (noted) missed = clock_ns(CLOCK_MONOTONIC) - began - (clock_ns(CLOCK_THREAD_CPUTIME_ID) - ran);
  }
  if (noted) note_region(threads, clock_ns(CLOCK_MONOTONIC) - began, missed);
}

// Runs `work`, which shares its loops out with `omp for`: on all threads of the region that the caller is in, each of which
// has come here, or else on `threads` of its own.
template <class Work>
static inline void on_threads(int threads, Work work) {
  if (omp_get_level() > 0) work();
  else in_region(threads, work);
}

// Runs `work(row)` for each row: on the calling thread in a region, or where there are too few rows for one.
template <class Work>
static inline void each_row(int64_t rows, Work work) {
  if (rows <= 16 || omp_get_level() > 0) {
    for (int64_t r = 0; r < rows; r++) work(r);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(pl_threads())
  for (int64_t r = 0; r < rows; r++) work(r);
}

static inline float to_float(bf16 x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }
static inline float to_float(float x) { return x; }
static inline void put(bf16* p, float f) {  // round to nearest even; NaN stays NaN
  uint32_t u; memcpy(&u, &f, 4);
  *p = (f != f) ? 0x7fc0 : (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline void put(float* p, float f) { *p = f; }
static inline v16 load16(const float* p) { return *(const v16*)p; }
// 16 halves to lanes of 32 bits and back. Compilers make several instructions of what has one.
static inline u16x32 widen(const bf16* p) {
#ifdef USE_AVX512BF16
  return (u16x32)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#else
  return __builtin_convertvector(*(const h16*)p, u16x32);
#endif
}
static inline void narrow(bf16* p, u16x32 u) {
#ifdef USE_AVX512BF16
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)u));
#else
  *(h16*)p = __builtin_convertvector(u, h16);
#endif
}
static inline v16 load16(const bf16* p) { return (v16)(widen(p) << 16); }
static inline void store16(float* p, v16 x) { *(v16*)p = x; }
static inline void store16(bf16* p, v16 x) {
  u16x32 u = (u16x32)x;
  narrow(p, (u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
// Asks for what a product reads next of its weights: the processor looks no further than the end of a small page by itself.
// In bytes: of numbers that are multiplied as they lie by one row, and of all others.
#ifdef USE_AMX
static constexpr int64_t AHEAD = 4096, ONE_ROW_AHEAD = AHEAD;
#else
static constexpr int64_t AHEAD = 8192, ONE_ROW_AHEAD = 2560;
#endif
// Always inline: g++ 12 leaves out calls of a function that does nothing else.
static inline __attribute__((always_inline)) void ask_ahead(const void* weights, int64_t ahead = AHEAD) {
  __builtin_prefetch((const char*)weights + ahead, 0, 2);
}
// Room for `bytes` in `memory`, from the start of a cache line on: what lies across two lines is loaded twice.
static inline uint8_t* in_lines(std::vector<uint8_t>& memory, size_t bytes) {
  if (memory.size() < bytes + 63) memory.resize(bytes + 63);
  return (uint8_t*)(((uintptr_t)memory.data() + 63) / 64 * 64);
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

static constexpr float LOG2_E = 1.44269504f;  // softmaxes are of powers of 2: scores are multiplied by it beforehand
// 2^x for x <= 0, exactly 1 for 0; relative error below 2e-7. What is below -125 counts as that.
static inline v16 vexp2(v16 x) {
  typedef int32_t i32x16 __attribute__((vector_size(64)));
  x = vmax(x, splat(-125.0f));
  v16 near = x + 12582912.0f;  // its last bits are the integer next to x
  v16 f = x - (near - 12582912.0f);
  v16 p = splat(1.32647296e-3f);
  p = p * f + 9.67151392e-3f;
  p = p * f + 5.55073358e-2f;
  p = p * f + 2.40222424e-1f;
  p = p * f + 6.93147004e-1f;
  p = p * f + 1.0f;
  return (v16)((i32x16)p + ((i32x16)near << 23));
}
