// How a pool keeps a head's row of keys or values: D numbers of T, or D codes of 8 bits and a float32 scale behind them
// (integer_kv.cpp writes them). U is what the pool's elements are: T or int8_t. A code times its scale, rounded once to T, is
// the number that attention goes on with.
#pragma once
#include "common.h"

static constexpr int64_t SCALE_BYTES = sizeof(float);

template <class U>
static constexpr bool kCoded = std::is_same_v<U, int8_t>;

template <class U>
static constexpr int64_t kept_width(int64_t D) { return kCoded<U> ? D + SCALE_BYTES : D; }  // elements

// Where the keys of one head lie, for slots one after another: neighbours of a page need no division.
template <class U>
struct Places {
  const U* first;  // the head's key in slot 0
  const int64_t row;  // elements from slot to slot, of all heads
  const uint32_t page;  // slots
  uint32_t last = UINT32_MAX - 1, offset = 0;
  const U* key = nullptr;

  Places(const U* pool, int64_t page_size, int64_t Hk, int64_t head, int64_t D)
      : first(pool + head * kept_width<U>(D)), row(Hk * kept_width<U>(D)), page((uint32_t)page_size) {}

  int64_t to_value() const { return page * row; }
  const U* at(uint32_t slot) {
    if (slot == last + 1 && ++offset < page) key += row;
    else {
      offset = slot % page;
      key = first + (slot / page * 2 * (int64_t)page + offset) * row;
    }
    last = slot;
    return key;
  }
};

// Asks for the lines of a head's row; rows lie too far apart for the processor to guess. Always inline, and so is whoever
// only asks: g++ takes a function that does nothing else for one without an effect, and leaves its calls out.
template <class U>
static inline __attribute__((always_inline)) void ask_for(const U* row, int64_t D) {
  const int64_t bytes = kept_width<U>(D) * sizeof(U);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)row + at, 0, 2);
}

static inline float scale_of(const int8_t* row, int64_t D) {
  float scale; memcpy(&scale, row + D, SCALE_BYTES);
  return scale;
}

typedef int8_t i8x16 __attribute__((vector_size(16), aligned(1), may_alias));
static inline v16 coded16(const int8_t* codes, float scale) {
#ifdef USE_AVX512BF16
  __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes));
  return (v16)_mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_set1_ps(scale));
#else
  return __builtin_convertvector(*(const i8x16*)codes, v16) * scale;
#endif
}

#ifdef USE_AVX512BF16
// Elements d..d+31 of a row of D as bf16. The instruction takes subnormal numbers for 0: there are none, for no scale is one.
static inline __m512i numbers32(const bf16* row, int64_t, int64_t d) { return _mm512_loadu_si512(row + d); }
static inline __m512i numbers32(const int8_t* row, int64_t D, int64_t d) {
  float scale = scale_of(row, D);
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)coded16(row + d + 16, scale), (__m512)coded16(row + d, scale));
}
#endif

// A row of codes as numbers.
template <int D, class T>
static inline void unround_row(const int8_t* row, T* out) {
#ifdef USE_AVX512BF16
  if constexpr (std::is_same_v<T, bf16> && D % 32 == 0) {
    for (int d = 0; d < D; d += 32) _mm512_storeu_si512(out + d, numbers32(row, D, d));
    return;
  }
#endif
  float scale = scale_of(row, D);
  for (int d = 0; d < D; d += 16) store16(out + d, coded16(row + d, scale));
}
