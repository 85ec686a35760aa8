// Between a verify step of two and the draft behind it, so that the draft need not wait for the host: what the step chose
// stands behind one another from the next position on, where the draft begins, two tokens of it where the step's own draft
// was right. `kept` becomes the state of the verify step behind all that, and its first token (next_step.cu).

struct Args {
  int *history = nullptr;  // token of every position
  int *state = nullptr;
  int *kept = nullptr;  // (WORDS + 1)
  const int *chosen = nullptr;  // (columns)
  const int *greedy = nullptr;  // the words of a greedy step
};

DEVICE void run(const Args &a) {
  grid_wait();
  const int pos = a.state[POS] + 1, turn = a.state[TURN] + 1, first = a.chosen[0], second = a.chosen[1];
  const bool right = a.history[pos] == first;
  __syncthreads();
  if (threadIdx.x == 0) {
    a.history[pos] = first;
    a.history[pos + 1] = second;
    a.kept[WORDS] = right ? second : first;
  }
  for (int i = threadIdx.x; i < WORDS; i += THREADS) {
    const int own = a.state[i];
    a.kept[i] = i == POS ? pos + right : i == TURN ? turn : own;
    a.state[i] = i == POS ? pos : i == COUNT ? 1 + right : i < SEED_LO ? own : a.greedy[i];
  }
}
