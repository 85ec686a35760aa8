// Behind a verify step, so that a draft can follow without the host: the tokens that its columns chose stand behind one
// another from the next position on, where the draft begins. Behind a draft that was wrong the second is for nothing.

struct Args {
  int *history = nullptr;  // token of every position
  int *state = nullptr;
  const int *chosen = nullptr;  // (columns)
  const int *greedy = nullptr;  // the words of a greedy step
};

DEVICE void run(const Args &a) {
  grid_wait();
  const int pos = a.state[POS] + 1;
  if (threadIdx.x < COLUMNS) a.history[pos + threadIdx.x] = a.chosen[threadIdx.x];
  __syncthreads();
  for (int i = threadIdx.x; i < WORDS; i += THREADS)
    if (i != BASE) a.state[i] = i == POS ? pos : a.greedy[i];
}
