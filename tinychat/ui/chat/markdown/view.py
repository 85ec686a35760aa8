"""The widget that paints Markdown while it arrives."""

from __future__ import annotations

import re
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.cache import FIFOCache
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from tinychat.errors import printable
from tinychat.ui.chat.markdown.blocks import WORD, Block, Splitter
from tinychat.ui.chat.markdown.layout import lay_out
from tinychat.ui.chat.markdown.tables import Columns
from tinychat.ui.chat.markdown.text import Line, inline, wrapped

BLANK = Line(Content(""))


class MarkdownView(Widget):
    """Markdown as one widget. `feed` pieces while they arrive, then `finish`; only the last block is laid out again.

    `plain`: the text is shown as it is, only wrapped. Control characters are shown, never executed.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "md-h1",
        "md-h2",
        "md-h3",
        "md-h4",
        "md-h5",
        "md-h6",
        "md-strong",
        "md-em",
        "md-strike",
        "md-link",
        "md-bullet",
        "md-dim",
        "md-code",
        "md-code-head",
        "md-code-inline",
        "md-copy",
        "md-found",
        "md-found-now",
    }
    DEFAULT_CSS = "MarkdownView { height: auto; width: 1fr; }"

    class CopyRequested(Message):
        """A click on the head of a code block."""

        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    class LinkClicked(Message):
        """A click on a link of the model's; `href` is untrusted."""

        def __init__(self, href: str) -> None:
            super().__init__()
            self.href = href

    def __init__(
        self, text: str = "", *, plain: bool = False, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.plain = plain
        self._splitter = Splitter()
        self._lines: list[Line] = []
        self._settled = 0  # lines that belong to done blocks
        self._goes_on: Line | None = None  # behind them: the last one of a paragraph whose further text is not done
        self._laid_blocks = 0
        self._laid_width = 0
        self._table = 0, 0  # the last table among the done blocks: its first block, and line
        self._columns, self._widths = Columns(), list[int]()  # of all its parts; as they are laid out
        self._pending: list[str] = []
        self._styles_of: dict[str, Style] = {}
        self._painted: FIFOCache[int, Strip] = FIFOCache(100)  # done lines, for scrolling
        self._painted_for: tuple[Style, int] | None = None
        self._pattern: re.Pattern[str] | None = None  # what is marked
        self._now: tuple[int, int] | None = None  # the line of the mark that the user is at, and its place in it
        if text:
            self.feed(text)
            self.finish()

    @property
    def source(self) -> str:
        """Everything fed so far, as shown."""
        return "".join(self._pending) if self.plain else self._splitter.source

    @property
    def code_blocks(self) -> list[str]:
        """The code of every block so far, in order."""
        blocks = filter(None, (*self._splitter.done, self._splitter.open_block))
        nodes = (node for block in blocks for top in block.nodes for node in top.walk())
        return [node.content.rstrip("\n") for node in nodes if node.type in ("fence", "code_block")]

    def feed(self, text: str) -> None:
        """Appends text; the screen follows at the next refresh."""
        text = printable(text)
        if self.plain:
            self._pending.append(text)
        else:
            self._splitter.feed(text)
        self._relay()

    def finish(self) -> None:
        """The text is complete: the lines become exactly those of the whole document."""
        if not self.plain and self._splitter.finish() < self._laid_blocks:
            self._laid_width = 0
        self._relay()

    def _relay(self) -> None:
        if self._laid_width == 0 or not self.is_attached:
            self._laid_width = 0
            self.refresh(layout=True)
            return
        before, settled = self._lines[:], self._settled
        self._lay(self._laid_width)
        if len(self._lines) != len(before):
            self.refresh(layout=True)
            return
        changed = [y for y in range(settled, len(before)) if not _same(before[y], self._lines[y])]
        if changed:
            self.refresh(Region(0, changed[0], self.size.width, changed[-1] - changed[0] + 1))

    def _lay(self, width: int) -> None:
        """Brings the lines up to date for `width`."""
        if width != self._laid_width:
            self._painted.clear()
            self._lines, self._settled, self._laid_blocks, self._laid_width = [], 0, 0, width
            self._goes_on = None
        if self.plain:
            self._lay_plain(width)
            return
        self._lines[self._settled :] = [self._goes_on] if self._goes_on else []
        done = self._splitter.done
        for i in range(self._laid_blocks, len(done)):
            self._add(i, done[i], live=False)
        self._settled, self._laid_blocks, self._goes_on = len(self._lines), len(done), None
        if (block := self._splitter.open_block) is not None:
            if block.joins:
                self._settled, self._goes_on = self._settled - 1, self._lines[-1]
            self._add(len(done), block, live=True)

    def _add(self, i: int, block: Block, live: bool) -> None:
        """Lays out `block`, which is number `i`. Where the further rows of a table make its columns wider, the others
        are laid out anew."""
        done, width = self._splitter.done, self._laid_width
        self._lines += [BLANK] * block.gap_before(done[i - 1] if i else None)
        if block.joins:
            begun = self._lines.pop()
            joined = wrapped(begun.content + inline(block.nodes[0])[len(WORD) :], width)
            above = [joined[0]._replace(joint=begun.joint), *joined[1:]]
            self._lines += lay_out(block.nodes[1:], width, live=live, above=above)
            return
        if block.table is None:
            self._lines += lay_out(block.nodes, width, live=live)
            return
        columns = block.table.columns
        if block.part:
            columns = columns.joined(self._columns)
        elif not live:
            self._table = i, len(self._lines)
        widths = columns.widths(width)
        if block.part and widths != self._widths:
            first, line = self._table
            del self._lines[line:]
            for part in done[first:i]:
                self._lines += part.table.lines(width, columns) if part.table else []
            self._settled = len(self._lines)
            self._painted.clear()
            self.refresh()
        if not live:
            self._columns = columns
        if block.part or not live:
            self._widths = widths
        above = block.table.lines(width, columns)
        self._lines += lay_out(block.nodes[1:], width, live=live, above=above)  # what follows before the table is done

    def _lay_plain(self, width: int) -> None:
        """Plain text: lines that are complete are done. `_pending` keeps [all done text, the open line]."""
        text = "".join(self._pending[self._laid_blocks :])
        complete = text.rfind("\n") + 1
        del self._lines[self._settled :]
        if complete:
            self._lines += wrapped(Content(text[: complete - 1]), width) if complete > 1 else [BLANK]
            self._settled = len(self._lines)
            done = "".join(self._pending[: self._laid_blocks]) + text[:complete]
            self._pending = [done, text[complete:]]
            self._laid_blocks = 1
        if text[complete:]:
            self._lines += wrapped(Content(text[complete:]), width)

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return container.width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if width != self._laid_width:
            self._lay(width)
        return len(self._lines)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles_of.clear()
        self._painted.clear()
        self.refresh()

    def _style(self, name: str | Style) -> Style:
        """A component class (".md-...") with its background, which Widget._get_style loses; anything else as usual."""
        if not isinstance(name, str) or not name.startswith(".md-"):
            return self._get_style(name)
        if name not in self._styles_of:
            styles = self.get_component_styles(name[1:])
            text = styles.text_style
            self._styles_of[name] = Style(
                styles.background if styles.has_rule("background") else None,
                styles.color if styles.has_rule("color") else None,
                bold=text.bold,
                italic=text.italic,
                underline=text.underline,
                strike=text.strike,
            )
        return self._styles_of[name]

    def render_line(self, y: int) -> Strip:
        base, width, selection = self.visual_style, self.size.width, self.text_selection
        if y >= len(self._lines):
            return Strip.blank(width, base.rich_style)
        if (base, width) != self._painted_for:
            self._painted_for = base, width
            self._painted.clear()
        done = y < self._settled and selection is None
        if done and (strip := self._painted.get(y)) is not None:
            return strip
        content = self._marked(self._lines[y].content, y)
        if selection is not None and (span := selection.get_span(y)) is not None:
            start, end = span
            style = Style.from_styles(self.screen.get_component_styles("screen--selection"))
            content = content.stylize(style, start, len(content) if end == -1 else end)
        segments, x = [], 0
        for text, style in content.render(base, end="", parse_style=self._style):
            segments.append(Segment(text, (base + style).rich_style_with_offset(x, y)))
            x += len(text)
        strip = Strip(segments, content.cell_length).extend_cell_length(width, base.rich_style)
        if done:
            self._painted[y] = strip
        return strip

    def mark(self, pattern: re.Pattern[str] | None) -> None:
        """Marks what `pattern` finds in a line."""
        if (pattern, None) != (self._pattern, self._now):
            self._pattern, self._now = pattern, None
            self._painted.clear()
            self.refresh()

    def mark_now(self, number: int) -> int:
        """Makes mark `number` (or the last one) the one that the user is at, and returns its line, or 0 where a mark
        would be on two lines."""
        found = [
            (y, n)
            for y, line in enumerate(self._lines)
            for n, _ in enumerate(self._pattern.finditer(line.content.plain) if self._pattern else ())
        ]
        self._now = found[min(number, len(found) - 1)] if found else None
        self._painted.clear()
        self.refresh()
        return self._now[0] if self._now else 0

    def _marked(self, content: Content, y: int) -> Content:
        """`content` of line `y` with its marks."""
        for n, match in enumerate(self._pattern.finditer(content.plain) if self._pattern else ()):
            style = self._style(".md-found-now" if (y, n) == self._now else ".md-found")
            content = content.stylize(style, *match.span())
        return content

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text, as it was before it was wrapped."""
        out = ""
        for y, line in enumerate(self._lines):
            if line.code is None and (span := selection.get_span(y)) is not None:
                start, end = span
                text = line.content.plain[max(start, line.gutter) : None if end == -1 else end].rstrip()
                out += (("\n" if line.joint is None else line.joint) if out else "") + text
        return out, "\n"

    def on_click(self, event: events.Click) -> None:
        href = event.style.meta.get("href")
        if href:
            event.stop()
            self.post_message(self.LinkClicked(str(href)))
        elif event.y < len(self._lines) and (code := self._lines[event.y].code) is not None:
            event.stop()
            self.post_message(self.CopyRequested(code))


def _same(one: Line, other: Line) -> bool:
    return one.content.is_same(other.content) and one[1:] == other[1:]
