// A pool of threads that sleep between calls. A call is a list of phases, run one after the other; a phase is cut into tasks.
// Each thread has its own range of a phase's tasks and takes tasks of the other ranges when its own is empty. A phase therefore
// ends when its last task ends: a thread that the system has descheduled delays it only while it holds a task. A thread that finds
// no task polls its own range alone, since each look at a range makes its owner's next claim slower.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { MAX_THREADS = 128, PATIENCE = 4000 };  // PATIENCE: polls before a waiting thread yields its core

typedef struct {
  int phases;
  int (*tasks)(void *arg, int phase);  // of a phase, less than 2^20; asked when the phase before has ended
  void (*task)(void *arg, int phase, int task, int tasks, int id);
  void *arg;
} Work;
typedef struct { _Alignas(128) _Atomic uint64_t word; } Range;  // phase << 40 | end << 20 | next
typedef struct {
  int threads;
  pthread_t handle[MAX_THREADS];
#if !defined(__linux__)
  pthread_mutex_t mutex;
  pthread_cond_t wake;
#endif
  _Alignas(128) atomic_uint call;      // counts calls; changing it starts the workers
  _Alignas(128) atomic_int sleepers;
  Range range[MAX_THREADS];
  _Alignas(128) atomic_int remaining;  // tasks of the phase not done, and one until the phase is wholly published
  _Alignas(128) atomic_int ended;
  Work work;
  int tasks;                           // of the phase
  atomic_int quit;
} Pool;
enum { ENDED = 0xffffff };

INLINE int phase_of(uint64_t v) { return (int)(v >> 40); }
INLINE int is_empty(uint64_t v) { return (v & 0xfffff) >= (v >> 20 & 0xfffff); }  // as a word of ENDED is

