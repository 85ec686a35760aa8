// Prefill, one block: (token, chosen expert) pairs sorted by expert, and cut into tiles of up to TILE_TOKENS pairs of
// one expert.

struct Args {
  int *order = nullptr;      // pairs by expert
  int *tiles = nullptr;      // their number, then (expert, first place in order, number of pairs) of each
  const int *ids = nullptr;  // (tokens, chosen)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ int count[EXPERTS], at[EXPERTS];
  grid_wait();
  const int pairs = a.state[COUNT] * CHOSEN;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) count[e] = 0;
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += THREADS) atomicAdd(&count[a.ids[p]], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
    int first = 0, tile = 0;  // what the experts before have
    for (int i = 0; i < e; i++) {
      first += count[i];
      tile += (count[i] + TILE_TOKENS - 1) / TILE_TOKENS;
    }
    at[e] = first;
    for (int i = 0; i < count[e]; i += TILE_TOKENS, tile++) {
      a.tiles[1 + 3 * tile] = e;
      a.tiles[2 + 3 * tile] = first + i;
      a.tiles[3 + 3 * tile] = min(TILE_TOKENS, count[e] - i);
    }
    if (e == EXPERTS - 1) a.tiles[0] = tile;
  }
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += THREADS) a.order[atomicAdd(&at[a.ids[p]], 1)] = p;
}
