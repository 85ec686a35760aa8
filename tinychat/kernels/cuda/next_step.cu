// Behind the draft that followed a verify step of two: the tokens and the state of the next one, which can follow without
// the host. Its first token is the last one chosen, its second the draft.

struct Args {
  int *history = nullptr;  // token of every position
  int *state = nullptr;
  const int *kept = nullptr;    // of follow.cu
  const int *chosen = nullptr;  // the draft
  const int *stand_ins = nullptr;  // (positions): where one is not negative, it is taken for the draft
};

DEVICE void run(const Args &a) {
  grid_wait();
  const int at = a.kept[POS], stand_in = a.stand_ins[at + 1];
  if (threadIdx.x == 0) {
    a.history[at] = a.kept[WORDS];
    a.history[at + 1] = stand_in >= 0 ? stand_in : a.chosen[0];
  }
  for (int i = threadIdx.x; i < WORDS; i += THREADS) a.state[i] = a.kept[i];
}
