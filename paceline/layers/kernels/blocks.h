// Blocks of a matrix product that linear layers of every kind are made of. Weights [N, K] are packed once. bf16:
// [N/16][K/32][16 pairs of k][16 n][2], zero padded (the AMX and VNNI order). fp32: [N/16][K][16].
#pragma once
#include "common.h"

template <class O>
static inline void store_cols(O* out, v16 acc, const float* bias, int64_t n0, int64_t N) {
  if (n0 + 16 <= N) {
    store16(out + n0, bias ? acc + load16(bias + n0) : acc);
    return;
  }
  float t[16];
  store16(t, acc);
  int64_t count = std::min<int64_t>(16, N - n0);
  for (int64_t i = 0; i < count; i++) put(out + n0 + i, bias ? t[i] + bias[n0 + i] : t[i]);
}

// Slabs: the inner dimension in equal runs, each a sum of its own from zero. The sums are added in the tree of
// parallel/slabs.py: a branch is added to its left neighbour as soon as its last slab is there.
static constexpr int OPEN_BRANCHES = 3;  // that the tree over 8 slabs leaves open at most

// How many branches of more than one slab end with slab s.
static inline int branches_ended(int64_t slabs, int64_t s) {
  int ended = 0;
  for (int64_t first = 0, end = slabs; end - first > 1;) {
    ended += s == end - 1;
    int64_t middle = first + (end - first + 1) / 2;
    if (s < middle) end = middle;
    else first = middle;
  }
  return ended;
}

// Branches that wait for what stands right of them, each of up to 16 vectors.
struct Branches {
  v16 open[OPEN_BRANCHES][16];
  int count = 0;
  // sums: of slab s; they become those of the largest branch that ends with it, after the last slab the whole.
  void add(int64_t slabs, int64_t s, v16* sums, int vectors) {
    for (int ended = branches_ended(slabs, s); ended > 0; ended--) {
      count--;
      for (int i = 0; i < vectors; i++) sums[i] = open[count][i] + sums[i];
    }
    if (s + 1 == slabs) return;
    for (int i = 0; i < vectors; i++) open[count][i] = sums[i];
    count++;
  }
};

// Columns [n0, n0 + 16 NB) of M rows with vector registers; M <= 6 keeps M * NB accumulators in registers.
template <int M, int NB, class O>
static void block_f32(const float* x, int64_t ldx, const float* w, int64_t K, O* out, int64_t ldo, const float* bias,
                      int64_t n0, int64_t N, int64_t slabs = 1) {
  v16 sums[M * NB];
  Branches branches;
  for (int64_t s = 0, k = 0, run = K / slabs; s < slabs; s++) {
    v16 acc[M * NB] = {};
    for (int64_t end = k + run; k < end; k++)
      for (int b = 0; b < NB; b++) {
        v16 wv = load16(w + (b * K + k) * 16);
        for (int m = 0; m < M; m++) acc[m * NB + b] += wv * x[m * ldx + k];
      }
    for (int i = 0; i < M * NB; i++) sums[i] = acc[i];
    branches.add(slabs, s, sums, M * NB);
  }
  for (int m = 0; m < M; m++)
    for (int b = 0; b < NB; b++) store_cols(out + m * ldo, sums[m * NB + b], bias, n0 + b * 16, N);
}

template <int M, int NB, class O>
static void block_bf16(const bf16* x, int64_t ldx, const bf16* w, int64_t KB, O* out, int64_t ldo, const float* bias,
                       int64_t n0, int64_t N, int64_t slabs = 1) {
  v16 sums[M * NB];
  Branches branches;
  for (int64_t s = 0, kp = 0, run = KB / slabs * 16; s < slabs; s++) {
    v16 acc[M * NB] = {};
    for (int64_t end = kp + run; kp < end; kp++)
      for (int b = 0; b < NB; b++) {
        const bf16* wp = w + ((int64_t)b * KB * 16 + kp) * 32;
        ask_ahead(wp, M == 1 ? ONE_ROW_AHEAD : AHEAD);
#ifdef USE_AVX512BF16
        __m512bh wv = (__m512bh)_mm512_loadu_si512(wp);
        for (int m = 0; m < M; m++) {
          uint32_t pair; memcpy(&pair, x + m * ldx + kp * 2, 4);
          v16& sum = acc[m * NB + b];
          sum = (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), wv);
        }
#else
        u16x32 both = *(const u16x32*)wp;
        v16 even = (v16)(both << 16), odd = (v16)(both & 0xffff0000u);
        for (int m = 0; m < M; m++) {
          acc[m * NB + b] += even * to_float(x[m * ldx + kp * 2]);
          acc[m * NB + b] += odd * to_float(x[m * ldx + kp * 2 + 1]);
        }
#endif
      }
    for (int i = 0; i < M * NB; i++) sums[i] = acc[i];
    branches.add(slabs, s, sums, M * NB);
  }
  for (int m = 0; m < M; m++)
    for (int b = 0; b < NB; b++) store_cols(out + m * ldo, sums[m * NB + b], bias, n0 + b * 16, N);
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

