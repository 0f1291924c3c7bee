// The AMX instructions that integer_tiles.h and blocks.h use, written out, for hosts without them. Included before any source.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig fake_loadconfig
#define _tile_release fake_release
#define _tile_zero fake_zero
#define _tile_loadd fake_loadd
#define _tile_stored fake_stored
#define _tile_dpbsud fake_dpbsud
#define _tile_dpbssd fake_dpbssd
#define _tile_dpbf16ps fake_dpbf16ps

// The thread has one set, as in a processor: unoptimised, one source calls functions that the linker took from another.
inline thread_local uint8_t fake_tiles[8][16][64], fake_config[64];
static int fake_rows(int tile) { return fake_config[48 + tile]; }
static int fake_bytes(int tile) { return fake_config[16 + 2 * tile]; }
static void fake_loadconfig(const void* config) { memcpy(fake_config, config, 64); }
static void fake_release() { memset(fake_config, 0, 64); }
static void fake_zero(int tile) { memset(fake_tiles[tile], 0, sizeof fake_tiles[tile]); }
static void fake_loadd(int tile, const void* from, int64_t stride) {
  fake_zero(tile);
  for (int r = 0; r < fake_rows(tile); r++) memcpy(fake_tiles[tile][r], (const uint8_t*)from + r * stride, fake_bytes(tile));
}
static void fake_stored(int tile, void* to, int64_t stride) {
  for (int r = 0; r < fake_rows(tile); r++) memcpy((uint8_t*)to + r * stride, fake_tiles[tile][r], fake_bytes(tile));
}
template <class Right>
static void fake_bytes_product(int sum, int a, int b) {  // signed by bytes of that type
  for (int m = 0; m < fake_rows(a); m++)
    for (int n = 0; n < fake_bytes(b) / 4; n++) {
      int32_t total; memcpy(&total, &fake_tiles[sum][m][4 * n], 4);
      for (int k = 0; k < fake_bytes(a); k++)
        total += (int8_t)fake_tiles[a][m][k] * (int32_t)(Right)fake_tiles[b][k / 4][4 * n + k % 4];
      memcpy(&fake_tiles[sum][m][4 * n], &total, 4);
    }
}
static void fake_dpbsud(int sum, int a, int b) { fake_bytes_product<uint8_t>(sum, a, b); }
static void fake_dpbssd(int sum, int a, int b) { fake_bytes_product<int8_t>(sum, a, b); }
static void fake_dpbf16ps(int sum, int a, int b) {  // the two elements of pairs apart, as the instruction does
  auto number = [](const uint8_t* bf16) {
    uint16_t half; memcpy(&half, bf16, 2);
    uint32_t bits = (uint32_t)half << 16;
    float value; memcpy(&value, &bits, 4);
    return value;
  };
  for (int m = 0; m < fake_rows(a); m++)
    for (int n = 0; n < fake_bytes(b) / 4; n++) {
      float total, apart[2] = {}; memcpy(&total, &fake_tiles[sum][m][4 * n], 4);
      for (int k = 0; k < fake_bytes(a) / 2; k++)
        apart[k % 2] = __builtin_fmaf(number(&fake_tiles[a][m][2 * k]), number(&fake_tiles[b][k / 2][4 * n + k % 2 * 2]), apart[k % 2]);
      total += apart[0] + apart[1];
      memcpy(&fake_tiles[sum][m][4 * n], &total, 4);
    }
}
