"""Greedy answers of models against expected tokens, one model after another: does everything here still answer rightly?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from tinychat.engine.engine import Engine
from tinychat.errors import TinychatError, printable
from tinychat.kernels.ops import Sampling

PROMPT = "What is the capital of France?"
LENGTH = 24  # tokens of an answer that nobody has verified


@dataclass(frozen=True)
class Expected:
    """A greedy answer to PROMPT in a fresh conversation without thinking, up to the end of the answer.

    Goes into EXPECTED only when it was computed by something other than the executor it tests; `by` says what.
    """

    model: str
    tokens: tuple[int, ...]
    by: str


# By ModelInfo.fingerprint, so that a renamed or copied file is known and another quant of the same model is not.
EXPECTED: dict[str, Expected] = {
    "43e8616c70ebb37a7224cd1994b9866fce7ea3bf4b18a6065990379eb50b75ce": Expected(
        "smollm2:135m", (504, 3575, 282, 4649, 314, 7042, 30), "engine/reference.py"),
}

Result = Literal["passed", "failed", "unverified"]


@dataclass(frozen=True)
class Smoke:
    """One model's answer. "unverified": it answered, and nothing says what would have been right. Times in seconds."""

    model: str
    result: Result
    detail: str  # expectation's origin, the first difference, or the error
    device: str = ""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    load_s: float = 0.0
    ttft_s: float = 0.0
    decode_tok_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def check(load: Callable[[], Engine], model: str) -> Smoke:
    """Loads a model with `load`, asks it PROMPT, closes it. A model that cannot be loaded or run has failed."""
    try:
        engine = load()
    except TinychatError as e:
        return Smoke(model, "failed", str(e))
    try:
        return _ask(engine, model)
    except TinychatError as e:
        return Smoke(model, "failed", str(e), engine.info.device)
    finally:
        engine.close()


def _ask(engine: Engine, model: str) -> Smoke:
    expected, s = EXPECTED.get(engine.info.fingerprint), engine.stats
    ids = engine.chat.render([{"role": "user", "content": PROMPT}], thinking=False)
    length = len(expected.tokens) + 1 if expected else LENGTH
    tokens = list(engine.generate(ids, Sampling(temperature=0.0), length))
    found = tuple(t.id for t in tokens if t.id is not None)
    result, detail = _judge(expected, found, engine.stop_reason)
    text = "".join(t.text for t in tokens)
    return Smoke(model, result, detail, engine.info.device, found, text, s.load_s, s.ttft_s, s.decode_tok_s)


def _judge(expected: Expected | None, found: Sequence[int], stop_reason: str) -> tuple[Result, str]:
    if expected is None:
        return "unverified", "no expected tokens for this file"
    for i, token in enumerate(expected.tokens):
        if i >= len(found):
            return "failed", f"the answer ends after {i} tokens ({stop_reason}); expected {len(expected.tokens)}"
        if token != found[i]:
            return "failed", f"token {i + 1} is {found[i]}, expected {token}"
    if len(found) > len(expected.tokens) or stop_reason != "eos":
        return "failed", f"the answer goes on after its {len(expected.tokens)} tokens"
    return "passed", f"as {expected.by} says"


def table(results: Sequence[Smoke]) -> Table:
    """Results for a terminal."""
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(("model", "result", "load s", "TTFT s", "tok/s", "answer", "")):
        out.add_column(column, justify="right" if 2 <= i <= 4 else "left", overflow="fold")
    style = {"passed": "green", "failed": "bold red", "unverified": "yellow"}
    for r in results:
        figures = (f"{r.load_s:.2f}", f"{r.ttft_s:.2f}", f"{r.decode_tok_s:,.1f}") if r.token_ids else ("", "", "")
        cells = (r.model, r.result, *figures, r.text, r.detail)
        out.add_row(*(Text(printable(c, newlines=False), style=style[r.result] if i == 1 else "") for i, c in enumerate(cells)))
    return out
