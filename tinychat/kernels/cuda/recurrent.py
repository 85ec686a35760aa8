"""Layers that carry a state from token to token, as launches: delta rules and short convolutions, in decode steps and
in prompts. The states behind the last tokens lie in slots of their own (carried.cuh)."""

from __future__ import annotations

from dataclasses import replace

from tinychat.kernels import ops
from tinychat.kernels.blocks import KDA, DeltaRule, ShortConvolution, Weight
from tinychat.kernels.cuda.builder import SLOTS, Activations, Builder
from tinychat.kernels.cuda.constants import CarriedConstants, DeltaConstants, PromptDeltaConstants
from tinychat.kernels.cuda.launch import Launch, kernel
from tinychat.kernels.cuda.spread import QUANTISED_ROWS

LANES = 8  # that share a value of a head's state: delta.cuh
GROUP, CHUNK = 4, 64  # tokens of a prompt that are taken in at once, by KDA and by delta rules: delta.cuh
COLUMNS_OF_LANE = 2  # prompt_kda.cu
TOGETHER = 8  # tokens of a thread of a prompt's convolution: carried.cuh
VALUES = 32  # of a block of prompt_delta.cu and prompt_kda.cu; fewer where those blocks would not fill the GPU
BLOCKS = 128


Output = tuple[Weight, None, str]  # a matrix, without a bias, and the buffer of its results


def kda_inputs(a: KDA) -> tuple[list[Output], dict[str, Output]]:
    """The matrices over a layer's input, and those over buffers of their results."""
    inputs = [(op.src, [(w, None, dst) for w, dst in zip(op.weights, op.dst)]) for op in ops.kda_inputs(a)]
    return inputs[0][1] + inputs[1][1], {src: outputs[0] for src, outputs in inputs[2:]}


def delta(b: Builder, layer: int, a: DeltaRule | KDA) -> tuple[Launch, Activations]:
    """Decode: convolution, rule, norm and gate, of which a block does a head; and what it leaves."""
    shape = _shape(a)
    heads = b.agreed("heads", a.output.cols, [a.output], [shape.value_dim], fits=True)
    buffers = {
        "src": b.act("qkv"),
        "gate": b.act("gate"),
        "beta": b.act("beta"),
        "alpha": b.act("alpha"),
        **b.target(heads),
        "slots": b.carried(layer),
        **_weights(b, a),
        "gain": b.data(a.head_norm),
        "state": "state",
    }
    made = kernel(
        f"delta_{_size(shape)}",
        "delta.cu",
        replace(shape, out_quantised=heads.quantised, columns=b.columns),
        buffers,
        (a.heads, 1, 1),
        "delta rule",
        threads=shape.value_dim * LANES,
        nbytes=2 * a.state.nbytes,
    )
    return made, heads


