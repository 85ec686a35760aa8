"""Every area of the screen as characters, at 80×24 and 140×40, and what has the focus.

`pytest tests/test_ui_snapshots.py --snapshot-update` stores what is there now; look at the difference before it is
committed. Times, sizes and speeds are given, so that nothing has to be blanked out.
"""

import contextlib
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.measure.test_bench import RESULT
from tests.support.screens import Host, text_of, until
from tests.support.scripted import INFO, LONG, Script, ScriptedBackend, scripted
from tests.ui.test_panel import STATS
from tinychat.backend.protocol import Usage
from tinychat.chat import settings
from tinychat.chat.changes import Overflow
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.history import History
from tinychat.chat.parameters import Parameters, set_parameter
from tinychat.measure import bench, log
from tinychat.measure.profile.report import Flag, OpTime, Profile
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.overflow import OverflowScreen
from tinychat.ui.screens import first_run, picker, picker_rows
from tinychat.ui.screens import profile as profile_screen
from tinychat.ui.screens.bench import BenchScreen
from tinychat.ui.screens.conversations import ConversationsScreen
from tinychat.ui.screens.dialogs import AskScreen, ConfirmScreen
from tinychat.ui.screens.downloads import Downloads
from tinychat.ui.screens.headers import Headers
from tinychat.ui.screens.inspector import InspectorScreen
from tinychat.ui.screens.parameters import ParametersScreen
from tinychat.ui.screens.picker import PickerScreen
from tinychat.ui.screens.profile import ProfileScreen
from tinychat.ui.screens.settings import SettingsScreen

NOW = 1_790_000_000.0
THINKING, _, ANSWER = LONG.removeprefix("<think>\n").partition("\n</think>\n\n")
FIGURES = {
    "generated_tokens": 412,
    "decode_tok_s": 71.94,
    "ttft_s": 0.41,
    "reused_tokens": 1812,
    "prefilled_tokens": 43,
}
TALK = Conversation(
    (
        Turn("user", "What is a KV cache?"),
        Turn(
            "assistant",
            "What attention reads again: **keys and values** of all tokens so far.",
            stop_reason="eos",
            stats={"generated_tokens": 17, "decode_tok_s": 72.4, "prefilled_tokens": 14},
        ),
        Turn("user", "How does multi-head latent attention save memory?"),
        Turn("assistant", ANSWER, THINKING, thinking_s=3.2, thinking_tokens=62, stop_reason="eos", stats=FIGURES),
    ),
    model="scripted:1b",
    parameters=Parameters(system="Be brief."),
)
sizes = pytest.mark.parametrize("size", [(80, 24), (140, 40)], ids=["80x24", "140x40"])


