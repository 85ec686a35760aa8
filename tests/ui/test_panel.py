"""The engine panel: what the figures say, at any width, without colour, and live in the app."""

from dataclasses import replace

import pytest
from textual.app import App, ComposeResult

from tests.support.screens import text_of, until
from tests.support.scripted import INFO
from tinychat import units
from tinychat.backend.protocol import Capabilities, Prefilling, Stats, Usage
from tinychat.chat.state import LoadStage
from tinychat.ui.chat.status import StatusLine
from tinychat.ui.panel import EnginePanel, Reading, figures
from tinychat.ui.panel.reading import PaintMeter

STATS = Stats(
    phase="decode",
    reused_tokens=1812,
    prefilled_tokens=43,
    generated_tokens=412,
    ttft_s=0.41,
    prefill_tok_s=812.3,
    decode_s=5.73,
    decode_tok_s=71.94,
    last_tok_s=72.4,
    kernels_per_token=431,
    jit_batches=2,
    jit_state="replaying",
    gb_s=15.2,
    limit_gb_s=18.7,
    limit_share=0.81,
    weight_bytes=18_300_000_000,
    kv_bytes=54_000_000,
    rss_bytes=1_200_000_000,
)
USAGE = Usage(system=43, history=1812, thinking=214, answer=198, limit=8192)
READING = Reading(STATS, INFO, USAGE, speeds=(60.0, 72.0, 36.0), painted=72.0)


def test_numbers_as_people_read_them():
    assert [units.speed(v) for v in (0.347, 7.25, 72.44, 812.3, 12345)] == ["0.35", "7.2", "72.4", "812", "12,345"]
    assert [figures.seconds(v) for v in (0.414, 3.21, 42, 185)] == ["0.41 s", "3.2 s", "42 s", "3:05"]
    assert figures.size(18_300_000_000) == "18.3 GB"


def test_a_server_of_another_make_says_what_it_does_not_tell():
    info = replace(INFO, device="box:8080", can=Capabilities(), max_context=0)
    reading = Reading(Stats(decode_tok_s=72.0, generated_tokens=9), info)
    rows = [str(r).rstrip() for r in figures.machine_rows(reading, 30)]
    assert rows == ["box:8080", "this server does not tell:", "kernels, memory, context size"]
    assert figures.memory_rows(reading, 30) == []
    ours = replace(reading, stats=STATS)
    assert len(figures.memory_rows(ours, 30)) == 3 and "this server" not in str(figures.machine_rows(ours, 30))


def test_bars():
    assert units.track(0.8, 10) == "▓▓▓▓▓▓▓▓░░" and units.track(0, 4) == "░░░░" and units.track(0.001, 4) == "▓░░░"
    assert units.track(7, 4) == "▓▓▓▓"
    assert (
        figures.spark([0, 36, 72], 10) == "▁▄█"
        and figures.spark([], 5) == ""
        and len(figures.spark(range(99), 12)) == 12
    )


@pytest.mark.parametrize(
    "usage",
    [
        USAGE,
        Usage(limit=4096),
        Usage(1, 1, 1, answer=1, limit=100_000),
        Usage(50, 50, 50, answer=50, limit=100),
        Usage(),
    ],
)
@pytest.mark.parametrize("width", [8, 10, 32])
def test_the_context_bar_shows_every_part_and_fits(usage, width):
    bar = figures.context_bar(usage, width).plain
    assert len(bar) == width
    for name, char in figures.PARTS[:-1]:
        assert (char in bar) == (getattr(usage, name) > 0)


def test_usage_adds_up():
    assert (USAGE.used, USAGE.free) == (2267, 5925) and Usage(5, 5, 5, answer=5, limit=10).free == 0


@pytest.mark.parametrize("width", [27, 32, 50])
def test_every_row_fits(width):
    rows = [
        *figures.now(READING, width),
        *figures.speed_rows(READING, width),
        *figures.time_rows(READING, width),
        *figures.context_rows(USAGE, width),
        *figures.machine_rows(READING, width),
        *figures.memory_rows(READING, width),
    ]
    assert all(row.cell_length <= width for row in rows), [r.plain for r in rows if r.cell_length > width]


