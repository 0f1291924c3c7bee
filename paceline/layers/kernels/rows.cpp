// Rows moved between a paged pool and flat memory, and the measure of memory bandwidth.
#include "common.h"

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

// Reads n floats as fast as plain loads go; the benchmark's measure of memory bandwidth.
float pl_read(const float* x, int64_t n) {
  float total = 0;
#pragma omp parallel for schedule(static) num_threads(pl_threads()) reduction(+ : total)
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
}
