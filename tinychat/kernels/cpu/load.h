// Weights from a file into memory. A task reads some groups of 16 rows and packs them while they are in its core's cache; all weights of
// a call are one phase, so no thread waits for another in between.
#pragma once
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "pool.h"
#include "quant.h"

// `groups` matrices of rows x cols, of which matrix g starts at row g * stride; or one whose rows lie in runs of `run`, each `stride`
// rows behind the one before.
typedef struct {
  int32_t fd, type, rows, cols, groups, stride, run;
  uint64_t start;  // byte of the file, or without one (fd -1) the address, of the first matrix
  uint8_t *to;
} Source;

typedef struct {
  const Source *sources;
  int n, threads;
  size_t room;       // bytes that a task reads, at most
  uint8_t *buffers;  // [threads][room]
  atomic_int bad;    // number of a source that cannot be read; n: none
} LoadJob;

enum { LOAD_ROOM = 256 << 10 };  // fits in every second-level cache, beside what is made of it

INLINE size_t bytes_of_row(const Source *s) { return (size_t)(s->cols / layouts[s->type].block) * layouts[s->type].bytes; }
INLINE int groups_of(const Source *s) { return (s->rows + 15) / 16 * s->groups; }
// As many for each thread: the same part of all weights is packed, and read in decode steps, by the same one.
INLINE int tasks_of(const LoadJob *j, const Source *s) {
  int each = (int)(j->room / (16 * bytes_of_row(s))), n = (groups_of(s) + each - 1) / each;
  return (n + j->threads - 1) / j->threads * j->threads;
}

// Where row number `i` of all groups lies in the source; -1: it only fills up a group.
INLINE int64_t source_row(const Source *s, int i) {
  int per = (s->rows + 15) / 16 * 16, row = i % per;
  if (row >= s->rows) return -1;
  return s->run ? (int64_t)(row / s->run) * s->stride + row % s->run : (int64_t)(i / per) * s->stride + row;
}

static int read_bytes(int fd, uint8_t *to, size_t bytes, uint64_t from) {
  while (bytes) {
    ssize_t n = pread(fd, to, bytes, (off_t)from);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return 0;
    to += n, bytes -= (size_t)n, from += (uint64_t)n;
  }
  return 1;
}

// Rows first..last-1 of all groups; those that lie one behind the other at once. Returns whether that worked.
static int read_rows(const Source *s, int first, int last, uint8_t *to) {
  size_t bytes = bytes_of_row(s);
  for (int i = first, n; i < last; i += n) {
    int64_t row = source_row(s, i);
    for (n = 1; row >= 0 && i + n < last && source_row(s, i + n) == row + n;) n++;
    if (row >= 0 && !read_bytes(s->fd, to + (size_t)(i - first) * bytes, (size_t)n * bytes, s->start + (uint64_t)row * bytes)) return 0;
  }
  return 1;
}

static int load_tasks(void *arg, int phase) {
  const LoadJob *j = arg;
  int n = 0;
  for (int i = 0; i < j->n; i++) n += tasks_of(j, &j->sources[i]);
  return n;
}

static void load_task(void *arg, int phase, int task, int tasks, int id) {
  LoadJob *j = arg;
  const Source *s = j->sources;
  for (int n; task >= (n = tasks_of(j, s)); s++) task -= n;
  int parts = tasks_of(j, s), place = place_of(task, parts, j->threads), all = groups_of(s);
  int first = (int)((int64_t)all * place / parts), last = (int)((int64_t)all * (place + 1) / parts);
  size_t bytes = bytes_of_row(s);
  uint8_t *buffer = j->buffers + (size_t)id * j->room;
  if (atomic_load_explicit(&j->bad, memory_order_relaxed) < j->n) return;
  if (s->fd >= 0 && !read_rows(s, 16 * first, 16 * last, buffer)) {
    atomic_store(&j->bad, (int)(s - j->sources));
    return;
  }
  for (int g = first; g < last; g++) {
    const uint8_t *rows[16];
    for (int r = 0; r < 16; r++) {
      int64_t row = source_row(s, 16 * g + r);
      const uint8_t *there = s->fd >= 0 ? buffer + (size_t)(16 * (g - first) + r) * bytes : (const uint8_t *)s->start + row * (int64_t)bytes;
      rows[r] = row < 0 ? NULL : there;
    }
    pack_group(s->to + (size_t)g * group_bytes(s->type, s->cols), rows, s->type, s->cols);
  }
}

// Returns n, the number of a source that cannot be read, or -1 if memory is short.
static int load(Pool *pool, const Source *sources, int n) {
  size_t room = LOAD_ROOM;
  for (const Source *s = sources; s < sources + n; s++)
    if (16 * bytes_of_row(s) > room) room = 16 * bytes_of_row(s);
  room = (room + 63) / 64 * 64;
  LoadJob job = {sources, n, pool->threads, room, aligned_alloc(64, room * (size_t)pool->threads), n};
  if (!job.buffers) return -1;
  pool_run(pool, (Work){1, load_tasks, load_task, NULL, &job});
  free(job.buffers);
  return job.bad;
}
