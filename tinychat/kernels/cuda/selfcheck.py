"""A mat-vec of every quant type in use against what it should be, at load: a GPU or driver that computes something
else must not go unnoticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import Weight
from tinychat.kernels.cuda.builder import Builder
from tinychat.kernels.cuda.device import GPU
from tinychat.kernels.cuda.launches import head
from tinychat.kernels.cuda.layout import REPACK_PARAMS, Layout, repack, repack_params
from tinychat.kernels.cuda.quants import FLOATS, QUANTS
from tinychat.kernels.cuda.state import state_words
from tinychat.kernels.ops import Embed, Head, Plan
from tinychat.kernels.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType
from tinychat.kernels.sampling import Sampling

Q = GGMLQuantizationType
ROWS, COLS = 24, 512
TABLE = Path(__file__).with_suffix(".csv")


def check_plan(kind: Q) -> Plan:
    """A model without layers: logits = w @ RMSNorm(x)."""
    weight = Weight("check", kind, ROWS, COLS)
    return Plan(Embed(weight), (), Head(Weight("gain", Q.F32, 1, COLS), 0.0, weight))


def check_data(kind: Q) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes (flat) and float32 input x, always the same ones."""
    noise = _noise(int(kind), ROWS * COLS + COLS)
    x, noise = _values(noise[:COLS]), noise[COLS:]
    block, size = GGML_QUANT_SIZES[kind]
    if kind in FLOATS:
        values = _values(noise)
        bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
        return (values if kind == Q.F32 else bf16 if kind == Q.BF16 else values.astype(np.float16)).view(np.uint8), x
    count = ROWS * COLS // block
    random = noise.view(np.uint8)[: count * size].reshape(count, size)
    own = noise[-count:]
    d = (0.015 + 0.005 * _values(own)).astype(np.float16)
    for at in (QUANTS[kind].scale, QUANTS[kind].minimum):
        if at >= 0:
            random[:, at : at + 2] = d[:, None].view(np.uint8)
    if kind == Q.MXFP4:  # the scale is a power of two
        random[:, 0] = 120 + own % 4
    if kind == Q.IQ1_M:  # the half lies in the upper 4 bits of four words
        words = random[:, 48:].view(np.uint16)
        words[:] = words & 0x0FFF | d.view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16) << 12
    return random.reshape(-1), x


def _noise(seed: int, n: int) -> np.ndarray:
    """uint32 (n,) without a pattern; NumPy's own may be others in its next version."""
    x: np.ndarray = np.arange(1, n + 1, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(40503 * seed)
    for shift, factor in ((15, 2246822519), (13, 3266489917)):
        x = (x ^ x >> shift) * np.uint32(factor)
    return x ^ x >> 16


def _values(noise: np.ndarray) -> np.ndarray:
    """float32 from -1 to 1."""
    return (noise / 2.0**31 - 1).astype(np.float32)


def check_logits(kind: Q) -> np.ndarray:
    """float64 (ROWS,): the weights times RMSNorm(x), of the table beside this file, which a test compares with gguf's
    values. To compute them here would take half of the check's time, for the import of gguf."""
    lines = (line.split(",") for line in TABLE.read_text().splitlines())
    return next(np.array(values, float) for name, *values in lines if name == kind.name)


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
        want = check_logits(kind)
        if not np.linalg.norm(logits - want) < 0.02 * np.linalg.norm(want):
            raise TinychatError(f"this GPU computes {kind.name} wrongly (self-check failed); please report it")
