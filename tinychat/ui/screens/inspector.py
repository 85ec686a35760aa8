"""What the model was given and what it chose: every token, its id, its boundaries, its probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from tinychat.engine.engine import Engine, Token
from tinychat.errors import printable
from tinychat.ui.screens.sheet import Sheet
from tinychat.ui.screens.token_view import Piece, TokenView


class InspectorScreen(Sheet[None]):
    """`prompt_ids` exactly as they were sent; `tokens` as the engine yielded them behind it."""

    TITLE = "Inspector"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l,tab", "mode", "text or list"),
        Binding("a", "answer", "to the answer"),
        Binding("n", "unsure(1)", "next unsure"),
        Binding("p", "unsure(-1)", "previous unsure"),
        Binding("c", "copy", "copy the prompt"),
    ]

    def __init__(self, engine: Engine, prompt_ids: Sequence[int], tokens: Sequence[Token] = ()) -> None:
        super().__init__()
        self._ids, self._tokenizer = list(prompt_ids), engine.tokenizer
        chosen = [(t.id, math.exp(t.logprob)) for t in tokens if t.id is not None]
        self._pieces = [self._piece(i) for i in self._ids] + [self._piece(i, p) for i, p in chosen]
        self._logprob = sum(t.logprob for t in tokens if t.id is not None)

    def _piece(self, token: int, probability: float | None = None) -> Piece:
        return Piece(token, self._tokenizer.token_text(token), self._tokenizer.is_special(token), probability)

    def body(self) -> ComposeResult:
        yield TokenView(self._pieces)
        yield Static(classes="detail")

    def on_mount(self) -> None:
        n, chosen = len(self._ids), len(self._pieces) - len(self._ids)
        special = sum(p.special for p in self._pieces[:n])
        note = f"{n:,} prompt tokens, {special} special"
        if chosen:
            note += f" · {chosen:,} chosen, perplexity {math.exp(-self._logprob / chosen):.2f}"
        self.set_title("Inspector", note)
        self.query_one(TokenView).focus()
        self._explain(0)

    @on(TokenView.Moved)
    def _moved(self, event: TokenView.Moved) -> None:
        self._explain(event.index)

    def _explain(self, index: int) -> None:
        if not self._pieces:
            self.query_one(".detail", Static).update(Content("there are no tokens"))
            return
        p = self._pieces[index]
        where = "chosen by the model" if p.probability is not None else "prompt"
        data = self._tokenizer.token_bytes(p.id)
        facts = [
            f"token {index:,}",
            f"id {p.id}",
            printable(repr(p.text)),
            data[:12].hex(" ") + " …" * (len(data) > 12),
            where,
        ]
        facts += ["special: markup that no text contains"] * p.special
        facts += [f"probability {p.probability:.2%}"] if p.probability is not None else []
        self.query_one(".detail", Static).update(Content(" · ".join(facts)))

    def action_mode(self) -> None:
        view = self.query_one(TokenView)
        view.mode = "list" if view.mode == "text" else "text"

    def action_answer(self) -> None:
        self.query_one(TokenView).cursor = len(self._ids)

    def action_unsure(self, step: int) -> None:
        """Goes to the next token that the model gave less than even odds."""
        view = self.query_one(TokenView)
        places = range(view.cursor + step, len(self._pieces) if step > 0 else -1, step)
        for i in places:
            if (chance := self._pieces[i].probability) is not None and chance < 0.5:
                view.cursor = i
                return

    def action_copy(self) -> None:
        self.app.copy_to_clipboard("".join(p.text for p in self._pieces[: len(self._ids)]))
        self.notify("copied: the prompt as text, special tokens written out")
