// Rotary embedding. Constants: ROPE_DIMS, NEOX.

DEVICE F2 turn(float a, float b, F2 angle) {
  return F2{fma_rn(a, angle.x, -mul_rn(b, angle.y)), fma_rn(a, angle.y, mul_rn(b, angle.x))};
}

// The pair of value d of a head's ROPE_DIMS values.
DEVICE int pair_of(int d) { return NEOX ? d % (ROPE_DIMS / 2) : d / 2; }

// Rotated value d of a head's `v`, from the cos and sin of its pair.
DEVICE float rotated(const float *v, F2 angle, int d) {
  const int p = pair_of(d);
  const F2 r = turn(v[NEOX ? p : 2 * p], v[NEOX ? p + ROPE_DIMS / 2 : 2 * p + 1], angle);
  return (NEOX ? d < ROPE_DIMS / 2 : d % 2 == 0) ? r.x : r.y;
}
DEVICE float rotated(const float *v, const F2 *angles, int d) { return rotated(v, angles[pair_of(d)], d); }
