"""Which launches of a graph run beside each other, and which of a prompt's steps are taken."""

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


def test_the_narrowest_kind_of_prompt_step_that_fits_is_taken() -> None:
    taken = list[tuple[int, int]]()
    kinds = [(16, 4096), (64, 4096), (1024, 4096), (16, 128), (64, 128)]
    prompts = Prompts({kind: lambda count, keys, kind=kind: taken.append(kind) for kind in kinds}, print, print)  # type: ignore[misc]
    for count, keys in ((16, 16), (17, 128), (16, 129), (64, 4096), (65, 65)):
        prompts.step(count, keys)
    assert taken == [(16, 128), (64, 128), (16, 4096), (64, 4096), (1024, 4096)]
