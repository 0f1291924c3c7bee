// A decoder layer in one call.
#include "steps.h"

// The steps of a layer one after another, each the function above: the bits are those of separate calls.

struct Block {  // of block.py, field by field
  int64_t width, hidden, heads, kv_heads, dim, inter;  // width: of the rows that q, k and v are made of
  const Matrix *qkv, *o, *gate_up, *down;
  const void *q_norm, *k_norm, *post_norm;  // the first two: of heads, or null
  float eps, scale;
  int64_t window;  // positions that a row sees; 0: all
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

// x: [rows, width], normed; the rows' keys and values go to the pool. scratch: [rows, (heads + 2 kv_heads) * dim].
template <class T>
static void block_write(const Block& b, int64_t rows, const T* x, const Written& to, T* pool, T* scratch, T* q_out) {
  int64_t q_dim = b.heads * b.dim, kv_dim = b.kv_heads * b.dim, all = q_dim + 2 * kv_dim;
  linear(*b.qkv, x, rows, b.width, scratch);
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
             seen.tails, seen.tail_offsets, b.window, nullptr, b.scale, attended))
    return 1;
  linear(*b.o, attended, rows, q_dim, added);
  rms_norm<T>(added, residual, (const T*)b.post_norm, rows, b.hidden, b.eps, normed);
  linear(*b.gate_up, normed, rows, b.hidden, gate_up);
  silu_mul<T>(gate_up, rows, b.inter, acted);
  linear(*b.down, acted, rows, b.inter, out);
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
