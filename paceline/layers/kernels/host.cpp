// What the kernels know of this host: the instruction set that they were built for, and how many threads they may use.
#include "common.h"
#ifdef USE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

static int g_threads = 1;  // where the cores are not shared
static const volatile uint8_t* g_busy = nullptr;
static int g_slots = 0, g_own = 0, g_cores = 1;
static volatile bool g_alone = false;  // shared cores are crowded by others: a region that waits for a helper waits long

extern "C" {

// Cores that are shared go to the processes that are busy, in equal parts; what is left over goes to the first of them.
int pl_threads() {
  if (!g_busy) return g_threads;
  if (g_alone) return 1;
  int busy = 1, before = 0;
  for (int i = 0; i < g_slots; i++)
    if (i != g_own && g_busy[i]) { busy++; before += i < g_own; }
  int threads = g_cores / busy + (before < g_cores % busy);
  return threads > 1 ? threads : 1;
}

void pl_set_threads(int n) { g_busy = nullptr; g_threads = n > 1 ? n : 1; }

// From now on threads follow `busy`, a byte of shared memory for each of `slots` processes of this host, of which `own` is
// this one's; it counts as busy whatever its byte says.
void pl_share_cores(const uint8_t* busy, int slots, int own, int cores) {
  g_slots = slots; g_own = own; g_cores = cores; g_busy = busy;
}

// Where cores are shared: whether regions are to run on the calling thread alone until further notice.
void pl_work_alone(int alone) { g_alone = alone != 0; }

int pl_init() {
#ifdef USE_AMX
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? 0 : 1;  // the kernel grants tile state once per process
#else
  return 0;
#endif
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