def prompt_delta(b: Builder, layer: int, a: DeltaRule | KDA, tokens: int, dst: str, max_shared: int) -> list[Launch]:
    """Prompts: the same in kernels for convolution, rule, and norm with gate; the results as halves in `dst`.
    `max_shared`: bytes of shared memory that a block may have."""
    shape = _shape(a)
    per_token = {"state": "state", "slots": b.carried(layer)}
    heads, rate, decay = b.act("heads", tokens), b.act("beta", tokens), b.act("alpha", tokens)
    if isinstance(a, KDA):
        keys = 4 * shape.key_heads * shape.key_dim
        made = {
            "mixed": b.buffer("mixed", 4 * tokens * shape.channels),
            "both": b.buffer("both", 8 * GROUP * tokens * shape.key_heads),
            "late": b.buffer("late", keys * tokens),
            "shrink": b.buffer("shrink", keys * -(-tokens // GROUP)),
        }
    else:
        made = {
            "mixed": b.buffer("mixed", 4 * tokens * shape.heads * shape.value_dim),
            "halves": b.buffer("halves", 2 * tokens * 2 * shape.key_heads * _half_keys(shape)),
        }
    convolution = kernel(
        f"prompt_convolve_{shape.channels}",
        "prompt_convolve.cu",
        shape,
        {**per_token, **made, "beta": rate, "alpha": decay, "src": b.act("qkv", tokens), **_weights(b, a)},
        lambda count, keys: (-(-(shape.key_heads + shape.heads) // 8), -(-count // TOGETHER), 1),
        "delta rule",
    )
    norm = kernel(
        f"prompt_gated_norm_{shape.heads}_{shape.value_dim}",
        "prompt_gated_norm.cu",
        shape,
        {"dst": dst, "src": heads, "gate": b.act("gate", tokens), "gain": b.data(a.head_norm), "state": "state"},
        lambda count, keys: (-(-a.heads // 8), count, 1),
        "norm",
    )
    values = VALUES if shape.heads * shape.value_dim >= BLOCKS * VALUES else VALUES // 2

    def grid(count: int, keys: int) -> tuple[int, int, int]:
        return -(-shape.value_dim // values), shape.heads, 1

    if isinstance(a, KDA):
        rule = kernel(
            f"prompt_kda_{_size(shape)}",
            "prompt_kda.cu",
            shape,
            {**per_token, **made, "dst": heads, "rate": rate},
            grid,
            "delta rule",
            threads=values * LANES // COLUMNS_OF_LANE,
        )
        return [convolution, rule, norm]
    halves, chunks = {"halves": made["halves"], "state": "state"}, -(-tokens // CHUNK) * shape.heads
    solved = {
        "solve": b.buffer("solve", 2 * chunks * CHUNK**2),
        "mixing": b.buffer("mixing", 2 * chunks * CHUNK**2),
        "fading": b.buffer("fading", 8 * chunks * CHUNK),
    }
    each = kernel(
        f"prompt_chunks_{_size(shape)}",
        "prompt_chunks.cu",
        shape,
        {**halves, **solved, "rate": rate, "decay": decay},
        lambda count, keys: (-(-count // CHUNK), shape.heads, 1),
        "delta rule",
        threads=2 * CHUNK,
        resident=4,
    )
    # prompt_delta.cu, Chunk
    stage = CHUNK * (4 * (_half_keys(shape) + 8) + 4 * (CHUNK + 8) + 4 * (values + 4) + 8)
    stages = min(2, (max_shared - 1024) // stage)
    rule = kernel(
        f"prompt_delta_{_size(shape)}",
        "prompt_delta.cu",
        PromptDeltaConstants(**vars(shape), stages=stages),
        {**per_token, **solved, "halves": made["halves"], "mixed": made["mixed"], "dst": heads},
        grid,
        "delta rule",
        threads=4 * values,
        shared=stages * stage,
    )
    return [convolution, each, rule, norm]


def short_convolution(b: Builder, layer: int, a: ShortConvolution) -> tuple[Launch, Activations]:
    """Decode, and what it leaves."""
    dim = a.conv.rows
    heads = b.agreed("heads", dim, [a.output], [dim], fits=dim % QUANTISED_ROWS == 0)
    buffers = {
        "src": b.act("bcz"),
        **b.target(heads),
        "slots": b.carried(layer),
        "conv": b.data(a.conv),
        "state": "state",
    }
    shape = replace(_carried(a), out_quantised=heads.quantised, columns=b.columns)
    grid = (-(-dim // 256), 1, 1)
    return kernel(f"short_convolution_{dim}", "short_convolution.cu", shape, buffers, grid, "convolution"), heads


def prompt_short_convolution(b: Builder, layer: int, a: ShortConvolution, tokens: int, dst: str) -> Launch:
    """Prompts; the results as halves in `dst`."""
    dim = a.conv.rows
    buffers = {
        "dst": dst,
        "src": b.act("bcz", tokens),
        "slots": b.carried(layer),
        "conv": b.data(a.conv),
        "state": "state",
    }
    return kernel(
        f"prompt_short_convolution_{dim}",
        "prompt_short_convolution.cu",
        _carried(a),
        buffers,
        lambda count, keys: (-(-dim // 1024), -(-count // TOGETHER), 1),
        "convolution",
    )


def _carried(a: ShortConvolution) -> CarriedConstants:
    return CarriedConstants(a.width, a.conv.rows, SLOTS, a.state.nbytes // 4, out_quantised=False, columns=1)


def _shape(a: DeltaRule | KDA) -> DeltaConstants:
    state = a.state
    return DeltaConstants(
        a.width,
        state.channels,
        SLOTS,
        state.nbytes // 4,
        out_quantised=False,
        columns=1,
        key_heads=a.heads if isinstance(a, KDA) else a.key_heads,
        heads=a.heads,
        key_dim=state.key_dim,
        value_dim=state.value_dim,
        grouped=not isinstance(a, KDA) and a.grouped,
        by_channel=isinstance(a, KDA),
        lower_bound=a.lower_bound if isinstance(a, KDA) else 0.0,
        eps=a.eps,
        query_scale=state.key_dim**-0.5,
    )


def _half_keys(shape: DeltaConstants) -> int:
    """Of a row of halves: delta.cuh."""
    return -(-shape.key_dim // 16) * 16


def _size(shape: DeltaConstants) -> str:
    return f"{shape.heads}_{shape.value_dim}x{shape.key_dim}"


def _weights(b: Builder, a: DeltaRule | KDA) -> dict[str, str | None]:
    """Of the convolution and the decay."""
    convs = a.convs if isinstance(a, KDA) else (a.conv,)
    names = {f"conv[{i}]": b.data(w) for i, w in enumerate(convs)}
    return {**names, "decay": b.data(a.decay), "decay_bias": b.data(a.decay_bias)}
