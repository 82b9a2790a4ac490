// Counts the bytes of malloc's blocks from 16 KiB on, in all threads, as LD_PRELOAD.
//
// The profiler misses what other threads free, such as gloo's.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const size_t LEAST = 16384;
static atomic_long live, peak;

static void *(*next_malloc)(size_t), *(*next_realloc)(void *, size_t);
static int (*next_aligned)(void **, size_t, size_t);
static void *(*next_calloc)(size_t, size_t);
static void (*next_free)(void *);

// dlsym itself allocates before the functions are found.
static char early[65536];
static size_t used;

static void find(void) {
  static int busy;
  if (next_malloc || busy) return;
  busy = 1;
  next_free = dlsym(RTLD_NEXT, "free");
  next_realloc = dlsym(RTLD_NEXT, "realloc");
  next_calloc = dlsym(RTLD_NEXT, "calloc");
  next_aligned = dlsym(RTLD_NEXT, "posix_memalign");
  next_malloc = dlsym(RTLD_NEXT, "malloc");
  busy = 0;
}

static int is_early(void *p) { return (char *)p >= early && (char *)p < early + sizeof early; }

static void count(void *p, long sign) {
  size_t size = p ? malloc_usable_size(p) : 0;
  if (size < LEAST) return;
  long now = atomic_fetch_add(&live, sign * (long)size) + sign * (long)size;
  long before = atomic_load(&peak);
  while (now > before && !atomic_compare_exchange_weak(&peak, &before, now)) {
  }
}

static void *take_early(size_t size) {
  void *p = early + used;
  used += (size + 15) & ~(size_t)15;
  return p;
}

void *malloc(size_t size) {
  find();
  if (!next_malloc) return take_early(size);
  void *p = next_malloc(size);
  count(p, 1);
  return p;
}

void free(void *p) {
  if (is_early(p)) return;
  find();
  count(p, -1);
  next_free(p);
}

void *calloc(size_t number, size_t size) {
  find();
  if (!next_malloc) return take_early(number * size);  // zeros: nothing is taken twice
  void *p = next_calloc(number, size);
  count(p, 1);
  return p;
}

void *realloc(void *old, size_t size) {
  find();
  if (is_early(old)) {
    size_t left = (size_t)(early + sizeof early - (char *)old);
    void *p = malloc(size);
    return memcpy(p, old, size < left ? size : left);
  }
  count(old, -1);
  void *p = next_realloc(old, size);
  count(p, 1);
  return p;
}

int posix_memalign(void **p, size_t alignment, size_t size) {
  find();
  int failed = next_aligned(p, alignment, size);
  if (!failed) count(*p, 1);
  return failed;
}

long live_bytes(void) { return atomic_load(&live); }

long peak_bytes(void) { return atomic_load(&peak); }

void reset_peak(void) { atomic_store(&peak, atomic_load(&live)); }
