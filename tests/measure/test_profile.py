"""The profile report: it explains the measured time, and finds slowness that was put in."""

import io
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.support import tiny
from tests.support.screens import until
from tinychat.chat.conversation import Turn
from tinychat.chat.parameters import Parameters
from tinychat.chat.settings import Settings
from tinychat.cli import main
from tinychat.engine import Engine
from tinychat.engine import memory_limit as limit
from tinychat.errors import TinychatError
from tinychat.kernels.cpu import executor as cpu
from tinychat.kernels.ops import GateUp
from tinychat.kernels.profile import Part, function_source, name_of, quant_of, shape_of
from tinychat.kernels.sampling import Sampling
from tinychat.measure import bench
from tinychat.measure.lock import machine_lock
from tinychat.measure.profile import Profile, kernels, measure, profile, view
from tinychat.measure.profile.measure import explain
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.message import NoticeLine


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinychat.measure.lock.lock_path", lambda: tmp_path / "bench.lock")


@contextmanager
def load(path: Path, device: str = "cpu", threads: int = 2) -> Iterator[Engine]:
    engine = Engine.load(path, device=device, threads=threads)
    try:
        yield engine
    finally:
        engine.close()


def text_of(r: Profile) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(view(r))
    return console.export_text()


def kinds(r: Profile) -> set[str]:
    return {flag.kind for flag in r.flags}


def flag(r: Profile, kind: str) -> str:
    return next(f.text for f in r.flags if f.kind == kind)


# What it says


def test_the_real_model_is_explained(smollm2_path: Path) -> None:
    with load(smollm2_path) as engine:
        r = profile(engine, 6)
        assert 0 < r.explained <= 1  # how much, other programs decide as well: see test_figures_of_other_machines
        assert r.how == "in the batch" and r.steps == 6 and r.kernels == 152
        assert r.fastest_s <= r.token_s <= r.slowest_s and r.tok_s == pytest.approx(1 / r.token_s)
        # every op of the plan is in a row, with its bytes
        assert sum(row.calls for row in r.rows) == r.kernels
        assert {row.name for row in r.rows} == {"embed", "norm_linear", "attention", "linear_add", "gate_up", "head"}
        assert sum(row.nbytes for row in r.rows) == pytest.approx(r.bytes_per_token, rel=0.01)
        gate_up = next(row for row in r.rows if row.name == "gate_up")
        assert (gate_up.shape, gate_up.quant, gate_up.calls) == ("2×1536×576", "Q4_1", 30)
        assert gate_up.nbytes == 30 * 2 * 1536 * 576 // 32 * 20 + 30 * 576 * 4
        assert gate_up.gb_s == pytest.approx(gate_up.nbytes / gate_up.seconds / 1e9)
        assert {"mat-vec Q4_1", "mat-vec Q8_0", "attention", "sampling"} < set(r.categories)
        assert len(r.waits) == 2 and engine.tokens == []
        raw = json.loads(Path(r.files[0]).read_text())
        assert np.shape(raw["parts"][3]["work"]) == (6, 2) and raw["report"]["kernels"] == 152
        source = function_source((cpu.compiler.SOURCES / "step.c").read_text(), "gate_up")
        assert source and any(k.source.startswith(source) for k in kernels(engine))


