// Where 16-byte vector `v` of row `row` stands in tiles of `rows` rows (ptx.cuh, tile_at).
DEVICE int spot(int rows, int row, int v) { return (v / 8 * rows + row) * 8 + (v % 8 ^ row % 8); }
