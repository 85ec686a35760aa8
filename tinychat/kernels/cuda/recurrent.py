"""Layers that carry a state from token to token, as launches: the gated delta rule and short convolutions, in decode
steps and in prompts. The states behind the last tokens lie in slots of their own (carried.cuh)."""

from __future__ import annotations

from dataclasses import replace

from tinychat.kernels.blocks import DeltaRule, ShortConvolution
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


def delta(b: Builder, layer: int, a: DeltaRule) -> tuple[Launch, Activations]:
    """Decode: convolution, rule, norm and gate, of which a block does a head; and what it leaves."""
    heads = b.agreed("heads", a.output.cols, [a.output], [a.value_dim], fits=True)
    buffers = {
        "src": b.act("qkv"),
        "gate": b.act("gate"),
        "beta": b.act("beta"),
        "alpha": b.act("alpha"),
        **b.target(heads),
        "slots": b.carried(layer),
        "conv": b.data(a.conv),
        "decay": b.data(a.decay),
        "decay_bias": b.data(a.decay_bias),
        "gain": b.data(a.head_norm),
        "state": "state",
    }
    made = kernel(
        f"delta_{a.heads}_{a.value_dim}x{a.key_dim}",
        "delta.cu",
        replace(_shape(a), out_quantised=heads.quantised, columns=b.columns),
        buffers,
        (a.heads, 1, 1),
        "delta rule",
        threads=a.value_dim * LANES,
        nbytes=2 * a.state.nbytes,
    )
    return made, heads


def prompt_delta(b: Builder, layer: int, a: DeltaRule, tokens: int, dst: str) -> list[Launch]:
    """Prompts: the same in three kernels; the results as halves in `dst`."""
    shape, carried = _shape(a), b.carried(layer)
    mixed, both = b.buffer("mixed", 4 * tokens * a.channels), b.buffer("both", 8 * GROUP * tokens * a.key_heads)
    heads, rate, decay = b.act("heads", tokens), b.act("beta", tokens), b.act("alpha", tokens)
    values = VALUES if a.heads * a.value_dim >= BLOCKS * VALUES else VALUES // 2
    per_token = {"state": "state", "slots": carried}
    convolution = kernel(
        f"prompt_convolve_{a.channels}",
        "prompt_convolve.cu",
        shape,
        {
            **per_token,
            "mixed": mixed,
            "both": both,
            "beta": rate,
            "alpha": decay,
            "src": b.act("qkv", tokens),
            "conv": b.data(a.conv),
            "decay": b.data(a.decay),
            "decay_bias": b.data(a.decay_bias),
        },
        lambda count, keys: (-(-(a.key_heads + a.heads) // 8), -(-count // TOGETHER), 1),
        "delta rule",
    )
    rule = kernel(
        f"prompt_delta_{a.heads}_{a.value_dim}x{a.key_dim}",
        "prompt_delta.cu",
        shape,
        {**per_token, "dst": heads, "mixed": mixed, "both": both, "rate": rate, "decay": decay},
        lambda count, keys: (-(-a.value_dim // values), a.heads, 1),
        "delta rule",
        threads=values * LANES // COLUMNS_OF_LANE,
    )
    norm = kernel(
        f"prompt_gated_norm_{a.heads}_{a.value_dim}",
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


def _shape(a: DeltaRule) -> DeltaConstants:
    return DeltaConstants(
        a.width,
        a.channels,
        SLOTS,
        a.state.nbytes // 4,
        out_quantised=False,
        columns=1,
        key_heads=a.key_heads,
        heads=a.heads,
        key_dim=a.key_dim,
        value_dim=a.value_dim,
        grouped=a.grouped,
        eps=a.eps,
        query_scale=a.key_dim**-0.5,
    )
