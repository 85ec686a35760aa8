// A pool of threads that sleep between calls. A call is a list of phases, run one after the other; a phase is cut into tasks.
// Each of the T threads has every T-th task of a phase and takes tasks of the other threads when its own are done. A phase therefore
// ends when its last task ends: a thread that the system has descheduled delays it only while it holds a task. All that begins a
// phase is one word, which the threads without a task poll. Within a phase tasks may wait for others with lower numbers.
#pragma once
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { MAX_THREADS = 128, SOON = 50, PATIENCE = 4000 };  // polls before a waiting thread runs others' tasks, and yields its core

typedef struct {
  int phases;
  int (*tasks)(void *arg, int phase);  // of a phase, less than NONE; asked when the phase before has ended
  void (*task)(void *arg, int phase, int task, int tasks, int id);
  int (*ready)(void *arg, int phase, int task);  // whether what a task waits for is done; NULL: they wait for nothing
  void *arg;
} Work;
// Phases of all calls are numbered from 1 on. Of thread i, whose tasks are i, i + T, ...: number << 20 | how many were taken; of an
// earlier phase: none yet.
typedef struct { _Alignas(128) _Atomic uint64_t taken; } Range;
enum { NONE = 0xfffff };
typedef struct {
  int threads;
  pthread_t handle[MAX_THREADS];
#if !defined(__linux__)
  pthread_mutex_t mutex;
  pthread_cond_t wake;
#endif
  _Alignas(128) atomic_uint call;      // counts calls; changing it starts the workers
  _Alignas(128) atomic_int sleepers;
  _Alignas(128) _Atomic uint64_t now;  // number of the phase << 20 | its tasks; NONE behind the last phase of a call
  Work work;
  int phase;                           // of the call
  _Alignas(128) atomic_int remaining;  // tasks of the phase not done
  Range range[MAX_THREADS];
  atomic_int quit;
} Pool;

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

// Which of n equal pieces of memory task number i works on: threads read theirs one behind the other.
INLINE int place_of(int i, int n, int threads) {
  int thread = i % threads, each = n / threads, more = n % threads;
  return thread * each + (thread < more ? thread : more) + i / threads;
}

// Begins the phase of the call, or the first one behind it that has tasks.
static void begin_(Pool *p, int phase) {
  uint64_t number = (atomic_load_explicit(&p->now, memory_order_relaxed) >> 20) + 1;
  int n = 0;
  while (phase < p->work.phases && !(n = p->work.tasks(p->work.arg, phase))) phase++;
  p->phase = phase;
  atomic_store_explicit(&p->remaining, n, memory_order_relaxed);
  atomic_store_explicit(&p->now, number << 20 | (uint64_t)(n ? n : NONE), memory_order_release);
}

// Counts `n` tasks as done. The thread that ends the last one begins the next phase.
static void finish_(Pool *p, int n) {
  int next = p->phase + 1;
  if (atomic_fetch_sub_explicit(&p->remaining, n, memory_order_acq_rel) == n) begin_(p, next);
}

// Takes the next task of range `from` in phase `now`, if there is one in front of task `before`. Returns its number, or -1.
static int claim_(Pool *p, int from, uint64_t now, int before) {
  _Atomic uint64_t *taken = &p->range[from].taken;
  uint64_t v = atomic_load_explicit(taken, memory_order_acquire), number = now >> 20;
  for (;;) {
    int count = v >> 20 == number ? (int)(v & NONE) : 0, task = count * p->threads + from;
    if (v >> 20 > number || task >= (int)(now & NONE) || task >= before) return -1;
    if (atomic_compare_exchange_weak_explicit(taken, &v, number << 20 | (uint64_t)(count + 1), memory_order_acq_rel, memory_order_acquire))
      return task;
  }
}

// Runs a task of phase `now` that was claimed, as soon as it is ready. What it waits for is with other threads; where that takes long,
// one of them may have been descheduled, and tasks that it has not begun are run here.
static void run_(Pool *p, uint64_t now, int task, int id) {
  Work *w = &p->work;
  for (int idle = 0; w->ready && !w->ready(w->arg, p->phase, task); idle++) {
    int other = idle < SOON ? -1 : claim_(p, (id + idle) % p->threads, now, task);
    if (other >= 0) {
      run_(p, now, other, id);
      finish_(p, 1);
    } else if (idle < PATIENCE) {
      pause_();
    } else {
      sched_yield();
    }
  }
  w->task(w->arg, p->phase, task, (int)(now & NONE), id);
}

// Runs tasks, first those of the thread's own range, until the last phase has ended.
static void take_tasks_(Pool *p, int id) {
  for (;;) {
    uint64_t now = atomic_load_explicit(&p->now, memory_order_acquire);
    if ((now & NONE) == NONE) return;
    for (int k = 0; k < p->threads && atomic_load_explicit(&p->now, memory_order_relaxed) == now; k++) {
      int done = 0;  // the phase does not end before they are counted
      for (int task; (task = claim_(p, (id + k) % p->threads, now, INT_MAX)) >= 0; done++) run_(p, now, task, id);
      if (done) finish_(p, done);
    }
    for (int idle = 0; atomic_load_explicit(&p->now, memory_order_acquire) == now; idle++) {
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
  begin_(p, 0);
  if (p->threads > 1) wake_(p);
  take_tasks_(p, 0);
}

static void pool_stop(Pool *p) {
  atomic_store(&p->quit, 1);
  if (p->threads > 1) wake_(p);
  for (int id = 1; id < p->threads; id++) pthread_join(p->handle[id], NULL);
  memset(p, 0, sizeof *p);
}
