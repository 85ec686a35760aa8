// Prompts of few tokens, MLA: how blocks share the cache's KEYS rows among tiles of QUERIES rows, a row a token's head:
// each tile's keys in as many parts as make a block for each multiprocessor, or two where that is more even. Constants:
// BLOCKS, that many multiprocessors, and the most parts.
constexpr int QUERIES = 64, KEYS = 64;

struct KeyParts {
  int tiles, keys, active;  // parts that have keys
  DEVICE KeyParts(int rows, int all) {
    tiles = (rows + QUERIES - 1) / QUERIES;
    const int chunks = (all + KEYS - 1) / KEYS, parts = (2 * tiles > BLOCKS ? 2 * BLOCKS : BLOCKS) / tiles;
    const int each = (chunks + parts - 1) / max(parts, 1);
    keys = each * KEYS;
    active = (chunks + each - 1) / each;
  }
};