@pytest.fixture(autouse=True)
def fixed(monkeypatch, tmp_path):
    """The same day, the same memory, no network, and a settings file that everybody could have."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(picker_rows, "available_memory", lambda: 16 * 10**9)
    for module in (picker, first_run):
        monkeypatch.setattr(module, "memory_gb_s", lambda threads: 20.0)
    monkeypatch.setattr(first_run, "available_memory", lambda: 16 * 10**9)
    monkeypatch.setattr(Headers, "missing", lambda self, row: False)
    monkeypatch.setattr(settings, "path", lambda: Path("/home/you/.config/tinychat/settings.toml"))
    monkeypatch.setattr("tinychat.measure.lock.lock_path", lambda: tmp_path / "bench.lock")


def screen(app) -> str:
    focus = app.focused
    name = "nothing" if focus is None else type(focus).__name__ + (f"#{focus.id}" if focus.id else "")
    return "\n".join(line.rstrip() for line in text_of(app).splitlines()) + f"\n\nfocus: {name}"


async def settled(pilot, *texts: str) -> str:
    """The screen once it shows `texts` and has come to rest."""
    await until(pilot, lambda: all(text in text_of(pilot.app) for text in texts))
    seen = ""
    while seen != (seen := screen(pilot.app)):
        await pilot.pause(0.15)
    return seen


@contextlib.asynccontextmanager
async def chat(size, conversation=TALK):
    app = TinychatApp("scripted:1b", INFO.path, open_backend=scripted(Script()))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.controller.ready)
        app.controller.backend.stats = replace(STATS, phase="idle", weight_bytes=770_000_000)
        app.controller.open(conversation)
        await until(pilot, lambda: len(app.chat.transcript.messages()) == len(conversation.turns))
        await until(pilot, lambda: not app.controller.measuring)
        app.controller.usage = Usage(system=4, history=1812, thinking=62, answer=198, limit=4096)
        app.chat.paint_panel()
        yield app, pilot


@sizes
async def test_conversation(size, snapshot):
    async with chat(size) as (_app, pilot):
        assert await settled(pilot, "412 tokens") == snapshot(name="end")
        await pilot.press("ctrl+t")
        await until(pilot, lambda: _app.chat.transcript.unfold)
        await pilot.press("ctrl+home")
        assert await settled(pilot, "What is a KV cache?") == snapshot(name="start, thinking unfolded")
        await pilot.press("pagedown", "ctrl+up")
        assert await settled(pilot, "fork") == snapshot(name="on a message")


@sizes
async def test_prompt_with_completions(size, snapshot):
    async with chat(size, Conversation(model="scripted:1b")) as (_app, pilot):
        assert await settled(pilot, "Ask scripted:1b") == snapshot(name="empty")
        await pilot.press(*"/co")
        assert await settled(pilot, "/conversations") == snapshot(name="commands")
        await pilot.press("escape", "ctrl+j", *"two", "ctrl+j", *"more")
        assert await settled(pilot, "more", " 3 tokens ─") == snapshot(name="three lines")


@sizes
async def test_first_run(size, snapshot):
    app = TinychatApp(open_backend=scripted(Script()))
    async with app.run_test(size=size) as pilot:
        assert await settled(pilot, "smollm2:135m", "tok/s", "enter start") == snapshot(name="three models")
        await pilot.press("escape")
        assert await settled(pilot, "Choose a model with /model") == snapshot(name="welcome")


@sizes
async def test_help_of_the_chat(size, snapshot):
    async with chat(size) as (_app, pilot):
        await pilot.press("f1")
        assert await settled(pilot, "Keys") == snapshot(name="keys")
        await pilot.press("end")
        assert await settled(pilot, "/quit") == snapshot(name="end")


@sizes
async def test_the_context_is_full(size, snapshot):
    async with chat(size) as (app, pilot):
        usage = Usage(history=3701, thinking=300, limit=4096)
        overflow = Overflow(TALK, False, usage, 256, 3, Turn("user", "more"), larger=8192)
        app.push_screen(OverflowScreen(overflow))
        assert await settled(pilot, "The context is full") == snapshot


def report() -> Profile:
    def row(name: str, shape: str, quant: str, category: str, calls: int, ms: float, gb: float) -> OpTime:
        nbytes = int(gb * ms * 1e6)
        return OpTime(
            name, name, shape, quant, category, calls, ms / 1e3, ms / 2e4, ms / 5, nbytes, gb, gb / 20, 64, 0.52
        )

    rows = [
        row("linear_add", "576×1536", "Q4_1", "mat-vec Q4_1", 60, 2.1, 17.2),
        row("head", "49152×576", "Q8_0", "mat-vec Q8_0", 1, 1.4, 19.0),
        row("attention", "9×64", "", "attention", 30, 0.8, 4.1),
        row("norm_linear", "576×960", "Q4_1", "mat-vec Q4_1", 60, 0.5, 1.1),
    ]
    return Profile(
        fingerprint="f" * 64,
        versions={"tinychat": "0.1.0"},
        machine="Linux",
        date="2026-01-02T03:04:05+00:00",
        model="smollm2:135m",
        device="CPU",
        threads=2,
        cores=2,
        how="in the batch",
        steps=10,
        depth=64,
        token_s=0.005,
        fastest_s=0.0049,
        slowest_s=0.0054,
        tok_s=200.0,
        bytes_per_token=92_000_000,
        gb_s=18.4,
        limit_gb_s=20.0,
        limit_share=0.92,
        clocks=0.012,
        explained=0.96,
        kernels=151,
        overhead_s=1e-6,
        first_s=[0.02, 0.006, 0.005],
        caches=[],
        rows=rows,
        batches=[{"name": "step", "kernels": 151, "seconds": 0.005, "spread": 0.03}],
        categories={"mat-vec Q4_1": 0.0026, "mat-vec Q8_0": 0.0014, "attention": 0.0008, "sampling": 0.0001},
        waits=[0.04, 0.06],
        uneven=0.02,
        flags=[Flag("slow", "norm_linear 576×960 reads 1.1 GB/s, 6 % of the limit")],
        deeper=["tinychat kernels smollm2:135m"],
    )


@sizes
@pytest.mark.parametrize("name", ["bench", "profile"])
async def test_measuring(name, size, snapshot, monkeypatch):
    backend = ScriptedBackend(Script())
    log.save(replace(RESULT, fingerprint="scripted", model="scripted:1b", decode_tok_s=80.0, decode_runs=(80.0,)))
    latest = replace(RESULT, fingerprint="scripted", model="scripted:1b", date="2026-02-03T04:05:06+00:00")
    monkeypatch.setattr(bench, "run", lambda *args, **options: latest)
    monkeypatch.setattr(profile_screen, "profile", lambda *args, **options: report())
    app = Host((BenchScreen if name == "bench" else ProfileScreen)(backend, name="scripted:1b"))
    async with app.run_test(size=size) as pilot:
        assert await settled(pilot, "measured and saved" if name == "bench" else "200.0 tok/s") == snapshot


@sizes
async def test_conversations(size, snapshot, tmp_path, monkeypatch):
    history = History(tmp_path / "h.db")
    talks = (
        (9 * 86400, "Große Pläne für den Garten", "qwen3:8b"),
        (7200, "日本語の質問", ""),
        (60, "How does MLA work?", "smollm2:135m"),
    )
    for ago, title, model in talks:
        monkeypatch.setattr(time, "time", lambda ago=ago: NOW - ago)
        history.save(Conversation((Turn("user", title), Turn("assistant", "It keeps one latent row.")), model))
    monkeypatch.setattr(time, "time", lambda: NOW)
    app = Host(ConversationsScreen(history))
    async with app.run_test(size=size) as pilot:
        assert await settled(pilot, "How does MLA") == snapshot(name="list")
        await pilot.press(*"latent")
        assert await settled(pilot, "keeps one latent row") == snapshot(name="search")


def inspector() -> InspectorScreen:
    backend = ScriptedBackend(Script())
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How does MLA <|end|> work?"}]
    prompt = backend.chat.render(asked)
    answer = backend.tokenizer.encode("It keeps one latent row for each token.")
    logprobs = [(-0.05, -1.2, -2.5)[n % 3] for n in range(len(answer))]
    return InspectorScreen(backend.token_texts([*prompt, *answer]), logprobs)


OTHERS = {
    "picker": (lambda: PickerScreen(downloads=Downloads()), "Choose a model"),
    "parameters": (lambda: ParametersScreen(set_parameter(Parameters(system="Be brief."), "seed", "42")), "Be brief."),
    "settings": (SettingsScreen, "[presets.coder]"),
    "inspector": (inspector, "perplexity"),
    "confirm": (lambda: ConfirmScreen("Delete “How does MLA work?” with its 4 turns for ever?", "Delete"), "for ever?"),
    "ask": (lambda: AskScreen("A new name for this conversation", "How does MLA work?"), "A new name"),
}


@sizes
@pytest.mark.parametrize("name", OTHERS)
async def test_dialogs(name, size, snapshot):
    make, text = OTHERS[name]
    app = Host(make())
    async with app.run_test(size=size) as pilot:
        assert await settled(pilot, text) == snapshot
