// A decoder layer in one call.
#include "kv_rows.h"
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

static constexpr int64_t ROWS_TOGETHER = 8;  // so many go through a layer in one region; see Layer
static constexpr int64_t SILU_RUN = 256;     // elements of a row that one thread takes

// Runs `work(first, count)` over the rows: shared out in a region, at once elsewhere.
template <class Work>
static inline void share_rows(int64_t rows, Work work) {
  if (omp_get_level() == 0) { work(0, rows); return; }
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; r++) work(r, 1);
}

// silu(gate) * up, [rows, inter]. Shared out in runs, for one row too.
template <class T>
static inline void activate(const T* gate_up, int64_t rows, int64_t inter, T* out) {
  on_threads(rows > 16 ? pl_threads() : 1, [&] {
#pragma omp for schedule(static) collapse(2)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < inter; i += SILU_RUN) {
        const T* gate = gate_up + r * 2 * inter + i;
        silu_run<T>(gate, gate + inter, std::min(SILU_RUN, inter - i), out + r * inter + i);
      }
  });
}

// x: [rows, width], normed; the rows' keys and values go to the pool. scratch: [rows, (heads + 2 kv_heads) * dim].
template <class T, class U>
static void block_write(const Block& b, int64_t rows, const T* x, const Written& to, U* pool, T* scratch, T* q_out) {
  int64_t q_dim = b.heads * b.dim, kv_dim = b.kv_heads * b.dim, all = q_dim + 2 * kv_dim;
  linear(*b.qkv, x, rows, b.width, scratch);
  share_rows(rows, [&](int64_t first, int64_t count) {
    T *q = scratch + first * all, *k = q + q_dim;
    for (int64_t i = 0; b.q_norm && i < count; i++) {
      rms_norm<T>(q + i * all, nullptr, (const T*)b.q_norm, b.heads, b.dim, b.eps, q + i * all);
      rms_norm<T>(k + i * all, nullptr, (const T*)b.k_norm, b.kv_heads, b.dim, b.eps, k + i * all);
    }
    auto write = [&](const int64_t* slots, int64_t page_size, T* pages) {
      rope_write<T>(q, k, k + kv_dim, all, all, all, count, b.heads, b.kv_heads, b.dim, to.table, to.positions + first, slots,
                    page_size, q_out + first * q_dim, pages);
    };
    if constexpr (kCoded<U>) {  // into a page of their own, which is then rounded
      static thread_local std::vector<T> own;
      static thread_local std::vector<int64_t> places;
      own.resize(std::max<size_t>(own.size(), count * 2 * kv_dim));
      while ((int64_t)places.size() < count) places.push_back(places.size());
      write(places.data(), count, own.data());
      round_rows<T>(own.data(), count, b.kv_heads, b.dim, to.slots + first, to.page_size, pool);
    } else write(to.slots + first, to.page_size, pool);
  });
}

// q: [rows, heads, dim], of rows whose keys and values are in the pool. residual: [rows, hidden], to which what attention
// adds is added; normed: [rows, hidden], of the calling thread's own, as residual is; out: what the MLP adds. scratch:
// [rows, heads * dim + hidden + 3 inter]. Returns 1, with nothing done, for a geometry that has no kernel.
template <class T, class U>
static int block_finish(const Block& b, int64_t rows, const T* q, const Seen& seen, const U* pool, int64_t page_size,
                        T* scratch, T* residual, T* normed, T* out) {
  int64_t q_dim = b.heads * b.dim;
  T *attended = scratch, *added = attended + rows * q_dim, *gate_up = added + rows * b.hidden;
  T* acted = gate_up + rows * 2 * b.inter;
  if (attend(q, pool, page_size, rows, b.heads, b.kv_heads, b.dim, seen, b.window, nullptr, b.scale, attended))
    return 1;
  linear(*b.o, attended, rows, q_dim, added);
  rms_norm<T>(added, residual, (const T*)b.post_norm, rows, b.hidden, b.eps, normed);
  linear(*b.gate_up, normed, rows, b.hidden, gate_up);
  activate(gate_up, rows, b.inter, acted);
  linear(*b.down, acted, rows, b.inter, out);
  return 0;
}

