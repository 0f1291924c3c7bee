// What the kernels know of this host: the instruction set that they were built for, and how many threads they may use.
#include "common.h"
#ifdef USE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct Crowded {  // over so many nanoseconds of regions, by the share of them that is missed; then so many of the threads
  int64_t over_ns;
  double share, fewer;
};

static int g_threads = 1;  // where the cores are not shared
static const volatile uint8_t* g_busy = nullptr;
static int g_slots = 0, g_own = 0, g_cores = 1;
static volatile int g_most = 0;           // threads where shared cores are crowded by others; 0: they are not
static int64_t g_took = 0, g_missed = 0;  // of the regions since they were last asked for: see note_region
static Crowded g_crowded = {0, 1, 1};

bool notes_regions() { return g_busy; }

// Where cores are shared, one thread calls the kernels. A step may be hundreds of regions: one that finds the cores crowded
// goes on with fewer threads at once.
void note_region(int threads, int64_t took_ns, int64_t missed_ns) {
  g_took += took_ns;
  g_missed += missed_ns;
  if (!g_most && g_took > g_crowded.over_ns && g_missed > g_crowded.share * g_took)
    g_most = std::max(1, (int)(g_crowded.fewer * threads));
}

extern "C" {

// Cores that are shared go to the processes that are busy, in equal parts; what is left over goes to the first of them.
int pl_threads() {
  if (!g_busy) return g_threads;
  int busy = 1, before = 0;
  for (int i = 0; i < g_slots; i++)
    if (i != g_own && g_busy[i]) { busy++; before += i < g_own; }
  int threads = g_cores / busy + (before < g_cores % busy);
  if (g_most && threads > g_most) threads = g_most;
  return threads > 1 ? threads : 1;
}

void pl_set_threads(int n) { g_busy = nullptr; g_threads = n > 1 ? n : 1; }

// From now on threads follow `busy`, a byte of shared memory for each of `slots` processes of this host, of which `own` is
// this one's; it counts as busy whatever its byte says. The rest: see Crowded.
void pl_share_cores(const uint8_t* busy, int slots, int own, int cores, int64_t over_ns, double share, double fewer) {
  g_crowded = {over_ns, share, fewer};
  g_slots = slots; g_own = own; g_cores = cores; g_busy = busy;
}

// Where cores are shared: a region begins with no more than `most` threads until further notice, or any number where it is 0.
void pl_limit_threads(int most) { g_most = most; }

// Nanoseconds of the regions of several threads that ended since the last call, and those that their threads missed.
void pl_take_regions(int64_t* took, int64_t* missed) {
  *took = g_took, *missed = g_missed;
  g_took = g_missed = 0;
}

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
