"""The tokens of the prompt and the answer: id, boundaries, probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from tinychat.backend.instruments import TokenText
from tinychat.backend.protocol import Source
from tinychat.errors import printable
from tinychat.ui.screens.sheet import Sheet
from tinychat.ui.screens.token_view import ShownToken, TokenView

_ORIGINS: dict[Source, str] = {
    "": "chosen by the model",
    "text": "chosen by the model, as drafted from the text",
    "mtp": "chosen by the model, as drafted by its multi-token prediction",
    "grammar": "forced by the grammar",
}


class InspectorScreen(Sheet[None]):
    """`tokens` of the prompt, exactly as they were sent, and behind them those of the answer, with their `logprobs` and
    perhaps `sources`."""

    TITLE = "Inspector"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l,tab", "mode", "text or list"),
        Binding("a", "answer", "to the answer"),
        Binding("n", "unsure(1)", "next unsure"),
        Binding("p", "unsure(-1)", "previous unsure"),
        Binding("c", "copy", "copy the prompt"),
    ]

    def __init__(
        self, tokens: Sequence[TokenText], logprobs: Sequence[float] = (), sources: Sequence[Source] = ()
    ) -> None:
        super().__init__()
        self._prompt = len(tokens) - len(logprobs)  # tokens of it
        chances = [None] * self._prompt + [math.exp(p) for p in logprobs]
        self._data = [t.data for t in tokens]
        origins: list[Source] = ["" for _ in tokens[len(sources) :]]
        origins += sources
        self._tokens = [ShownToken(t.id, t.text, t.special, p, s) for t, p, s in zip(tokens, chances, origins)]
        self._logprob = sum(logprobs)

    def body(self) -> ComposeResult:
        yield TokenView(self._tokens)
        yield Static(classes="detail")

    def on_mount(self) -> None:
        n, chosen = self._prompt, len(self._tokens) - self._prompt
        special = sum(p.special for p in self._tokens[:n])
        note = f"{n:,} prompt tokens, {special} special"
        if chosen:
            note += f" · {chosen:,} chosen, perplexity {math.exp(-self._logprob / chosen):.2f}"
        if drafted := sum(bool(p.source) for p in self._tokens):
            note += f", {drafted:,} of them drafts"
        self.set_title("Inspector", note)
        self.query_one(TokenView).focus()
        self._explain(0)

    @on(TokenView.Moved)
    def _moved(self, event: TokenView.Moved) -> None:
        self._explain(event.index)

    def _explain(self, index: int) -> None:
        if not self._tokens:
            self.query_one(".detail", Static).update(Content("there are no tokens"))
            return
        p = self._tokens[index]
        where = _ORIGINS[p.source] if p.probability is not None else "prompt"
        data = self._data[index]
        facts = [
            f"token {index:,}",
            f"id {p.id}",
            printable(repr(p.text)),
            data[:12].hex(" ") + " …" * (len(data) > 12),
            where,
        ]
        facts += ["special token"] * p.special
        facts += [f"probability {p.probability:.2%}"] if p.probability is not None else []
        self.query_one(".detail", Static).update(Content(" · ".join(facts)))

    def action_mode(self) -> None:
        view = self.query_one(TokenView)
        view.mode = "list" if view.mode == "text" else "text"

    def action_answer(self) -> None:
        self.query_one(TokenView).cursor = self._prompt

    def action_unsure(self, step: int) -> None:
        """Goes to the next token that the model gave less than even odds."""
        view = self.query_one(TokenView)
        places = range(view.cursor + step, len(self._tokens) if step > 0 else -1, step)
        for i in places:
            if (chance := self._tokens[i].probability) is not None and chance < 0.5:
                view.cursor = i
                return

    def action_copy(self) -> None:
        self.app.copy_to_clipboard("".join(p.text for p in self._tokens[: self._prompt]))
        self.notify("copied: the prompt as text, special tokens written out")
