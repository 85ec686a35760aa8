"""Which launches of a graph run beside each other, which layers share their launches, and which of a prompt's steps are
taken."""

from itertools import combinations
from pathlib import Path

import pytest

from tests.support import tiny
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.kernels.cuda.builder import Builder
from tinychat.kernels.cuda.executor import Prompts
from tinychat.kernels.cuda.launch import Launch, edges, place
from tinychat.kernels.cuda.layout import Layout
from tinychat.kernels.cuda.prefill import Chip, Prefill
from tinychat.kernels.cuda.step import decode


def touched(launch: Launch) -> tuple[set[str], set[str]]:
    """The buffers that a launch writes, and all of its buffers."""
    args = [(c_type.startswith("const"), place(buffer)[0]) for c_type, _, buffer in launch.args]
    return {buffer for const, buffer in args if not const}, {buffer for _, buffer in args}


@pytest.mark.parametrize("variant", ["deepseek2_glm", "qwen35moe", "qwen3moe"])
def test_nothing_touches_what_a_launch_beside_it_writes(variant: str, tmp_path: Path) -> None:
    gguf = GGUF.open(tiny.write(tmp_path / "m.gguf", variant, "F16"))
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    b = Builder(plan, Layout(plan, {n: t.nbytes for n, t in gguf.tensors.items()}), 64)
    launches = Prefill(b, 64, Chip(True, 227 << 10)).layers()
    before: list[set[int]] = [set() for _ in launches]  # all that a launch waits for
    for first, then in edges(launches):
        before[then] |= before[first] | {first}
    assert len(before[-1]) == len(launches) - 1  # the last one waits for all
    beside = [(i, j) for i, j in combinations(range(len(launches)), 2) if i not in before[j]]
    assert bool(beside) == (variant != "qwen3moe")  # which has no shared expert
    for i, j in beside:
        (wrote, used), (writes, uses) = touched(launches[i]), touched(launches[j])
        assert not wrote & uses and not writes & used, (launches[i].name, launches[j].name)


def described(launches: list[Launch]) -> list[tuple[object, ...]]:
    """What a launch runs: its source, and everything that does not stand there."""
    return [(x.source(), x.args, x.grid_of(5, 9), x.shared, x.bytes, x.kind, x.aside, x.joins) for x in launches]


@pytest.mark.parametrize(
    ("variant", "alike"),
    [
        ("deepseek2_27_layers", 25),  # one has a dense feed-forward
        ("glm4moe", 1),
        ("gpt-oss", 1),  # windows and none in turn
        ("qwen35_states", 1),
        ("gemma3", 5),
        ("gemma4_layer_embeddings", 0),  # its kernels know the number of their layer
    ],
)
def test_launches_made_once_for_layers_that_are_alike_are_those_of_each(
    variant: str, alike: int, tmp_path: Path
) -> None:
    gguf = GGUF.open(tiny.write(tmp_path / "m.gguf", variant, "Q4_0"))
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    once, each = (Builder(plan, Layout(plan, {n: t.nbytes for n, t in gguf.tensors.items()}), 64) for _ in range(2))
    assert sum(i != first for i, first in enumerate(once._first)) == alike
    each._first = list(range(len(plan.layers)))
    made = []
    for b in (once, each):
        steps = [decode(b), decode(b.of(4))]
        launches = [[launch for launch, _ in step] for step in steps] + [Prefill(b, 64, Chip(True, 227 << 10)).layers()]
        made.append(([[op for _, op in step] for step in steps], [described(x) for x in launches], b.buffers))
    assert made[0] == made[1]


def test_the_narrowest_kind_of_prompt_step_that_fits_is_taken() -> None:
    taken = list[tuple[int, int]]()
    kinds = [(16, 4096), (64, 4096), (1024, 4096), (16, 128), (64, 128)]
    prompts = Prompts({kind: lambda count, keys, kind=kind: taken.append(kind) for kind in kinds}, print, print)  # type: ignore[misc]
    for count, keys in ((16, 16), (17, 128), (16, 129), (64, 4096), (65, 65)):
        prompts.step(count, keys)
    assert taken == [(16, 128), (64, 128), (16, 4096), (64, 4096), (1024, 4096)]
