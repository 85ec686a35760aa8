"""Layers that carry a state from token to token, as launches: delta rules and short convolutions, in decode steps and
in prompts. The states behind the last tokens lie in slots of their own (carried.cuh)."""

from __future__ import annotations

from dataclasses import replace

from tinychat.kernels import ops
from tinychat.kernels.blocks import KDA, DeltaRule, ShortConvolution, Weight
from tinychat.kernels.cuda.builder import SLOTS, Activations, Builder
from tinychat.kernels.cuda.constants import CarriedConstants, DeltaConstants
from tinychat.kernels.cuda.launch import Launch, kernel
from tinychat.kernels.cuda.spread import QUANTISED_ROWS

LANES = 8  # that share a value of a head's state: delta.cuh
GROUP = 4  # tokens of a prompt that are taken in at once: delta.cuh
COLUMNS_OF_LANE = 2  # prompt_delta.cu
TOGETHER = 8  # tokens of a thread of a prompt's convolution: carried.cuh
VALUES = 32  # of a block of prompt_delta.cu; fewer where those blocks would not fill the GPU
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


def prompt_delta(b: Builder, layer: int, a: DeltaRule | KDA, tokens: int, dst: str) -> list[Launch]:
    """Prompts: the same in three kernels; the results as halves in `dst`."""
    shape, carried = _shape(a), b.carried(layer)
    made: dict[str, str | None] = {
        "mixed": b.buffer("mixed", 4 * tokens * shape.channels),
        "both": b.buffer("both", 8 * GROUP * tokens * shape.key_heads),
    }
    if shape.by_channel:
        keys = 4 * shape.key_heads * shape.key_dim
        made |= {"late": b.buffer("late", keys * tokens), "shrink": b.buffer("shrink", keys * -(-tokens // GROUP))}
    heads, rate, decay = b.act("heads", tokens), b.act("beta", tokens), b.act("alpha", tokens)
    values = VALUES if shape.heads * shape.value_dim >= BLOCKS * VALUES else VALUES // 2
    per_token = {"state": "state", "slots": carried}
    convolution = kernel(
        f"prompt_convolve_{shape.channels}",
        "prompt_convolve.cu",
        shape,
        {**per_token, **made, "beta": rate, "alpha": decay, "src": b.act("qkv", tokens), **_weights(b, a)},
        lambda count, keys: (-(-(shape.key_heads + shape.heads) // 8), -(-count // TOGETHER), 1),
        "delta rule",
    )
    rule = kernel(
        f"prompt_delta_{_size(shape)}",
        "prompt_delta.cu",
        shape,
        {**per_token, **made, "dst": heads, "rate": rate, "decay": decay},
        lambda count, keys: (-(-shape.value_dim // values), shape.heads, 1),
        "delta rule",
        threads=values * LANES // COLUMNS_OF_LANE,
    )
    norm = kernel(
        f"prompt_gated_norm_{shape.heads}_{shape.value_dim}",
        "prompt_gated_norm.cu",
        shape,
        {"dst": dst, "src": heads, "gate": b.act("gate", tokens), "gain": b.data(a.head_norm), "state": "state"},
        lambda count, keys: (-(-a.heads // 8), count, 1),
        "norm",
    )
    return [convolution, rule, norm]


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


def _size(shape: DeltaConstants) -> str:
    return f"{shape.heads}_{shape.value_dim}x{shape.key_dim}"


def _weights(b: Builder, a: DeltaRule | KDA) -> dict[str, str | None]:
    """Of the convolution and the decay."""
    convs = a.convs if isinstance(a, KDA) else (a.conv,)
    names = {f"conv[{i}]": b.data(w) for i, w in enumerate(convs)}
    return {**names, "decay": b.data(a.decay), "decay_bias": b.data(a.decay_bias)}
