// What a latent query at position pos is multiplied by. Constants: QUERY_SCALE; GROWTH and GROWTH_LENGTH, the scale and
// the length of ops.Temperature.
DEVICE float query_scale(int pos) {
  return GROWTH == 0 ? QUERY_SCALE : QUERY_SCALE * (1.f + GROWTH * logf(1 + pos / GROWTH_LENGTH));
}
