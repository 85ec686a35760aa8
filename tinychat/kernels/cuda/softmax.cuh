// A chunk's scores of two rows a lane (of four lanes each, as wgmma and mma leave them), already in base 2, become weights
// relative to the rows' largest score so far. sum: of this lane's columns; shrink: what went before is to be multiplied with.
template <int TILES>
DEVICE void weigh(float (&s)[TILES][4], float (&most)[2], float (&sum)[2], float (&shrink)[2], u32 (&p)[TILES / 2][4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float top = most[i], part = 0;
#pragma unroll
    for (int n = 0; n < TILES; n++) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
    top = fmaxf(top, shfl_xor(top, 1));
    top = fmaxf(top, shfl_xor(top, 2));
    shrink[i] = exp2_fast(most[i] - top);
    most[i] = top;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int j = 2 * i; j < 2 * i + 2; j++) {
        s[n][j] = exp2_fast(s[n][j] - top);
        part += s[n][j];
      }
    sum[i] = sum[i] * shrink[i] + part;
  }
#pragma unroll
  for (int j = 0; j < TILES / 2; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) p[j][i] = pack_halves(s[2 * j + i / 2][i % 2 * 2], s[2 * j + i / 2][i % 2 * 2 + 1]);
}

// The row's sum from the parts of its four lanes.
DEVICE float sum_of_row(float part) {
  part += shfl_xor(part, 1);
  return part + shfl_xor(part, 2);
}
