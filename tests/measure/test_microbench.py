"""One kernel, one layer: what is run, what is measured, what is kept."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.cuda_emulated import EmulatedGPU
from tinychat.cli import main
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError
from tinychat.kernels.cuda import executor
from tinychat.kernels.cuda.executor import CUDAExecutor
from tinychat.kernels.ops import weights_of
from tinychat.measure import log, microbench
from tinychat.measure import microbench_plans as plans
from tinychat.measure.lock import machine_lock
from tinychat.measure.results import PartResult


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock and a store of the test's own, and few copies."""
    monkeypatch.setattr("tinychat.measure.lock.lock_path", lambda: tmp_path / "bench.lock")
    monkeypatch.setattr(plans, "block_bytes", lambda: 1 << 20)


@pytest.mark.parametrize(
    ("spec", "what", "nbytes"),
    [
        ("norm_linear:Q4_0:256x512", "norm_linear:Q4_0:256x512", 256 * 512 // 32 * 18 + 512 * 4),
        ("linear_add:q4_k:512x256", "linear_add:Q4_K:512x256", 512 * 144),
        ("gate_up:Q8_0:320x64", "gate_up:Q8_0:320x64", 2 * 320 * 64 // 32 * 34 + 64 * 4),
        ("head:Q6_K:4000x256", "head:Q6_K:4000x256", 4000 * 210 + 256 * 4),
        ("experts_up:Q4_0:128x64", "experts_up:Q4_0:128x64", 4 * 2 * 128 * 64 // 32 * 18 + 64 * 4),
        ("experts_down:Q4_0:64x128", "experts_down:Q4_0:64x128", 4 * 128 * 64 // 32 * 18),
        ("attention::2x32", "attention:F16:2x32", (2048 + 3 + 2) * 2 * 64 * 2),
    ],
)
def test_kernels(spec: str, what: str, nbytes: int) -> None:
    (found,) = microbench.kernel(spec, 2)
    assert (found.what, found.nbytes, found.steps, found.how) == (what, nbytes, 2, "in the batch")
    assert 0 < found.low <= found.seconds <= found.high < 1 and found.copies >= (1 if "head" in spec else 2)
    assert found.gb_s == pytest.approx(nbytes / found.seconds / 1e9) and found.limit_gb_s > 0


def test_a_kernel_of_plain_tinygrad() -> None:
    (found,) = microbench.kernel("norm_linear:Q4_0:512x1024", 2, device="reference")
    assert (
        found.how == "alone" and "plain tinygrad" in found.device and found.nbytes == 512 * 1024 // 32 * 18 + 1024 * 4
    )
    assert 0 < found.low <= found.seconds <= found.high < 1 and found.copies == 4


def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's clock tells launches apart only in a row: each kind of layer, each kernel, is a graph of its copies."""
    monkeypatch.setattr(executor, "GPU", EmulatedGPU)
    monkeypatch.setattr(CUDAExecutor, "read_bandwidth", lambda self: 1.0)
    layer = microbench.layers(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"), "m", 2, device="cuda")
    for r in (*layer, *microbench.kernel("gate_up:Q4_0:64x64", 2, device="cuda")):
        assert r.device == "CUDA · emulator" and r.how == f"{r.copies} in a row" and r.steps == 2
        assert 0 < r.low <= r.seconds <= r.high and r.gb_s == pytest.approx(r.nbytes / r.seconds / 1e9)


def test_copies_are_more_than_the_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    source = plans.RandomWeights()
    plan = plans.kernel_plan(source, *plans.parse("norm_linear:Q4_0:3072x2048"))
    names = {w.tensor for op in plan.ops for w in weights_of(op) if w.rows == 3072}
    assert sum(source.sizes[name] for name in names) >= plans.block_bytes() >= 256 << 20


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "softmax",
        "gate_up:Q9_9",
        "gate_up:Q4_0:7",
        "gate_up:Q4_0:0x64",
        "gate_up:Q4_0:64x-1",
        "gate_up:Q4_K:64x64",
        "gate_up:Q4_0:64x64x64",
        "norm_linear:Q8_1:256x256",
    ],
)
def test_specs_that_are_none(spec: str) -> None:
    with pytest.raises(TinychatError) as e:
        microbench.kernel(spec, 2)
    assert "\n" not in str(e.value)


def test_layers(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_glm", "Q4_0")  # 1 dense layer, 2 with experts
    dense, experts = microbench.layers(path, "m", 2)
    assert dense.what == "dense (layer 0)" and experts.what == "experts (2 layers from 1)"
    gguf = GGUF.open(path)
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    of = [sum(map(plan.weight_bytes, ops)) for ops in plan.ops_of_layers]
    for found, bytes_ in ((dense, of[0]), (experts, of[1])):
        assert 0 <= found.nbytes - bytes_ < 100 * plan.kv_bytes_per_token  # and some rows of the cache
        assert found.copies >= 2 and found.fingerprint == gguf.fingerprint()


def test_a_layer_is_copied_with_its_weights(tmp_path: Path) -> None:
    gguf = GGUF.open(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"))
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    assert plans.layer_kinds(plan) == [[0, 1]]
    copy = plans.renamed(plan.layers[1], 2)
    assert all(w.tensor.startswith("blk.1.") and w.tensor.endswith("#2") for w in weights_of(copy))
    assert len(weights_of(copy)) == 9 and plans.renamed(plan.layers[1], 0) == plan.layers[1]
    source = plans.PartOfFile(gguf)
    assert bytes(source.raw("blk.1.attn_q.weight#2")) == bytes(gguf.raw("blk.1.attn_q.weight"))


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def out(*argv: str) -> str:
        assert main(["bench", *argv]) == 0
        return capsys.readouterr().out

    path = str(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"))
    assert main(["bench", "--history"]) == 1 and "nothing was measured" in capsys.readouterr().err
    (first,) = json.loads(out("--kernel", "gate_up:Q4_0:64x64", "--json"))["results"]
    assert first["what"] == "gate_up:Q4_0:64x64" and set(first) == {f.name for f in fields(PartResult)}
    assert "layers from 0" in out("--block", path)
    assert "16+4" in out(path, "-n", "4", "-p", "16")
    shown = json.loads(out("--history", "--json"))
    assert [r["kind"] for r in shown["ladder"]] == ["kernel", "block"] and shown["models"][0]["n_gen"] == 4
    text = out("--history")
    assert "gate_up:Q4_0:64x64" in text and "16+4" in text
    assert "gate_up" not in out("--history", path)
    with machine_lock():
        for words in (
            f"bench {path}",
            f"bench --block {path}",
            "bench --kernel head",
            f"profile {path}",
            f"smoke {path}",
        ):
            assert main([*words.split(), "--no-wait"]) == 1
            assert "another benchmark is running" in capsys.readouterr().err


def test_damaged_lines_are_left_out() -> None:
    (result,) = microbench.kernel("head:F32:32x32", 1)
    log.save(result)
    with log.log_path(PartResult).open("ab") as f:
        for line in ({"kind": 3}, {**result.as_dict(), "seconds": "fast"}):
            f.write(json.dumps(line).encode() + b"\n")
        f.write(b"\xff{")
    log.save(replace(result, what="other"))
    assert [r.what for r in log.parts()] == [result.what, "other"]
