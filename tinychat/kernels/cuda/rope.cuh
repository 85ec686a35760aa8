// Rotary embedding. Constants: ROPE_DIMS, NEOX.

DEVICE F2 turn(float a, float b, F2 angle) { return F2{a * angle.x - b * angle.y, a * angle.y + b * angle.x}; }

// Rotated value d of a head's `v` (ROPE_DIMS values), from the cos and sin of its pair.
DEVICE float rotated(const float *v, const F2 *angles, int d) {
  const int p = NEOX ? d % (ROPE_DIMS / 2) : d / 2;
  const F2 r = turn(v[NEOX ? p : 2 * p], v[NEOX ? p + ROPE_DIMS / 2 : 2 * p + 1], angles[p]);
  return (NEOX ? d < ROPE_DIMS / 2 : d % 2 == 0) ? r.x : r.y;
}