def test_clocks_leave_the_answer_alone(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_glm", "Q4_K_M")
    with load(path) as engine:
        ids, greedy = bench.prompt(engine, 20, 0), Sampling(temperature=0.0)
        before = [t.id for t in engine.generate(ids, greedy, 12, raw=True)]
        r = profile(engine, 5)
        assert [t.id for t in engine.generate(ids, greedy, 12, raw=True)] == before
        assert {"routing", "attention", "experts Q4_K", "experts Q6_K"} <= set(r.categories)


def test_seven_parts_in_the_terminal(tmp_path: Path) -> None:
    with load(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")) as engine:
        r = replace(profile(engine, 4), model="\x1b[31mevil\n[red]")
    text = text_of(r)
    assert all(f"\n{n} " in "\n" + text for n in range(1, 8)) and "\x1b" not in text and "[red]" in text
    for words in (
        "measured in the batch",
        "derived",
        "of the memory limit",
        "waiting at barriers",
        "compiled C library",
    ):
        assert words in text
    assert json.loads(json.dumps(r.as_dict()))["rows"][0]["name"] == r.rows[0].name


def test_plain_tinygrad(tmp_path: Path) -> None:
    with load(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"), "reference") as engine:
        assert engine.stats.jit_state == "compiling"
        states = [engine.stats.jit_state for _ in engine.generate([1, 2, 3], Sampling(temperature=0.0), 3, raw=True)]
        assert states == ["replaying"] * 3
        r = profile(engine, 3)
        found = kernels(engine)
        assert r.how == "alone" and r.kernels == engine.executor.kernels_per_token == sum(k.calls for k in found) > 20
        assert {row.op for row in r.rows} == {name_of(op) for op in engine.plan.ops}  # every kernel has its op
        head = next(row for row in r.rows if row.op == "head" and row.nbytes > 10_000)
        assert head.category == "mat-vec Q6_K" or head.category.startswith("mat-vec Q")
        assert r.explained > 0
        schedules, programs, binaries = r.caches  # of the prompt's step and of a token's
        assert (
            schedules["misses"] + schedules["hits"] > 0
        )  # which of both is up to the tests before, in the same process
        assert 0 < schedules["seconds"] < programs["seconds"] + sum(r.first_s)
        assert programs["hits"] + programs["misses"] >= r.kernels
        assert binaries["hits"] + binaries["misses"] == programs["misses"] and binaries["seconds"] is None
        assert len(r.first_s) == 1 and r.first_s[0] > r.token_s
        assert "binaries, on disk: " in text_of(r) and "time not measured" in text_of(r)
        assert all(head.name != k.name or "void" in k.source for k in found)
        assert {"one thread", "launch-bound"} <= kinds(r) and "byte" in flag(r, "byte-wise loads")
        assert "kernels alone add up to" in text_of(r) and "measured alone" in text_of(r)


# Slowness that was put in


def test_a_sleeping_op_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is compiled with 0.3 ms of sleep in every gate_up."""
    path = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    with load(path, threads=1) as engine:
        assert next(row.share for row in profile(engine, 8).rows if row.name == "gate_up") < 0.7
    original = cpu.Library
    monkeypatch.setattr(cpu, "Library", lambda flags, notice=None: original((*flags, "-DSLOW_OP=GATE_UP"), notice))
    with load(path, threads=1) as engine:
        r = profile(engine, 8)
    assert r.rows[0].name == "gate_up" and r.rows[0].share > 0.7 and r.rows[0].seconds > 2 * 0.0003
    assert "gate_up" in flag(r, "slow memory")


def test_one_thread_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "default_threads", lambda: 8)
    path = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    with load(path, threads=1) as engine:
        assert "of 8" in flag(profile(engine, 3), "one thread")
    with load(path, threads=2) as engine:
        assert "one thread" not in kinds(profile(engine, 3))


def measured(engine: Engine, change: object) -> Profile:
    """A real profile whose parts went through `change`: what a machine would show that we cannot build here."""
    engine.stats.limit_gb_s = 20.0
    p = engine.executor.profile(1, 0, 8)  # type: ignore[attr-defined]
    even = [Part(q.name, q.index, q.nbytes, q.tasks, np.full((8, 2), 1e-4), np.full((8, 2), 1e-6)) for q in p.parts]
    parts = tuple(change(q) for q in even)  # type: ignore[operator]
    token = sum(q.seconds for q in parts) + 1e-5
    return explain(replace(p, parts=parts, tokens=token, plain=token, sampling=np.full(8, 1e-6)), engine, "m")


def test_figures_of_other_machines(tmp_path: Path) -> None:
    with load(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")) as engine:
        gate_up = [i for i, op in enumerate(engine.plan.ops) if isinstance(op, GateUp)]

        def slow(work: tuple[float, float], wait: tuple[float, float], tasks: int = 100) -> Profile:
            def change(q: Part) -> Part:
                if q.index not in gate_up:
                    return q
                return replace(q, tasks=tasks, nbytes=10**7, work=np.full((8, 2), work), wait=np.full((8, 2), wait))

            return measured(engine, change)

        good = slow((5e-4, 5e-4), (1e-6, 1e-6))
        assert good.explained >= 0.95
        assert sum(good.categories.values()) == pytest.approx(good.token_s * (1 + good.clocks), rel=0.05)
        assert not [f for f in good.flags if "gate_up" in f.text] and "barrier-bound" not in kinds(good)
        serial = slow((1e-2, 1e-6), (1e-6, 1e-2))
        assert "gate_up" in flag(serial, "serial") and "whose work is larger" in flag(serial, "barrier-bound")
        assert "slow memory" in kinds(serial)
        assert "other programs" in flag(slow((1e-3, 1e-3), (2e-3, 2e-3)), "barrier-bound")
        assert "1 pieces" in flag(slow((5e-4, 5e-4), (1e-6, 1e-6), tasks=1), "too few tasks")
        p = engine.executor.profile(1, 0, 8)  # type: ignore[attr-defined]
        outside = explain(replace(p, tokens=p.tokens + 0.1, plain=p.plain + 0.1), engine, "m")
        assert "outside" in flag(outside, "launch-bound")
        away = measured(
            engine, lambda q: replace(q, work=np.full((8, 2), (2e-4, 0)), wait=np.full((8, 2), (1e-6, 2e-4)))
        )
        assert "others had no core" in flag(away, "disturbed") and not {"serial", "barrier-bound"} & kinds(away)
        late = replace(
            p,
            parts=tuple(
                replace(q, work=q.work + 0.01 * (np.arange(8) == i % 8)[:, None]) for i, q in enumerate(p.parts)
            ),
        )
        late = replace(late, tokens=sum(q.seconds for q in late.parts) + 1e-5, plain=sum(q.seconds for q in late.parts))
        assert any("another op each time" in f.text for f in explain(late, engine, "m").flags)
        assert "sampling" in kinds(explain(replace(p, sampling=p.tokens * 0.5), engine, "m"))
        assert "disturbed" in kinds(explain(replace(p, plain=np.linspace(1, 3, 8)), engine, "m"))
        engine.stats.limit_gb_s = 1e-6
        assert "above the limit" in kinds(explain(p, engine, "m"))


# What cannot be done


def test_refusals(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    with load(path) as engine:
        with pytest.raises(TinychatError, match="do not fit"):
            profile(engine, 400)
        assert [t.text for t in engine.generate([1, 2], Sampling(temperature=0.0), 3, raw=True)]
        with machine_lock(), pytest.raises(TinychatError, match="another benchmark"):
            profile(engine, 2, wait=False)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    assert main(["profile", str(path), "-n", "3", "--json", "--source"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["steps"] == 3 and "static void" in next(iter(shown["sources"].values())) and limit.stored("CPU")
    assert main(["profile", str(path), "-n", "3"]) == 0
    assert "categories" in capsys.readouterr().out
    assert main(["kernels", str(path)]) == 0
    assert "norm_linear" in capsys.readouterr().out
    assert main(["kernels", str(path), "--source", "head"]) == 0
    assert capsys.readouterr().out.startswith("static void head(")
    assert main(["kernels", str(path), "--source", "nosuch"]) == 1
    assert "no kernel 'nosuch'" in capsys.readouterr().err


def test_every_op_has_a_name_and_shape(tmp_path: Path) -> None:
    for variant in ("deepseek2_glm", "qwen3moe", "deepseek2_lite_legacy"):
        with load(tiny.write(tmp_path / "m.gguf", variant), threads=1) as engine:
            for op in engine.plan.ops:
                assert shape_of(op) and (quant_of(op) or name_of(op) in ("attention", "rope_store", "latent_store")), op
            assert all(k.source for k in kernels(engine))


# Where a request's time goes


def test_parts_of_a_request(tmp_path: Path) -> None:
    with load(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")) as engine:
        ids = engine.chat.render([{"role": "user", "content": "hello " * 60}])
        started = time.perf_counter()
        rendering = (engine.chat.template_s, engine.chat.tokenise_s)
        tokens = list(engine.generate(ids, Sampling(temperature=0.0), 30, rendering=rendering))
        took, s = time.perf_counter() - started, engine.stats
        parts = dict(s.parts())
        assert list(parts) == [
            "waiting",
            "template",
            "tokenise",
            "prefill",
            "first token",
            "decode",
            "sampling",
            "detokenise",
        ]
        assert parts.pop("waiting") == 0  # nothing else ran
        assert len(tokens) >= 30 and all(v > 0 for v in parts.values()), parts
        answering = sum(parts.values()) - s.template_s - s.tokenise_s
        assert answering <= took * 1.001  # no moment is counted twice
        assert s.ttft_s >= (s.prefill_s + s.first_token_s) * 0.999
        assert s.token_s == pytest.approx(1 / s.decode_tok_s)
        list(engine.generate(ids, Sampling(temperature=0.0), 2, raw=True))
        assert s.template_s == s.tokenise_s == 0  # nobody rendered this one


async def test_the_chat_tells_where_the_time_went(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    app = TinychatApp("m", path, own=Settings(parameters=Parameters(max_tokens=20)))
    async with app.run_test(size=(100, 40)) as pilot:
        await until(pilot, lambda: app.controller.ready)
        app.controller.ask(Turn("user", "hello"))
        await until(pilot, lambda: app.controller.conversation.turns and not app.controller.busy)
        await until(pilot, lambda: (last := app.chat.transcript.last_answer) and not last.live)
        await pilot.pause()
        await app.chat.run_command("stats")
        said = " ".join(str(app.chat.transcript.query(NoticeLine).last().content).split())
        spent = dict(re.findall(r"([a-z]+(?: token)?) ([\d.,]+) ms", said.split("time: ")[1]))
        assert list(spent) == [
            "waiting",
            "template",
            "tokenise",
            "prefill",
            "first token",
            "decode",
            "sampling",
            "detokenise",
            "painting",
        ]
        assert float(spent["painting"]) > 0 and float(spent["decode"]) > 0
        assert re.search(r"first token after [\d.,]+ ms · [\d.,]+ ms per output token", said)
        assert "1 kernel per token in 1 batch, replaying" in said


def test_run_tells_where_the_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    assert main(["run", str(path), "hello", "--max-tokens", "5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    names = ("template", "tokenise", "prefill", "first_token", "decode", "sampling", "detokenise", "ttft", "token")
    assert (
        all(shown[f"{name}_s"] > 0 for name in names) and shown["painting_s"] == 0 and shown["jit_state"] == "replaying"
    )


def test_old_profiles_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    monkeypatch.setattr(measure, "profiles_dir", lambda: folder)
    for n in range(measure.KEPT + 5):
        (folder / f"20000101-{n:06d}-1-old.json").write_text("{}")
    with load(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"), threads=1) as engine:
        kept = Path(profile(engine, 2).files[0])
    found = sorted(folder.glob("*.json"))
    assert len(found) == measure.KEPT and found[-1] == kept
