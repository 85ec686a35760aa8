// f(gate, up) of a feed-forward: kernels/blocks.py, Gated.
template <class A> DEVICE float activated(float gate, float up) {
  if (A::FUNCTION == GELU) {  // 0.5 (1 + tanh(y)) is the sigmoid of 2 y, y = sqrt(2 / pi) (g + 0.044715 g^3)
    const float y = 1.59576912f * gate * (1.f + 0.044715f * gate * gate);
    return gate / (1.f + __expf(-y)) * up;
  }
  if (A::FUNCTION == CLAMPED) {
    const float g = fminf(gate, A::CLAMP), u = fminf(fmaxf(up, -A::CLAMP), A::CLAMP);
    return g / (1.f + __expf(-A::SLOPE * g)) * (u + 1.f);
  }
  return gate / (1.f + __expf(-gate)) * up;
}
