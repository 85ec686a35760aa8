"""How smoothly a long answer is painted, and what painting takes away from decoding. It is not run with the tests.

    python -m scripts.smoothness MODEL [--rate 200 600] [--size 100x30 80x24] [--tokens 3000]

MODEL (smollm2:135m) gives the tokenizer and everything else but the forward step: a device that needs 1/RATE seconds
for a token and runs four ahead of the reader, as the CUDA executor does, says a 3,000-token answer of lists, tables and
code. A rate of 0 lets the model itself decode, as fast as it can.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.screens import until
from tinychat import process
from tinychat.backend.engine_thread import EngineThread
from tinychat.backend.local import LocalBackend
from tinychat.chat.parameters import Parameters
from tinychat.chat.settings import Settings
from tinychat.engine.devices import OnProgress
from tinychat.engine.engine import Engine
from tinychat.kernels.executor import Mask
from tinychat.kernels.sampling import Sampling
from tinychat.models import cache
from tinychat.models.registry import resolve
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.markdown import MarkdownView

AHEAD = 4  # steps enqueued before the oldest is read, as in kernels/cuda
ITEMS = "\n".join(
    f"{i}. **Item {i}**: `code` and enough words that it wraps at eighty columns\n   - {i}" for i in range(1, 30)
)
TABLE = "| a | b | c |\n|---|---|---|\n" + "\n".join(f"| row {i} | value {i} | some text here |" for i in range(25))
CODE = "```python\n" + "\n".join(f"def function_{i}(x: int) -> int:\n    return x * {i}" for i in range(40)) + "\n```"
PROSE = "A paragraph of prose with **marks** that goes on. " * 30
ANSWER = f"{ITEMS}\n\n{PROSE}\n\n{TABLE}\n\n{CODE}\n\n"


class Device:
    """An executor that says `ids`, one each 1/`rate` s, never more than AHEAD steps before the reader. The rest is
    `real`'s."""

    def __init__(self, real: Any, ids: Sequence[int], rate: float) -> None:
        self._real, self._ids, self._rate = real, ids, rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def decode(
        self, token: int, pos: int, sampling: Sampling, recent: Sequence[int], mask: Mask | None = None
    ) -> Iterator[tuple[int, float]]:
        done: deque[float] = deque()
        last = time.perf_counter()
        for token in self._ids:
            while len(done) < AHEAD:
                time.sleep(0)  # a launch: the interpreter is let go for a moment
                last = max(last, time.perf_counter()) + 1 / self._rate
                done.append(last)
            if (left := done.popleft() - time.perf_counter()) > 0:
                time.sleep(left)
            yield token, -0.5


def load(path: Path, rate: float, tokens: int, progress: OnProgress) -> Engine:
    """The model; with a rate, saying `tokens` tokens of ANSWER again and again."""
    engine = Engine.load(path, max_context=8192, progress=progress, speculate=0 if rate else "auto")
    if rate:
        ids = engine.tokenizer.encode(ANSWER)
        ids = [*(ids * (tokens // len(ids) + 1))[:tokens], min(engine.tokenizer.stop_ids)]
        engine.executor = engine.session.executor = Device(engine.executor, ids, rate)
    return engine


def clock_of(ident: int) -> Callable[[], float]:
    """The CPU seconds of a thread."""
    clock = time.pthread_getcpuclockid(ident)
    return lambda: time.clock_gettime(clock)


@dataclass(frozen=True)
class Figures:
    """Of one answer: tokens per second, the longest time between two paints, and CPU time per token of the two
    threads."""

    decoded: float
    painted: float
    gap_ms: float
    screen_us: float
    engine_us: float

    def __str__(self) -> str:
        return (
            f"{self.decoded:8.1f} {self.painted:8.1f} {self.painted / self.decoded:8.1%} {self.gap_ms:7.0f} "
            f"{self.screen_us:10.0f} {self.engine_us:10.0f}"
        )


HEADING = "size       tok/s  decoded  painted    share  gap ms  screen us  engine us   (per token)"


async def measure(path: Path, rate: float, size: tuple[int, int], tokens: int) -> Figures:
    """One answer. Raises AssertionError when the screen does not end with what was said, or did not follow it."""
    own = Settings(parameters=Parameters(max_tokens=tokens))
    thread = EngineThread()

    def open_backend(path: Path, *, progress: OnProgress, **options: Any) -> LocalBackend:
        return thread.call(lambda: LocalBackend(load(path, rate, tokens, progress), thread))

    process.prepare_for_screen()
    app = TinychatApp("model", path, own=own, open_backend=open_backend, mounted=process.freeze)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.controller.ready, 120)
        chat, c = app.chat, app.controller
        clocks = clock_of(threading.get_ident()), clock_of(thread.ident)
        chat.prompt.put("Explain twenty English words, in a long list.")
        await pilot.press("enter")
        await plain_until(lambda: bool(c.trace.tokens))  # a short answer may have ended by then
        began, before = [clock() for clock in clocks], len(c.trace.tokens)
        chat.painter.longest_gap = 0.0
        await plain_until(lambda: c.running is None)
        us = [1e6 * (clock() - start) / (len(c.trace.tokens) - before) for clock, start in zip(clocks, began)]
        await until(pilot, lambda: chat.transcript.last_answer and not chat.transcript.last_answer.live)
        t, answer = chat.transcript, chat.transcript.last_answer
        assert answer is not None and c.stats is not None
        whole = MarkdownView(c.conversation.turns[-1].text)
        whole._lay(answer.view.size.width)
        shown, meant = ([line.content.plain for line in view._lines] for view in (answer.view, whole))
        assert shown == meant, "the screen does not show what was said"
        assert t.scroll_y >= t.max_scroll_y - 1, "it did not follow the end"
        return Figures(c.stats.decode_tok_s, chat.painter.meter.average, 1e3 * chat.painter.longest_gap, us[0], us[1])


async def plain_until(condition: Callable[[], bool]) -> None:
    while not condition():  # not screens.until: its looking at the screen would be measured too
        await asyncio.sleep(0.02)


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.smoothness")
    parser.add_argument("model")
    parser.add_argument("--rate", type=float, nargs="+", default=[200, 600])
    parser.add_argument("--size", nargs="+", default=["100x30", "80x24"])
    parser.add_argument("--tokens", type=int, default=3000)
    options = parser.parse_args()
    path = cache.path_of(resolve(options.model, {}))
    if path is None:
        parser.error(f"{options.model} is not on this computer: tinychat cache pull {options.model}")
    print(HEADING, flush=True)
    for size in options.size:
        for rate in options.rate:
            width, _, height = size.partition("x")
            figures = await measure(path, rate, (int(width), int(height)), options.tokens)
            print(f"{size:8} {rate:7.0f} {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