// The same of 7 rows to 12 where CALL is of one block of 16 columns, whose sums fit the registers then too.
#define BY_MORE_ROWS(M, CALL)                                     \
  switch (M) {                                                    \
    case 7: { constexpr int R = 7; CALL; break; }                 \
    case 8: { constexpr int R = 8; CALL; break; }                 \
    case 9: { constexpr int R = 9; CALL; break; }                 \
    case 10: { constexpr int R = 10; CALL; break; }               \
    case 11: { constexpr int R = 11; CALL; break; }               \
    case 12: { constexpr int R = 12; CALL; break; }               \
    default: BY_ROWS(M, CALL)                                     \
  }

// Several rows take one block of columns after the other: memory is read in one stream, and while it comes, all that 12 rows
// need of it is computed. One row is done sooner than the weights come, and for many the loads of two blocks are shared.
static constexpr int64_t MORE_ROWS = 12;
static inline bool one_by_one(int64_t M) { return M > 1 && M <= 64; }

// Runs `work(row, rows)` over M rows, at most `most` at once, as even as they go.
template <class Work>
static inline void in_turns(int64_t M, int64_t most, Work work) {
  int64_t turns = (M + most - 1) / most;
  for (int64_t turn = 0; turn < turns; turn++) {
    int64_t row = M * turn / turns;
    work(row, M * (turn + 1) / turns - row);
  }
}

#ifdef USE_AMX
// g++ 12 does not see that a tile's load reads memory, nor that all 64 bytes of a configuration are read. Without an empty
// assembly that says so it may keep what was stored before in registers, or leave it out.
static inline void before_tiles() { asm volatile("" ::: "memory"); }

struct alignas(64) TileConfig { uint8_t palette, start_row, reserved[14]; uint16_t colsb[16]; uint8_t rows[16]; };

static void tile_configure(TileConfig c) {
  asm volatile("" : "+m"(c));
  _tile_loadconfig(&c);
  asm volatile("" ::"m"(c));
}

// Tiles: 0-3 sums (2 row blocks x 2 column blocks), 4-5 x, 6-7 w. rows: of the first and second row block. bytes: of k.
static void amx_configure(int rows0, int rows1, int bytes = 64) {
  TileConfig c = {};
  c.palette = 1;
  c.rows[0] = c.rows[1] = c.rows[4] = rows0;
  c.rows[2] = c.rows[3] = c.rows[5] = rows1;
  c.rows[6] = c.rows[7] = bytes / 4;
  for (int t = 0; t < 8; t++) c.colsb[t] = !c.rows[t] ? 0 : t == 4 || t == 5 ? bytes : 64;  // an unused tile has neither
  tile_configure(c);
}

template <class O>
static void amx_store(const float* tile, int rows, O* out, int64_t ldo, const float* bias, int64_t n0, int64_t N) {
  for (int m = 0; m < rows; m++) store_cols(out + m * ldo, load16(tile + m * 16), bias, n0, N);
}

// Up to 32 rows, 32 columns (two = whether the second 16 exist).
template <class O>
static void amx_block(const bf16* x, int64_t ldx, int rows0, int rows1, const bf16* w, int64_t KB, bool two, O* out,
                      int64_t ldo, const float* bias, int64_t n0, int64_t N, int64_t slabs = 1) {
  alignas(64) float sums[4][256];
  Branches branches[4];
  const bf16* x1 = x + 16 * ldx;
  const bf16* w1 = w + KB * 512;
  before_tiles();
  for (int64_t s = 0, kb = 0, run = KB / slabs; s < slabs; s++) {
    _tile_zero(0); _tile_zero(1);
    if (rows1) { _tile_zero(2); _tile_zero(3); }
    for (int64_t end = kb + run; kb < end; kb++) {
      _tile_loadd(4, x + kb * 32, ldx * 2);
      _tile_loadd(6, w + kb * 512, 64);
      for (int i = 0; i < 512; i += 32) ask_ahead(w + kb * 512 + i);
      for (int i = 0; two && i < 512; i += 32) ask_ahead(w1 + kb * 512 + i);
      _tile_dpbf16ps(0, 4, 6);
      if (two) { _tile_loadd(7, w1 + kb * 512, 64); _tile_dpbf16ps(1, 4, 7); }
      if (rows1) {
        _tile_loadd(5, x1 + kb * 32, ldx * 2);
        _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(3, 5, 7);
      }
    }
    // A tile's number is written out: g++ 12 takes no name for it.
    _tile_stored(0, sums[0], 64); branches[0].add(slabs, s, (v16*)sums[0], rows0);
    if (two) { _tile_stored(1, sums[1], 64); branches[1].add(slabs, s, (v16*)sums[1], rows0); }
    if (rows1) { _tile_stored(2, sums[2], 64); branches[2].add(slabs, s, (v16*)sums[2], rows1); }
    if (rows1 && two) { _tile_stored(3, sums[3], 64); branches[3].add(slabs, s, (v16*)sums[3], rows1); }
  }
  amx_store(sums[0], rows0, out, ldo, bias, n0, N);
  if (two) amx_store(sums[1], rows0, out, ldo, bias, n0 + 16, N);
  if (rows1) {
    amx_store(sums[2], rows1, out + 16 * ldo, ldo, bias, n0, N);
    if (two) amx_store(sums[3], rows1, out + 16 * ldo, ldo, bias, n0 + 16, N);
  }
}
#endif

