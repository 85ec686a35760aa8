"""A mat-vec of every quant type in use against NumPy, at load: a GPU or driver that computes something else must not go
unnoticed."""

from __future__ import annotations

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import Weight
from tinychat.kernels.cuda.builder import Builder
from tinychat.kernels.cuda.device import GPU
from tinychat.kernels.cuda.launches import head
from tinychat.kernels.cuda.layout import REPACK_PARAMS, Layout, repack, repack_params
from tinychat.kernels.cuda.quants import FLOATS, QUANTS
from tinychat.kernels.cuda.state import state_words
from tinychat.kernels.grids import dequantize
from tinychat.kernels.ops import Embed, Head, Plan
from tinychat.kernels.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType
from tinychat.kernels.sampling import Sampling

Q = GGMLQuantizationType
ROWS, COLS = 24, 512


def check_plan(kind: Q) -> Plan:
    """A model without layers: logits = w @ RMSNorm(x)."""
    weight = Weight("check", kind, ROWS, COLS)
    return Plan(Embed(weight), (), Head(Weight("gain", Q.F32, 1, COLS), 0.0, weight))


def check_data(kind: Q) -> tuple[np.ndarray, np.ndarray]:
    """Random packed bytes (flat) and float32 input x."""
    rng = np.random.default_rng(int(kind) + 1)
    block, size = GGML_QUANT_SIZES[kind]
    if kind in FLOATS:
        values = rng.standard_normal(ROWS * COLS).astype(np.float32)
        bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
        packed = np.frombuffer(
            (values if kind == Q.F32 else bf16 if kind == Q.BF16 else values.astype(np.float16)).tobytes(), np.uint8
        )
    else:
        random = rng.integers(0, 256, (ROWS * COLS // block, size), np.uint8)
        halves = [at for at in (QUANTS[kind].scale, QUANTS[kind].minimum) if at >= 0]
        for at in halves:
            random[:, at : at + 2] = rng.uniform(0.01, 0.02, len(random)).astype(np.float16)[:, None].view(np.uint8)
        if kind == Q.MXFP4:  # the scale is a power of two
            random[:, 0] = rng.integers(120, 124, len(random))
        if kind == Q.IQ1_M:  # the half lies in the upper 4 bits of four words
            d = rng.uniform(0.01, 0.02, len(random)).astype(np.float16).view(np.uint16)
            words = random[:, 48:].view(np.uint16)
            words[:] = words & 0x0FFF | d[:, None] >> np.array([0, 4, 8, 12], np.uint16) << 12
        packed = random.reshape(-1)
    return packed, rng.standard_normal(COLS).astype(np.float32)


def relative_error(got: np.ndarray, kind: Q, packed: np.ndarray, x: np.ndarray) -> float:
    """How far the logits `got` are from the product in float64."""
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean())
    want = dequantize(packed.reshape(ROWS, -1), kind).reshape(ROWS, COLS).astype(np.float64) @ normed
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def self_check(gpu: GPU, kinds: list[Q]) -> None:
    """Raises TinychatError naming the first quant type whose mat-vec is off by more than int8 activations explain."""
    for kind in kinds:
        packed, x = check_data(kind)
        plan = check_plan(kind)
        layout = Layout(plan, {"check": packed.nbytes, "gain": 4 * COLS})
        builder = Builder(plan, layout, 1)
        launch = head(builder, plan.head)
        tensor, names = layout.tensors["check"], {b: f"check:{b}" for b in (*launch.buffers, "staging", "params")}
        sizes = {**builder.buffers, "staging": packed.nbytes, "params": REPACK_PARAMS}
        for buffer, name in names.items():
            gpu.allocate(name, sizes[buffer])
        gpu.upload(names["state"], state_words(Sampling(), 0, 1, 0))
        gpu.upload(names["x"], x)
        gpu.upload(names["w:gain"], np.ones(COLS, np.float32))
        if kind in FLOATS:
            gpu.upload(names["w:check"], packed)
        else:
            gpu.upload(names["staging"], packed)
            gpu.upload(names["params"], repack_params(tensor, 0, tensor.blocks))
            gpu.sequence([repack(tensor)], names)(tensor.blocks)
        gpu.run(launch, names)
        logits = gpu.download(names["logits"], 4 * ROWS).view(np.float32)
        for name in names.values():
            gpu.free(name)
        if not relative_error(logits, kind, packed, x) < 0.02:
            raise TinychatError(f"this GPU computes {kind.name} wrongly (self-check failed); please report it")
