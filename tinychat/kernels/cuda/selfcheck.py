"""A mat-vec of every quant type in use against NumPy, at load: a GPU or driver that computes something else must not go
unnoticed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tinychat.errors import TinychatError
from tinychat.kernels import ops
from tinychat.kernels.cuda.device import GPU
from tinychat.kernels.cuda.layout import FLOATS, Layout, repack
from tinychat.kernels.cuda.step import Builder

Q = GGMLQuantizationType
_SCALES = {
    Q.Q4_0: (0,),
    Q.Q4_1: (0, 2),
    Q.Q5_0: (0,),
    Q.Q5_1: (0, 2),
    Q.Q8_0: (0,),
    Q.Q4_K: (0, 2),
    Q.Q5_K: (0, 2),
    Q.Q6_K: (208,),
}
ROWS, COLS = 24, 512


@dataclass(frozen=True)
class CheckPlan(ops.Plan):
    """One op instead of a model."""

    ops: tuple[ops.Op, ...]
    buffers: dict[str, int]


def check_plan(kind: Q) -> ops.Plan:
    """x += w @ y for one small matrix."""
    weight = ops.Weight("check", kind, ROWS, COLS)
    embed, head = ops.Embed(weight), ops.Head(weight, 0.0, weight)
    return CheckPlan(embed, (), head, (ops.LinearAdd("y", weight),), {"x": ROWS, "y": COLS})


def check_data(kind: Q) -> tuple[np.ndarray, np.ndarray]:
    """Random packed bytes (flat) and float32 input."""
    rng = np.random.default_rng(int(kind) + 1)
    block, size = GGML_QUANT_SIZES[kind]
    if kind in FLOATS:
        values = rng.standard_normal(ROWS * COLS).astype(np.float32)
        bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
        packed = np.frombuffer(
            (values if kind == Q.F32 else bf16 if kind == Q.BF16 else values.astype(np.float16)).tobytes(), np.uint8
        )
    else:
        blocks = rng.integers(0, 256, (ROWS * COLS // block, size), np.uint8)
        for at in _SCALES[kind]:
            blocks[:, at : at + 2] = rng.uniform(0.01, 0.02, len(blocks)).astype(np.float16)[:, None].view(np.uint8)
        packed = blocks.reshape(-1)
    return packed, rng.standard_normal(COLS).astype(np.float32)


def relative_error(got: np.ndarray, kind: Q, packed: np.ndarray, y: np.ndarray) -> float:
    """How far `got` is from the product in float64."""
    want = dequantize(packed.reshape(ROWS, -1), kind).reshape(ROWS, COLS).astype(np.float64) @ y
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def self_check(gpu: GPU, kinds: list[Q]) -> None:
    """Raises TinychatError naming the first quant type whose mat-vec is off by more than int8 activations explain."""
    for kind in kinds:
        packed, y = check_data(kind)
        plan = check_plan(kind)
        layout = Layout(plan, {"check": packed.nbytes})
        builder = Builder(plan, layout, 1)
        launch = builder._LinearAdd(plan.ops[0])  # type: ignore[arg-type]
        tensor, names = layout.tensors["check"], {b: f"check:{b}" for b in ("x", "y", "state", "w:check")}
        for buffer, name in names.items():
            gpu.allocate(name, builder.buffers[buffer])
        gpu.upload(names["x"], np.zeros(ROWS, np.float32))
        gpu.upload(names["y"], y)
        if kind in FLOATS:
            gpu.upload(names["w:check"], packed)
        else:
            gpu.upload("staging", packed)
            gpu.upload("params", np.array([tensor.blocks, 0, tensor.blocks], np.uint64))
            gpu.run(repack(tensor, tensor.blocks), names)
        gpu.run(launch, names)
        if not relative_error(gpu.download(names["x"], 4 * ROWS).view(np.float32), kind, packed, y) < 0.02:
            raise TinychatError(f"this GPU computes {kind.name} wrongly (self-check failed); please report it")