def test_drafts_are_shown_where_there_were_some():
    def rows(**changes: float) -> str:
        reading = replace(READING, stats=replace(STATS, **changes))
        made = figures.speed_rows(reading, 31)
        assert all(row.cell_length <= 31 for row in made)
        return "\n".join(" ".join(row.plain.split()) for row in made)

    assert "drafts" not in rows(decode_steps=412)
    said = rows(decode_steps=150, drafted_tokens=1300, accepted_tokens=262, speculation_gain=2.14)
    assert "per step 2.75 tokens, 2.1×" in said and "drafts 262 of 1,300" in said
    said = rows(decode_steps=300, drafted_tokens=90, accepted_tokens=60, mtp_drafted_tokens=90, mtp_accepted_tokens=60)
    assert "mtp 60 of 90" in said and "drafts" not in said
    said = rows(decode_steps=12, forced_tokens=400, speculation_gain=12.3)
    assert "drafts 400 forced" in said


def test_what_happens_now():
    def said(reading: Reading) -> str:
        return " ".join(line.plain for line in figures.now(reading, 32))

    assert said(Reading()).startswith("no model") and said(Reading(Stats(), INFO)).startswith("ready")
    assert said(Reading(loading=LoadStage("loading weights", 0.5))).startswith("loading weights ▓▓▓")
    reading = Reading(Stats(phase="prefill", prefill_tok_s=800), INFO, prefill=Prefilling(512, 1024, 0))
    assert said(reading) == "reading the prompt " + "▓" * 16 + "░" * 16
    assert said(READING).startswith("72.4 tok/s ▇█▄")
    assert "tok/s" not in said(replace(READING, stats=replace(STATS, phase="idle"))), "it is in the answer's footer"


def test_what_an_answer_waits_for():
    stats = Stats(phase="prefill", prefill_tok_s=800)
    said = figures.awaited(Prefilling(512, 1400, 0), stats)
    assert said == "reading the prompt, 512 of 1,400 tokens · 1.1 s left"
    assert figures.awaited(Prefilling(0, 1400, 0), Stats()) == "reading the prompt, 0 of 1,400 tokens"
    assert figures.awaited(Prefilling(41, 41, 0), stats) == "waiting for the first token"
    assert figures.awaited(None, None) == "waiting for the model"


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("height", [40, 30])
async def test_the_panel_on_a_screen(height, inner):
    app = Host()
    async with app.run_test(size=(100, height)) as pilot:
        app.query_one(EnginePanel).show(READING, inner)
        await until(pilot, lambda: "whole answer" in text_of(app))
        screen = text_of(app)
        for text in ("72.4 tok/s", "0.41 s", "6.1 s", "2,267 of 8,192", "28%", "18.3 GB", "54.0 MB"):
            assert text in screen, text
        assert "71.9" not in screen, "the average is in the answer's footer"
        for text in ("13.9 ms", "812 tok/s", "431/token in 2", "replaying", "15.2 of 18.7 GB/s", "81% of limit"):
            assert (text in screen) == inner, text
        assert ("1.2 GB" in screen) == inner, "the whole process"
        assert ("5,925" in screen) == (inner and height == 40), "a lower panel says less about the context"


class Host(App[None]):
    CSS = "EnginePanel { width: 36; height: 1fr; } StatusLine { height: 1; }"

    def compose(self) -> ComposeResult:
        yield StatusLine()
        yield EnginePanel()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
async def test_the_line_at_the_top_fits_and_keeps_what_matters(width):
    app = Host()
    async with app.run_test(size=(width, 10)) as pilot:
        line = app.query_one(StatusLine)
        line.show("scripted:1b", INFO, "How does multi-head latent attention save memory?", "raw", USAGE)
        await until(pilot, lambda: "2,267 of 8,192" in text_of(app))
        first = text_of(app).splitlines()[0]
        assert first.startswith("scripted:1b") and len(first.rstrip()) == width
        assert ("raw How does" in first) == (width >= 60) and ("CPU" in first) == (width >= 120)
        line.show("scripted:1b", INFO, "", "", None)
        await until(pilot, lambda: " of 8,192" not in text_of(app))


def test_what_painting_gives_and_takes():
    now, worked = [100.0], [5.0]
    meter = PaintMeter(lambda: now[0], lambda: worked[0])
    assert meter.rate == meter.average == 0
    for _ in range(21):
        meter.begin()
        worked[0] += 0.002
        meter.painted(10)
        now[0] += 0.05
        worked[0] += 1  # something else
    assert meter.average == pytest.approx(200) and meter.rate == pytest.approx(200) and meter.tokens == 210
    assert meter.seconds == pytest.approx(0.042)
    meter.begin()
    meter.begin()  # before the first is on the screen: counted once
    worked[0] += 0.008
    meter.painted(0)
    meter.painted(0)
    assert meter.seconds == pytest.approx(0.05) and meter.average == pytest.approx(200)
    meter.restart()
    assert meter.tokens == meter.seconds == meter.average == 0
