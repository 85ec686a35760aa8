// Between a verify step of two and a draft behind each of its tokens, so that the draft need not wait for the host: what
// the columns chose stands behind one another from the next position on, where the draft begins. Behind a draft that was
// wrong the second is for nothing. `kept` becomes the state of the verify step behind all that (next_step.cu).

struct Args {
  int *history = nullptr;  // token of every position
  int *state = nullptr;
  int *kept = nullptr;
  const int *chosen = nullptr;  // (columns)
  const int *greedy = nullptr;  // the words of a greedy step
};

DEVICE void run(const Args &a) {
  grid_wait();
  const int pos = a.state[POS] + 1, turn = a.state[TURN] + 1;
  const bool right = a.history[pos] == a.chosen[0];
  __syncthreads();
  if (threadIdx.x < COLUMNS) a.history[pos + threadIdx.x] = a.chosen[threadIdx.x];
  for (int i = threadIdx.x; i < WORDS; i += THREADS) {
    const int own = a.state[i];
    a.kept[i] = i == POS ? pos + right : i == TURN ? turn : own;
    a.state[i] = i == POS ? pos : i < SEED_LO ? own : a.greedy[i];
  }
}
