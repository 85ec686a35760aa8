"""Tokens with their boundaries: as running text or as a list; only the lines on the screen are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tinychat.backend.protocol import Source
from tinychat.errors import printable
from tinychat.ui.screens.sheet import cell
from tinychat.units import bar

_KINDS: dict[Source, str] = {"": "answer", "text": "drafted", "mtp": "mtp", "grammar": "forced"}


@dataclass(frozen=True)
class ShownToken:
    """One token as shown: `text` as the tokenizer has it; `probability` for those of the answer, `source` for those of
    them that were no step of their own."""

    id: int
    text: str
    special: bool
    probability: float | None = None
    source: Source = ""

    @property
    def shown(self) -> str:
        """The text with blanks and line ends visible; markup in angle brackets of its own."""
        text = printable(self.text).replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
        return f"⟨{text}⟩" if self.special else text or "∅"


class TokenView(ScrollView, can_focus=True):
    """A cursor of one token, whose index `Moved` gives."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"token--{name}" for name in ("even", "odd", "special", "chosen", "drafted", "cursor", "edge")
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "previous", show=False),
        Binding("right", "move(1)", "next", show=False),
        Binding("up", "line(-1)", "up", show=False),
        Binding("down", "line(1)", "down", show=False),
        Binding("home", "to(0)", "first", show=False),
        Binding("end", "to(-1)", "last", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
    ]
    DEFAULT_CSS = """
    TokenView { height: 1fr; background: transparent; scrollbar-size-vertical: 1; }
    TokenView > .token--even { background: $surface; color: $foreground; }
    TokenView > .token--odd { background: $foreground 10%; color: $foreground; }
    TokenView > .token--special { color: $accent; text-style: bold; }
    TokenView > .token--chosen { color: $primary; }
    TokenView > .token--drafted { color: $success; }
    TokenView > .token--edge { color: $foreground 40%; }
    TokenView > .token--cursor { background: $primary 50%; text-style: bold; }
    """
    mode: reactive[Literal["text", "list"]] = reactive("text")
    cursor: reactive[int] = reactive(0)

    @dataclass
    class Moved(Message):
        """The cursor is on token `index`."""

        index: int

    def __init__(self, tokens: list[ShownToken]) -> None:
        super().__init__()
        self.tokens = tokens
        self._lines: list[list[tuple[int, str]]] = []  # per line: token, and the part of it that is there
        self._line_of: list[int] = []  # where a token begins

    def on_resize(self) -> None:
        self._lay_out()

    def watch_mode(self) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        width = max(8, self.scrollable_content_region.width or self.size.width)
        self._lines, self._line_of = (
            ([[(i, "")] for i in range(len(self.tokens))], list(range(len(self.tokens))))
            if self.mode == "list"
            else lay_out([p.shown for p in self.tokens], width)
        )
        self.virtual_size = Size(width, len(self._lines))
        self._show_cursor()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        y += self.scroll_offset.y
        width = self.size.width
        if not 0 <= y < len(self._lines):
            return Strip.blank(width, self.rich_style)
        segments: list[Segment] = []
        for index, text in self._lines[y]:
            token = self.tokens[index]
            style = self.get_component_rich_style("token--odd" if index % 2 and self.mode == "text" else "token--even")
            if token.special:
                style += self.get_component_rich_style("token--special", partial=True)
            elif token.probability is not None:
                style += self.get_component_rich_style(
                    f"token--{'drafted' if token.source else 'chosen'}", partial=True
                )
            if index == self.cursor:
                style += self.get_component_rich_style("token--cursor")
            meta = style.from_meta({"token": index})
            if self.mode == "list":
                segments.append(Segment(self._row(index, width), style + meta))
            else:
                segments.append(Segment(text[:-1], style + meta))
                edge = style + self.get_component_rich_style("token--edge", partial=True) if text[-1] == "▏" else style
                segments.append(Segment(text[-1:], edge + meta))
        return Strip(segments).adjust_cell_length(width, self.rich_style)

    def _row(self, index: int, width: int) -> str:
        p = self.tokens[index]
        kind = "special" if p.special else "prompt" if p.probability is None else _KINDS[p.source]
        chance = "" if p.probability is None else f"{p.probability:7.2%} {bar(p.probability, 10)}"
        head = f"{index:>7,} {p.id:>8} {kind:8} "
        return cell(f"{head}{cell(p.shown, max(8, width - len(head) - 20))} {cell(chance, 19)}", width)

    # the cursor

    def watch_cursor(self) -> None:
        self._show_cursor()
        self.refresh()
        self.post_message(self.Moved(self.cursor))

    def validate_cursor(self, index: int) -> int:
        return max(0, min(index, len(self.tokens) - 1))

    def _show_cursor(self) -> None:
        if self.cursor < len(self._line_of):
            self.scroll_to_region(Region(0, self._line_of[self.cursor], 1, 1), animate=False, force=True)

    def action_move(self, step: int) -> None:
        self.cursor += step

    def action_line(self, step: int) -> None:
        line = self._line_of[self.cursor] + step if self._line_of else 0
        if 0 <= line < len(self._lines):
            first = self._lines[line][0][0]
            self.cursor = first + 1 if step > 0 and first == self.cursor else first

    def action_page(self, step: int) -> None:
        if self._lines:
            line = max(0, min(self._line_of[self.cursor] + step * max(1, self.size.height - 1), len(self._lines) - 1))
            self.cursor = self._lines[line][0][0]

    def action_to(self, index: int) -> None:
        self.cursor = index if index >= 0 else len(self.tokens) - 1

    def on_click(self, event: events.Click) -> None:
        index = event.style.meta.get("token")
        if index is not None:
            self.cursor = index


def lay_out(texts: list[str], width: int) -> tuple[list[list[tuple[int, str]]], list[int]]:
    """Lines of at most `width` cells, an edge behind every token and a new line behind every ↵; the line each token
    begins on."""
    lines: list[list[tuple[int, str]]] = [[]]
    starts, used = [], 0
    for index, text in enumerate(texts):
        rest = text + "▏"
        if used and used + cell_len(rest) > width:
            lines.append([])
            used = 0
        starts.append(len(lines) - 1)
        while cell_len(rest) > width:
            part = rest[:width]
            while cell_len(part) > width:
                part = part[:-1]
            lines[-1].append((index, part))
            lines.append([])
            rest = rest[len(part) :]
        lines[-1].append((index, rest))
        used = sum(cell_len(t) for _, t in lines[-1]) if len(lines[-1]) == 1 else used + cell_len(rest)
        if "↵" in text:
            lines.append([])
            used = 0
    return ([line for line in lines if line] if not lines[-1] else lines), starts
