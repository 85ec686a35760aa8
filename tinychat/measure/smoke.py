"""Compares greedy answers of models with expected tokens, one model after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from tinychat.engine.engine import Engine
from tinychat.errors import TinychatError, printable
from tinychat.kernels.sampling import Sampling

QUESTION = "What is the capital of France?"  # for a model without verified answers
LENGTH = 24  # tokens generated for QUESTION
CUT = 60  # characters of a right answer that the table shows


@dataclass(frozen=True)
class Expected:
    """Greedy answers: question -> the ids up to the end of the answer, each in a new conversation without thinking.

    An entry of EXPECTED has to be computed by another program than the executor that it tests; `by` names the program.
    """

    model: str
    by: str
    answers: Mapping[str, tuple[int, ...]]


# By EngineInfo.fingerprint, so that a renamed or copied file is known and another quant of the same model is not.
EXPECTED: dict[str, Expected] = {
    "43e8616c70ebb37a7224cd1994b9866fce7ea3bf4b18a6065990379eb50b75ce": Expected(
        "smollm2:135m",
        "plain tinygrad",
        {
            "What is the capital of France?": (504, 3575, 282, 4649, 314, 7042, 30),
            "What is the plural of mouse?": (504, 15106, 282, 9444, 314, 7913, 30),
            "Which animal says meow?": (504, 3161, 338, 1921, 476, 1558, 323, 18, 314, 253, 2644, 30),
            "In which year did the Second World War end?": (504, 5665, 2260, 2287, 7569, 281, 216, 33, 41, 36, 37, 30),
            "What is the chemical formula of water?": (
                504,
                2819,
                7961,
                282,
                913,
                314,
                407,
                34,
                63,
                30,
                669,
                314,
                253,
                4959,
                3501,
                282,
                913,
                338,
                314,
                3202,
                281,
                8856,
                284,
                7505,
                30,
                657,
                314,
                253,
                9489,
                11377,
                8168,
                282,
                7457,
                284,
                4983,
                9288,
                30,
            ),
        },
    ),
}

Verdict = Literal["passed", "failed", "unverified"]


@dataclass(frozen=True)
class Smoke:
    """A model's answer to one question. "unverified": there is no expected answer to compare with.

    Times in seconds. The result of a model that gave no answer has neither question nor tokens.
    """

    model: str
    result: Verdict
    detail: str  # expectation's origin, the first difference, or the error
    device: str = ""
    question: str = ""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    load_s: float = 0.0
    ttft_s: float = 0.0
    decode_tok_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def check(load: Callable[[], Engine], model: str, report: Callable[[str, float], None] | None = None) -> list[Smoke]:
    """Loads a model with `load`, asks its questions and closes it. Stops at the first error, which counts as failed."""
    report = report or (lambda text, fraction: None)
    report("loading", 0.0)
    try:
        engine = load()
    except TinychatError as e:
        return [Smoke(model, "failed", str(e))]
    found = list[Smoke]()
    with contextlib.closing(engine):
        expected = EXPECTED.get(engine.info.fingerprint)
        questions = list(expected.answers) if expected else [QUESTION]
        for i, question in enumerate(questions):
            report(question, i / len(questions))
            try:
                found.append(_ask(engine, model, question, expected))
            except TinychatError as e:
                found.append(Smoke(model, "failed", str(e), engine.info.device, question))
                break
    return found


def _ask(engine: Engine, model: str, question: str, expected: Expected | None) -> Smoke:
    s, right = engine.stats, expected.answers[question] if expected else ()
    engine.session.tokens = []  # no cache rows of the last question are reused, so that times can be compared
    ids = engine.chat.render([{"role": "user", "content": question}], thinking=False)
    tokens = list(engine.generate(ids, Sampling(temperature=0.0), len(right) + 1 if expected else LENGTH))
    found = tuple(t.id for t in tokens if t.id is not None)
    wrong = _difference(right, found, engine.stop_reason)
    result: Verdict = "unverified" if expected is None else "failed" if wrong else "passed"
    detail = wrong or f"as {expected.by} says" if expected else "no verified expectation"
    text = "".join(t.text for t in tokens)
    return Smoke(model, result, detail, engine.info.device, question, found, text, s.load_s, s.ttft_s, s.decode_tok_s)


def _difference(right: Sequence[int], found: Sequence[int], stop_reason: str) -> str:
    """The first difference between an answer and the expected tokens, in words; "" if there is none."""
    for i, token in enumerate(right):
        if i >= len(found):
            return f"the answer ends after {i} tokens ({stop_reason}); expected {len(right)}"
        if token != found[i]:
            return f"token {i + 1} is {found[i]}, expected {token}"
    if len(found) > len(right) or stop_reason != "eos":
        return f"the answer continues after its {len(right)} tokens"
    return ""


def table(results: Sequence[Smoke]) -> Table:
    """Results as a table for a terminal. Figures of a model stand in the row of its first answer; right answers are cut
    to CUT characters."""
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(("model", "load s", "result", "TTFT s", "tok/s", "answer")):
        out.add_column(column, justify="right" if i in (1, 3, 4) else "left", overflow="fold", no_wrap=i < 5)
    style = {"passed": "green", "failed": "bold red", "unverified": "yellow"}
    for before, r in zip([None, *results], results):
        first = before is None or before.model != r.model
        load = f"{r.load_s:.2f}" if first and r.token_ids else ""
        figures = (f"{r.ttft_s:.2f}", f"{r.decode_tok_s:,.1f}") if r.token_ids else ("", "")
        text = r.text if r.result != "passed" or len(r.text) <= CUT else r.text[: CUT - 1] + "…"
        said = text if r.result == "passed" else f"{text} ({r.detail})" if text else r.detail
        cells = (r.model if first else "", load, r.result, *figures, said)
        out.add_row(
            *(Text(printable(c, newlines=False), style=style[r.result] if i == 2 else "") for i, c in enumerate(cells))
        )
    return out