// What a thread has of tile registers while it multiplies.
struct Tiles {
#ifdef USE_AMX
  int rows0 = -1, rows1 = -1, bytes = 0;
  void configure(int r0, int r1, int of_k = 64) {
    if (r0 != rows0 || r1 != rows1 || of_k != bytes) amx_configure(rows0 = r0, rows1 = r1, bytes = of_k);
  }
  ~Tiles() { _tile_release(); }
#endif
};

// 32 columns from n0 on (two: whether the second 16 exist), of any number of rows.
template <class O>
static void panel_of(Tiles&, const float* x, int64_t M, int64_t ldx, const float* w, int64_t K, bool two, O* out,
                     const float* bias, int64_t n0, int64_t N, int64_t slabs = 1) {
  for (int64_t m = 0; m < M; m += 6) {
    const float* xm = x + m * ldx;
    O* om = out + m * N;
    if (two) { BY_ROWS(M - m, (block_f32<R, 2>(xm, ldx, w, K, om, N, bias, n0, N, slabs))) }
    else { BY_ROWS(M - m, (block_f32<R, 1>(xm, ldx, w, K, om, N, bias, n0, N, slabs))) }
  }
}

// The same of bf16. x: padded with zeros to a multiple of 32 of k.
template <class O>
static void panel_of(Tiles& tiles, const bf16* x, int64_t M, int64_t ldx, const bf16* w, int64_t K, bool two, O* out,
                     const float* bias, int64_t n0, int64_t N, int64_t slabs = 1) {
  int64_t KB = (K + 31) / 32;
#ifdef USE_AMX
  for (int64_t m = 0; m < M; m += 32) {
    int r0 = std::min<int64_t>(16, M - m), r1 = std::max<int64_t>(0, std::min<int64_t>(16, M - m - 16));
    tiles.configure(r0, r1);
    amx_block(x + m * ldx, ldx, r0, r1, w, KB, two, out + m * N, N, bias, n0, N, slabs);
  }
#else
  (void)tiles;
#ifdef USE_AVX512BF16
  if (one_by_one(M)) {
    in_turns(M, MORE_ROWS, [&](int64_t m, int64_t rows) {
      for (int b = 0; b <= two; b++)
        BY_MORE_ROWS(rows, (block_bf16<R, 1>(x + m * ldx, ldx, w + b * KB * 512, KB, out + m * N, N, bias, n0 + 16 * b, N, slabs)))
    });
    return;
  }
#endif
  for (int64_t m = 0; m < M; m += 6) {
    const bf16* xm = x + m * ldx;
    O* om = out + m * N;
    if (two) { BY_ROWS(M - m, (block_bf16<R, 2>(xm, ldx, w, KB, om, N, bias, n0, N, slabs))) }
    else { BY_ROWS(M - m, (block_bf16<R, 1>(xm, ldx, w, KB, om, N, bias, n0, N, slabs))) }
  }
#endif
}

// Rows of bf16 as `panel_of` takes them: x itself, or a copy in `memory`, whose stride ldx then is.
static inline const bf16* padded_rows(const bf16* x, int64_t M, int64_t K, int64_t& ldx, std::vector<bf16>& memory) {
  if (K % 32 == 0) return x;
  int64_t stride = (K + 31) / 32 * 32;  // tiny models only
  memory.assign(M * stride, 0);
  for (int64_t m = 0; m < M; m++) memcpy(&memory[m * stride], x + m * ldx, K * sizeof(bf16));
  ldx = stride;
  return memory.data();
}
