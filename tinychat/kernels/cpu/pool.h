// A pool of threads that sleep between calls. It works in two ways:
// pool_run: all threads run one function and meet at barriers (prompts, where a phase is milliseconds);
// pool_phases: a list of phases cut into tasks (one token, where a phase is microseconds). Nobody is waited for but who holds a
// task: each thread has its own range of every phase and takes from the others' when that is done, so a thread that the system
// has put aside for another program costs its share, not its time slice at every barrier.
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

enum { MAX_THREADS = 128, PATIENCE = 4000 };  // polls before a waiting thread offers its core to others

typedef struct Pool Pool;
typedef void (*Work)(void *arg, int id);
typedef struct {
  int phases;
  int (*tasks)(void *arg, int phase);
  void (*task)(void *arg, int phase, int task, int tasks, int id);
  void *arg;
} Phases;
typedef struct { _Alignas(128) _Atomic uint64_t word; } Range;  // phase << 40 | end << 20 | next
struct Pool {
  int threads;
  Work work;   // of pool_run
  void *arg;
  struct { Work work; void *arg; } job[2];  // of even and odd calls: a late thread may still read the one before
  pthread_t handle[MAX_THREADS];
#if !defined(__linux__)
  pthread_mutex_t mutex;
  pthread_cond_t wake;
#endif
  _Alignas(128) atomic_uint call;      // counts calls; changing it starts the workers
  _Alignas(128) atomic_int sleepers;
  _Alignas(128) atomic_uint arrived;
  _Alignas(128) atomic_uint round;     // counts barriers
  _Alignas(128) atomic_int next;       // the next task of this phase; the barrier sets it to 0
  Range range[MAX_THREADS];
  _Alignas(128) atomic_int remaining;  // tasks of the phase not done, and one until the phase is wholly published
  _Alignas(128) atomic_int ended;
  Phases phases;
  int tasks;                           // of the phase
  int quit;
};
enum { ENDED = 0xffffff };

static inline void pause_(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

// All threads wait for one another. Spins, since a phase is microseconds; yields when a thread seems to have lost its core.
static inline void barrier(Pool *p) {
  if (p->threads == 1) {
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    return;
  }
  unsigned round = atomic_load_explicit(&p->round, memory_order_acquire);
  if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) + 1 == (unsigned)p->threads) {
    atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    atomic_store_explicit(&p->round, round + 1, memory_order_release);
    return;
  }
  for (int i = 0; atomic_load_explicit(&p->round, memory_order_acquire) == round; i++)
    if (i < PATIENCE) pause_();
    else sched_yield();
}

static inline int next_task(Pool *p) { return atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed); }

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
    unsigned call = atomic_load_explicit(&p->call, memory_order_acquire);
    Work work = p->job[call & 1].work;
    void *job = p->job[call & 1].arg;
    atomic_thread_fence(memory_order_acquire);
    if (call != atomic_load_explicit(&p->call, memory_order_relaxed)) continue;
    seen = call;
    if (p->quit) return NULL;
    work(job, seat.id);
  }
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

static int pool_start(Pool *p, int threads) {
  memset(p, 0, sizeof *p);
#if !defined(__linux__)
  pthread_mutex_init(&p->mutex, NULL);
  pthread_cond_init(&p->wake, NULL);
#endif
  p->threads = 1;
  for (int id = 1; id < threads && id < MAX_THREADS; id++) {
    Seat *seat = malloc(sizeof *seat);
    *seat = (Seat){p, id};
    if (pthread_create(&p->handle[id], NULL, worker_, seat)) { free(seat); break; }
    p->threads++;
  }
  return p->threads;
}

static void start_(Pool *p, Work work, void *arg) {
  unsigned call = atomic_load_explicit(&p->call, memory_order_relaxed) + 1;
  p->job[call & 1].work = work, p->job[call & 1].arg = arg;
  if (p->threads > 1) wake_(p);
}

static void together_(void *arg, int id) {
  Pool *p = arg;
  p->work(p->arg, id);
  barrier(p);
}

// Runs work(arg, id) on every thread, the caller's included, and returns when all are done.
static void pool_run(Pool *p, Work work, void *arg) {
  p->work = work, p->arg = arg;
  atomic_store(&p->next, 0);
  start_(p, together_, p);
  together_(p, 0);
}

static void publish_(Pool *p, int phase) {
  if (phase == p->phases.phases) {
    for (int i = 0; i < p->threads; i++) atomic_store_explicit(&p->range[i].word, (uint64_t)ENDED << 40, memory_order_release);
    atomic_store_explicit(&p->ended, 1, memory_order_release);
    return;
  }
  int n = p->phases.tasks(p->phases.arg, phase);
  p->tasks = n;
  atomic_store_explicit(&p->remaining, n + 1, memory_order_relaxed);
  for (int i = 0; i < p->threads; i++) {
    uint64_t first = (uint64_t)n * (unsigned)i / (unsigned)p->threads, end = (uint64_t)n * (unsigned)(i + 1) / (unsigned)p->threads;
    atomic_store_explicit(&p->range[i].word, (uint64_t)phase << 40 | end << 20 | first, memory_order_release);
  }
}

// Counts one task as done; who does the last one publishes the next phase (whose publication counts as a task too).
static void finish_task_(Pool *p, int phase) {
  while (atomic_fetch_sub_explicit(&p->remaining, 1, memory_order_acq_rel) == 1) {
    publish_(p, ++phase);
    if (phase == p->phases.phases) return;
  }
}

// Takes tasks, the own range's first, until the last phase has ended.
static void take_tasks_(void *arg, int id) {
  Pool *p = arg;
  for (int idle = 0;; idle++) {
    int worked = 0;
    for (int k = 0; k < p->threads; k++) {
      _Atomic uint64_t *word = &p->range[(id + k) % p->threads].word;
      uint64_t v = atomic_load_explicit(word, memory_order_acquire);
      if (v >> 40 == ENDED) return;
      if ((v & 0xfffff) >= (v >> 20 & 0xfffff)) continue;
      v = atomic_fetch_add_explicit(word, 1, memory_order_acq_rel);  // maybe of a later phase by now, or of a later call
      if (v >> 40 == ENDED || (v & 0xfffff) >= (v >> 20 & 0xfffff)) continue;
      int phase = (int)(v >> 40);
      p->phases.task(p->phases.arg, phase, (int)(v & 0xfffff), p->tasks, id);
      finish_task_(p, phase);
      worked = 1;
      break;
    }
    if (worked) idle = 0;
    else if (idle < PATIENCE) pause_();
    else sched_yield();
  }
}

// Runs the tasks of all phases, one phase after the other, and returns when the last one is done.
static void pool_phases(Pool *p, Phases phases) {
  p->phases = phases;
  atomic_store_explicit(&p->ended, 0, memory_order_relaxed);
  publish_(p, 0);
  start_(p, take_tasks_, p);
  finish_task_(p, 0);
  take_tasks_(p, 0);
  while (!atomic_load_explicit(&p->ended, memory_order_acquire)) pause_();
}

static void pool_stop(Pool *p) {
  p->quit = 1;
  start_(p, NULL, NULL);
  for (int id = 1; id < p->threads; id++) pthread_join(p->handle[id], NULL);
}