// A layer whose input norm is its own. added: [rows, hidden], what the layer before adds last; out: what this one does, which
// may be the same memory.
template <class T, class U>
struct Layer {
  const Block& b;
  int64_t rows;
  const T *added, *input_norm;
  const Written& to;
  const Seen& seen;
  U* pool;
  T *scratch, *residual, *out;  // scratch: [rows, hidden + heads * dim] and the larger of the two above

  // residual: the stream, or the calling thread's copy of it; normed: [rows, hidden], its own.
  int run(T* residual, T* normed) const {
    T *q = scratch + rows * b.hidden, *rest = q + rows * b.heads * b.dim;
    rms_norm<T>(added, residual, input_norm, rows, b.hidden, b.eps, normed);
    block_write<T, U>(b, rows, normed, to, pool, rest, q);
    return block_finish<T, U>(b, rows, q, seen, pool, to.page_size, rest, residual, normed, out);
  }

  // In one region: threads wait for each other where a product's result is needed whole, and nowhere else. Each norms all
  // rows for itself, over its own copy of the stream.
  int run_together() const {
    int failed = 0;  // what each of the threads finds alike
    in_region(pl_threads(), [&] {
      static thread_local std::vector<uint8_t> memory;
      size_t size = rows * b.hidden;
      T* own = (T*)in_lines(memory, 2 * size * sizeof(T));
      memcpy(own, residual, size * sizeof(T));
      int found = run(own, own + size);
#pragma omp master
      {
        failed = found;
        if (!found) memcpy(residual, own, size * sizeof(T));  // others copied it before the first product ended
      }
    });
    return failed;
  }
};

template <class T, class U>
static int block_layer(const Layer<T, U>& layer) {
  return layer.rows <= ROWS_TOGETHER ? layer.run_together() : layer.run(layer.residual, layer.scratch);
}

struct LayerAt {  // of layer_run.py, field by field
  const Block* block;
  const void* input_norm;
  void* pool;
};

// Layers one after another; see Layer.
template <class T, class U>
static int block_layers(const LayerAt* at, int64_t count, int64_t rows, const T* added, const Written& to,
                        const Seen& seen, T* scratch, T* residual, T* out) {
  int failed = 0;
  for (int64_t i = 0; i < count && !failed; i++)
    failed = block_layer<T, U>({*at[i].block, rows, i ? out : added, (const T*)at[i].input_norm, to, seen,
                                (U*)at[i].pool, scratch, residual, out});
  return failed;
}

// U: T, or int8_t for a pool of codes.
#define DEFINE_BLOCK(NAME, T, U)                                                                                      \
  void pl_block_write_##NAME(const Block* b, int64_t rows, const T* x, const float* table, const int64_t* positions,  \
                             const int64_t* to, int64_t page_size, U* pool, T* scratch, T* q_out) {                   \
    block_write<T, U>(*b, rows, x, {table, positions, to, page_size}, pool, scratch, q_out);                          \
  }                                                                                                                   \
  int pl_block_finish_##NAME(const Block* b, int64_t rows, const T* q, SEEN, const U* pool, int64_t page_size,        \
                             T* scratch, T* residual, T* out) {                                                       \
    return block_finish<T, U>(*b, rows, q, {slots, offsets, lens, tails, ends}, pool, page_size,                      \
                              scratch + rows * b->hidden, residual, scratch, out);                                    \
  }                                                                                                                   \
  int pl_block_layers_##NAME(const LayerAt* at, int64_t count, int64_t rows, const T* added, const float* table,      \
                             const int64_t* positions, const int64_t* to, int64_t page_size, SEEN, T* scratch,        \
                             T* residual, T* out) {                                                                   \
    return block_layers<T, U>(at, count, rows, added, {table, positions, to, page_size},                              \
                              {slots, offsets, lens, tails, ends}, scratch, residual, out);                           \
  }

extern "C" {
DEFINE_BLOCK(bf16, bf16, bf16)
DEFINE_BLOCK(f32, float, float)
DEFINE_BLOCK(kv8_bf16, bf16, int8_t)
DEFINE_BLOCK(kv8_f32, float, int8_t)
}
