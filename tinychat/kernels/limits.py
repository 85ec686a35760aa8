"""What an executor can run, declared as one value and checked against a plan before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import CACHE_VALUE_BYTES, GQA, KDA, MLA, DeltaRule, Experts, ShortConvolution, Weight
from tinychat.kernels.ops import Plan
from tinychat.kernels.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType
from tinychat.kernels.sampling import Sampling

UNLIMITED = 1 << 30
LATENT_CHUNK = 2048  # tokens of a prompt that the CPU runs together where it makes keys and values of latent rows
HEADS_BYTES = 32 << 20  # of those that are there at the same time, for each of HEADS_THREADS; more if a head's need it
HEADS_THREADS = 8
FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


@dataclass(frozen=True)
class Limits:
    """Largest sizes that an executor computes correctly. A "multiple" says what a size must be divisible by."""

    quants: frozenset[GGMLQuantizationType]  # types of matrices
    float_multiple: int = 1  # of the row length of F32, F16 and BF16 matrices
    float_columns: int = UNLIMITED  # row length of those
    packed_rows: int = UNLIMITED  # rows of one matrix, of all its groups
    heads: int = UNLIMITED
    head_group: int = UNLIMITED  # query heads per kv head
    kv_rows: int = UNLIMITED  # kv heads times the positions of the context
    key_length: int = UNLIMITED  # of a GQA head
    key_multiple: int = 1
    value_multiple: int = 1
    equal_lengths: bool = False  # a GQA head's value length must be its key length
    latent_row: int = UNLIMITED  # values of an MLA cache row
    experts: int = UNLIMITED
    experts_used: int = UNLIMITED
    expert_groups: int = UNLIMITED
    sampling_top_k: int = UNLIMITED
    convolved: int = UNLIMITED  # inputs of a short convolution
    state_dim: int = UNLIMITED  # keys, and values, of a head of a delta rule
    state_multiple: int = 1  # of those, and of the channels of a short convolution
    prefill_chunk: int = UNLIMITED  # tokens that run together
    verified: int = 1  # tokens of one step of Executor.verify; 1: more cost as much as single steps, or go not back
    mtp: bool = False  # it runs Plan.mtp


def heads_bytes(plan: Plan, context: int, threads: int = HEADS_THREADS) -> int:
    """Bytes of the keys and values of heads that the CPU makes of latent rows for a prompt of up to `context` tokens
    and has at the same time."""
    if not plan.latent:
        return 0
    a = plan.latent[0]
    head = CACHE_VALUE_BYTES * (context + 16) * (a.nope + a.rope.dims + a.v_b.rows)
    return max(head, min(a.heads * head, min(threads, HEADS_THREADS) * HEADS_BYTES))


def check(plan: Plan, limits: Limits, device: str, max_context: int) -> None:
    """Raises TinychatError with one line that says what of `plan`, with caches of `max_context` rows, an executor with
    `limits` does not run."""
    if (reason := next(_refusals(plan, limits, max_context), None)) is not None:
        raise TinychatError(f"the {device} executor does not run this model: {reason}")


def check_sampling(sampling: Sampling, limits: Limits) -> None:
    """Raises TinychatError for parameters that an executor with `limits` would not follow."""
    if sampling.top_k > limits.sampling_top_k:
        raise TinychatError(f"top_k {sampling.top_k} is over this device's {limits.sampling_top_k}; take a smaller one")


def _refusals(plan: Plan, limits: Limits, max_context: int) -> Iterator[str]:
    for w in (*plan.matrices, *([plan.layer_table.table.weight] if plan.layer_table else [])):
        yield from _of_weight(w, limits)
    if plan.mtp and not limits.mtp:
        yield "it has a block of multi-token prediction"
    for layer in (*plan.layers, *([plan.mtp.layer] if plan.mtp else [])):
        if isinstance(layer.attention, GQA | MLA):
            kv_heads = layer.attention.kv_heads
            yield from _over("the number of heads", layer.attention.heads, limits.heads)
            yield from _over("the number of heads per kv head", layer.attention.heads // kv_heads, limits.head_group)
            yield from _over("the context, over all kv heads,", kv_heads * max_context, limits.kv_rows)
        match layer.attention:
            case GQA() as a:
                yield from _of_heads(a, limits)
            case DeltaRule() | KDA() as a:
                yield from _over("the number of heads", a.heads, limits.heads)
                yield from _over("the width of a convolution", a.width, limits.convolved)
                for dim in (a.state.key_dim, a.state.value_dim):
                    yield from _over("a head of a delta rule", dim, limits.state_dim)
                    yield from _divided("a head of a delta rule", dim, limits.state_multiple)
            case ShortConvolution() as c:
                yield from _over("the width of a convolution", c.width, limits.convolved)
                yield from _divided("the number of channels of a convolution", c.conv.rows, limits.state_multiple)
            case MLA() as a:
                yield from _over("a latent cache row", a.row, limits.latent_row)
                yield from _divided("a latent cache row", a.row, limits.key_multiple)
                yield from _divided("kv_lora_rank", a.kv_lora, limits.value_multiple)
        if isinstance(layer.feed_forward, Experts):
            router = layer.feed_forward.router
            yield from _over("the number of experts", router.experts, limits.experts)
            yield from _over("the number of experts used", router.top_k, limits.experts_used)
            yield from _over("the number of expert groups", router.groups, limits.expert_groups)


def _of_weight(w: Weight, limits: Limits) -> Iterator[str]:
    if w.type not in limits.quants:
        yield f"tensor {w.tensor} has type {w.type.name}"
    length = w.rows if w.transposed else w.cols
    yield from _divided(f"the row length of tensor {w.tensor}", length, GGML_QUANT_SIZES[w.type][0])
    if w.type in FLOATS:
        yield from _divided(f"the row length of tensor {w.tensor}", length, limits.float_multiple)
        yield from _over(f"the row length of tensor {w.tensor}", w.cols, limits.float_columns)
    yield from _over(f"the number of rows of tensor {w.tensor}", w.rows * w.groups, limits.packed_rows)


def _of_heads(a: GQA, limits: Limits) -> Iterator[str]:
    yield from _over("the key length", a.key_dim, limits.key_length)
    yield from _divided("the key length", a.key_dim, limits.key_multiple)
    yield from _divided("the value length", a.value_dim, limits.value_multiple)
    if limits.equal_lengths and a.value_dim != a.key_dim:
        yield f"the value length {a.value_dim} is not the key length {a.key_dim}"


def _over(what: str, value: int, limit: int) -> Iterator[str]:
    if value > limit:
        yield f"{what} is {value:,}, at most {limit:,} is possible"


def _divided(what: str, value: int, divisor: int) -> Iterator[str]:
    if value % divisor:
        yield f"{what} is {value:,}, which is not a multiple of {divisor}"
