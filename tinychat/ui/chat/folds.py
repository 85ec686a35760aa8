"""Long pastes in the prompt: each is one label, as [300 lines, 4,700 tokens], in place of its text."""

from __future__ import annotations

import re

LINES = 10  # from which on a paste is folded
CHARACTERS = 2000  # likewise, for lines that are long


class Folds:
    """The pasted texts by their labels. Nothing is ever forgotten: undo may bring any label back. The blanks of a
    label are no-break spaces, so that typed text has none."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._labels: re.Pattern[str] | None = None

    def add(self, text: str) -> str:
        """What stands in the prompt for a pasted `text`: a label, or a short text as it is."""
        return text if _lines(text) < LINES and len(text) < CHARACTERS else self._label(text)

    def counted(self, label: str, tokens: str) -> str:
        """The label of the same text that says its tokens, as "4,700 tokens"."""
        return self._label(self._texts[label], tokens)

    def _label(self, text: str, *more: str) -> str:
        lines = _lines(text)
        words, number = ", ".join((f"{lines:,} line{'s' * (lines != 1)}", *more)).replace(" ", "\xa0"), 1
        while self._texts.get(label := f"[{words}]" if number == 1 else f"[{words}\xa0#{number}]", text) != text:
            number += 1
        self._texts[label] = text
        self._labels = re.compile("|".join(map(re.escape, self._texts)))
        return label

    def is_counted(self, label: str) -> bool:
        return "token" in label

    def text(self, label: str) -> str:
        return self._texts[label]

    def whole(self, shown: str) -> str:
        """`shown` with the texts in place of their labels."""
        return self._labels.sub(lambda m: self._texts[m[0]], shown) if self._labels else shown

    def fold(self, text: str) -> str:
        """`text` with labels in place of the texts that were pasted before."""
        latest = {pasted: label for label, pasted in self._texts.items()}
        for pasted in sorted(latest, key=len, reverse=True):
            text = text.replace(pasted, latest[pasted])
        return text

    def within(self, text: str) -> tuple[str, ...]:
        """The texts that were pasted before and are in `text`."""
        return tuple(pasted for pasted in dict.fromkeys(self._texts.values()) if pasted in text)

    def spans(self, line: str) -> list[tuple[int, int, str]]:
        """Where labels stand in a line of the prompt: start, end, label."""
        return [(*m.span(), m[0]) for m in self._labels.finditer(line)] if self._labels else []


def _lines(text: str) -> int:
    return text.count("\n") + (not text.endswith("\n"))
