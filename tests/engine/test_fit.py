"""Memory: what is free, what a model needs, the verdict."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cpu.test_executor import executor
from tests.support import tiny
from tinychat.engine import snapshots
from tinychat.engine.config import ModelConfig
from tinychat.engine.fit import LATENT_PROMPTS, OVERHEAD, fit, sizes
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.engine.stats import available_memory
from tinychat.kernels.limits import heads_bytes
from tinychat.models.registry import resolve


def test_verdicts() -> None:
    gb = 10**9
    assert fit(4 * gb, 1_000_000, 1000, 8 * gb).verdict == "fits"
    assert fit(7 * gb, 1_000_000, 1000, 8 * gb).verdict == "tight"
    assert fit(8 * gb, 1_000_000, 1000, 8 * gb).verdict == "does not fit"
    assert fit(1 * gb, 8 * gb, 8000, 8 * gb).verdict == "does not fit"  # the context counts
    assert fit(0, 0, 1000, 8 * gb).verdict == fit(gb, 1, 1, 0).verdict == "unknown"
    told = fit(4 * gb, 1_000_000, 1000, 8 * gb)
    assert told.needed == 4 * gb + 1_000_000 + OVERHEAD
    parts = "weights 4.0 GB + 1.0 MB for 1,000 tokens + 314.6 MB for the program"
    assert told.explanation == f"{parts} = 4.3 GB of 8.0 GB free"


def test_this_machine() -> None:
    assert fit(1, 0, 1).verdict == "fits"
    assert fit(10**15, 0, 1).verdict == "does not fit"


def test_the_registry_agrees_with_the_real_header(smollm2_path: Path) -> None:
    model = resolve("smollm2:135m")
    weights, of_context = sizes(smollm2_path)
    assert of_context(4096) == model.kv_bytes(4096) > 0
    assert weights < model.size < weights * 1.03


@pytest.mark.parametrize(("variant", "long"), [("deepseek2_glm", True), ("kimi-linear", False)])
def test_prompts_of_latent_attention_count(variant: str, long: bool, tmp_path: Path) -> None:
    gguf = GGUF.open(path := tiny.write(tmp_path / "m.gguf", variant))
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    for context in (1024, 2048, 4096):
        activations = LATENT_PROMPTS * min(context, 2048) // 2048 if long else 0
        rest = plan.kv_bytes(context) + snapshots.memory(plan)
        assert sizes(path)[1](context) == rest + activations + heads_bytes(plan, context)
    with executor(path, context=1000) as ex:
        assert 0 < 2 * ex._context.expanded_room == heads_bytes(plan, 1000, 2) <= heads_bytes(plan, 1000)
    assert heads_bytes(plan, 1 << 19) == 256 << 20  # of some heads


def machine(root: Path, available_kb: int, **files: str) -> Path:
    """A /proc and /sys of a machine with the given memory and control group files."""
    files = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {available_kb} kB\n", **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_without_a_limit(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, 1000)) == 1_024_000
    limits = {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.current": "5\n",
    }
    assert available_memory(machine(tmp_path, 1000, **limits)) == 1_024_000


@pytest.mark.parametrize("group", ["/", "/pod/container"])
def test_the_limit_of_a_container(tmp_path: Path, group: str) -> None:
    """Version 2; inside a container the group's own path is often not visible, but the limit is at the top."""
    limits = {
        "proc/self/cgroup": f"0::{group}\n",
        "sys/fs/cgroup/memory.max": "500000\n",
        "sys/fs/cgroup/memory.current": "300000\n",
        "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 100000\n",
    }
    assert available_memory(machine(tmp_path, 1000, **limits)) == 300_000


def test_the_limit_of_a_parent_group(tmp_path: Path) -> None:
    limits = {"proc/self/cgroup": "0::/a/b\n"}
    for folder, limit in (("a", "600000"), ("a/b", "900000")):
        limits |= {
            f"sys/fs/cgroup/{folder}/memory.max": limit,
            f"sys/fs/cgroup/{folder}/memory.current": "100000",
            f"sys/fs/cgroup/{folder}/memory.stat": "inactive_file 0\n",
        }
    assert available_memory(machine(tmp_path, 1000, **limits)) == 500_000


def test_the_limit_of_a_version_1_group(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "5:cpu:/x\n3:memory:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "400000",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "150000",
        "sys/fs/cgroup/memory/x/memory.stat": "cache 1\n",
    }
    assert available_memory(machine(tmp_path, 1000, **limits)) == 250_000


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_a_loaded_model_takes_what_was_foretold(smollm2_path: Path) -> None:
    script = f"""
from tinychat.engine import Engine, Sampling
engine = Engine.load({str(smollm2_path)!r}, max_context=4096)
list(engine.generate(list(range(100, 700)), Sampling(), 4))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    peak = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout) * 1024
    weights, of_context = sizes(smollm2_path)
    needed = fit(weights, of_context(4096), 4096).needed
    assert 0.4 * needed < peak < needed
