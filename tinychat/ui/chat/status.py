"""The line at the top: what runs, and which conversation this is."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from tinychat.backend.protocol import ModelInfo
from tinychat.errors import printable
from tinychat.units import parameter_counts


class StatusLine(Static):
    """tinychat  model  Q4_K · 30B (3B active) · CPU 8 threads        conversation"""

    def show(self, name: str, info: ModelInfo | None, title: str, marks: str) -> None:
        width = self.content_size.width or 80
        left = Content.assemble(("tinychat", "bold $primary"), "  ", (printable(name, newlines=False), "bold"))
        details = describe(info) if info else ""
        right = printable(title, newlines=False)
        room = width - left.cell_length - 2
        while details and len(details) + 2 > room:  # the least important last
            details = details.rpartition(" · ")[0]
        if details:
            left = Content.assemble(left, "  ", (details, "$foreground 60%"))
            room = width - left.cell_length - 2
        tail = Content.assemble((f"{marks} " if marks else "", "$accent"), (right, "$foreground 60%"))
        tail = tail.truncate(room, ellipsis=True) if room > 8 else Content("")
        content = Content.assemble(left, " " * max(0, width - left.cell_length - tail.cell_length), tail)
        if not isinstance(self.content, Content) or not content.is_same(self.content):
            self.update(content, layout=False)


def describe(info: ModelInfo) -> str:
    """Q4_K · 30B (3.6B active) · CPU · 8 threads."""
    parameters = parameter_counts(info.parameters, info.active_parameters)
    return " · ".join(printable(p, newlines=False) for p in (info.quant, parameters, info.device) if p)
