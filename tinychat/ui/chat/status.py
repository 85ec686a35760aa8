"""The line at the top: which model, which conversation, and how full the context is."""

from __future__ import annotations

from typing import ClassVar

from textual.content import Content
from textual.widgets import Static

from tinychat.backend.protocol import ModelInfo, Usage
from tinychat.errors import printable
from tinychat.ui.panel.figures import context_bar
from tinychat.units import parameter_counts

BAR = 8  # cells of the context's bar


class StatusLine(Static):
    """model  Q4_K_M · 30B (3B active) · CPU 8 threads        conversation   ▓▓░░░░░░ 2,076 of 4,096"""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"system", "history", "thinking", "answer", "free"}

    def show(self, name: str, info: ModelInfo | None, title: str, marks: str, usage: Usage | None) -> None:
        """`marks` stand before the title; without `usage` the context is shown elsewhere."""
        width = self.content_size.width or 80
        context = Content("")
        if usage is not None and usage.limit:
            figures = (f" {usage.used:,} of {usage.limit:,}", "$foreground 60%")
            context = Content.assemble("   ", context_bar(usage, BAR), figures)
        left = Content.styled(printable(name, newlines=False) or "tinychat", "bold $primary")
        title = printable(title, newlines=False)
        room = width - left.cell_length - context.cell_length - 2
        details = describe(info) if info else ""
        while details and len(details) + len(marks) + min(len(title), 24) + 4 > room:  # the least important last
            details = details.rpartition(" · ")[0]
        if details:
            left = Content.assemble(left, "  ", (details, "$foreground 60%"))
            room -= len(details) + 2
        middle = Content.assemble((f"{marks} " if marks else "", "$accent"), (title, "$foreground 60%"))
        middle = middle.truncate(room, ellipsis=True) if room > 8 else Content("")
        right = middle + context
        content = Content.assemble(left, " " * max(0, width - left.cell_length - right.cell_length), right)
        if not isinstance(self.content, Content) or not content.is_same(self.content):
            self.update(content, layout=False)


def describe(info: ModelInfo) -> str:
    """Q4_K · 30B (3.6B active) · CPU · 8 threads."""
    parameters = parameter_counts(info.parameters, info.active_parameters)
    return " · ".join(printable(p, newlines=False) for p in (info.quant, parameters, info.device) if p)