static inline void pause_(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

static void sleep_(Pool *p, unsigned seen) {
  atomic_fetch_add(&p->sleepers, 1);
#if defined(__linux__)
  while (atomic_load(&p->call) == seen) syscall(SYS_futex, &p->call, 0 | 128, seen, NULL, NULL, 0);
#else
  pthread_mutex_lock(&p->mutex);
  while (atomic_load(&p->call) == seen) pthread_cond_wait(&p->wake, &p->mutex);
  pthread_mutex_unlock(&p->mutex);
#endif
  atomic_fetch_sub(&p->sleepers, 1);
}

static uint64_t nanoseconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void wake_(Pool *p) {
#if defined(__linux__)
  atomic_fetch_add(&p->call, 1);
  if (atomic_load(&p->sleepers)) syscall(SYS_futex, &p->call, 1 | 128, 0x7fffffff, NULL, NULL, 0);
#else
  pthread_mutex_lock(&p->mutex);
  atomic_fetch_add(&p->call, 1);
  pthread_cond_broadcast(&p->wake);
  pthread_mutex_unlock(&p->mutex);
#endif
}

// The first of n tasks in the range of a thread, whose end is the next one's first; the first thread always has some.
INLINE int range_begin(int n, int id, int threads) { return (int)(((int64_t)n * id + threads - 1) / threads); }

static void publish_(Pool *p, int phase) {
  if (phase == p->work.phases) {
    for (int i = 0; i < p->threads; i++) atomic_store_explicit(&p->range[i].word, (uint64_t)ENDED << 40, memory_order_release);
    atomic_store_explicit(&p->ended, 1, memory_order_release);
    return;
  }
  int n = p->work.tasks(p->work.arg, phase);
  p->tasks = n;
  atomic_store_explicit(&p->remaining, n + 1, memory_order_relaxed);
  for (int i = 0; i < p->threads; i++) {
    uint64_t first = (uint64_t)range_begin(n, i, p->threads), end = (uint64_t)range_begin(n, i + 1, p->threads);
    atomic_store_explicit(&p->range[i].word, (uint64_t)phase << 40 | end << 20 | first, memory_order_release);
  }
}

// Counts `n` tasks as done. The thread that ends the last one publishes the next phase; publishing counts as a task too.
static void finish_tasks_(Pool *p, int phase, int n) {
  while (atomic_fetch_sub_explicit(&p->remaining, n, memory_order_acq_rel) == n) {
    publish_(p, ++phase);
    if (phase == p->work.phases) return;
    n = 1;
  }
}

// Runs the tasks of range `from` until none is left. Returns the word that said so.
static uint64_t empty_range_(Pool *p, int from, int id) {
  _Atomic uint64_t *word = &p->range[from].word;
  for (int phase = 0, done = 0;; done++) {  // the phase does not end before what is done is counted
    uint64_t v = atomic_load_explicit(word, memory_order_acquire);
    if (!is_empty(v)) v = atomic_fetch_add_explicit(word, 1, memory_order_acq_rel);  // it may be of a later phase or call by now
    if (is_empty(v)) {
      if (done) finish_tasks_(p, phase, done);
      return v;
    }
    phase = phase_of(v);
    p->work.task(p->work.arg, phase, (int)(v & 0xfffff), p->tasks, id);
  }
}

// Runs tasks, first those of the thread's own range, until the last phase has ended.
static void take_tasks_(Pool *p, int id) {
  for (;;) {
    uint64_t v = empty_range_(p, id, id);
    int phase = phase_of(v), same = 1;
    if (phase == ENDED) return;
    for (int k = 1; k < p->threads; k++) same &= phase_of(empty_range_(p, (id + k) % p->threads, id)) == phase;
    // where all ranges were empty in the same phase, there is nothing to do before the next one
    for (int idle = 0; same && atomic_load_explicit(&p->range[id].word, memory_order_acquire) == v; idle++) {
      if (idle < PATIENCE) pause_();
      else sched_yield();
    }
  }
}

typedef struct { Pool *pool; int id; } Seat;

static void *worker_(void *arg) {
  Seat seat = *(Seat *)arg;
  free(arg);
  Pool *p = seat.pool;
  for (unsigned seen = 0;; ) {
    // Between two tokens the next call comes within a fraction of a millisecond; after that, sleep.
    uint64_t until = nanoseconds() + 300000;
    while (atomic_load_explicit(&p->call, memory_order_acquire) == seen) {
      for (int i = 0; i < 100 && atomic_load_explicit(&p->call, memory_order_acquire) == seen; i++) pause_();
      if (nanoseconds() > until) sleep_(p, seen);
      else sched_yield();
    }
    seen = atomic_load_explicit(&p->call, memory_order_acquire);
    if (atomic_load(&p->quit)) return NULL;
    take_tasks_(p, seat.id);
  }
}

// Before the first call: starts threads until there are as many with the caller; the pool begins as zeros. Returns how many there are.
static int pool_start(Pool *p, int threads) {
  if (!p->threads) {
    p->threads = 1;
#if !defined(__linux__)
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->wake, NULL);
#endif
  }
  for (int id = p->threads; id < threads && id < MAX_THREADS; id++) {
    Seat *seat = malloc(sizeof *seat);
    if (!seat) break;
    *seat = (Seat){p, id};
    if (pthread_create(&p->handle[id], NULL, worker_, seat)) { free(seat); break; }
    p->threads++;
  }
  return p->threads;
}

// Runs the tasks of all phases and returns when the last one is done.
static void pool_run(Pool *p, Work work) {
  p->work = work;
  atomic_store_explicit(&p->ended, 0, memory_order_relaxed);
  publish_(p, 0);
  if (p->threads > 1) wake_(p);
  finish_tasks_(p, 0, 1);
  take_tasks_(p, 0);
  while (!atomic_load_explicit(&p->ended, memory_order_acquire)) pause_();
}

static void pool_stop(Pool *p) {
  atomic_store(&p->quit, 1);
  if (p->threads > 1) wake_(p);
  for (int id = 1; id < p->threads; id++) pthread_join(p->handle[id], NULL);
  memset(p, 0, sizeof *p);
}
