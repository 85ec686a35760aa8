"""Stop strings, found across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Fed with text in any portions, gives out what is certainly before the first stop string.

    The end of the text that may be the beginning of a stop string is held back until it is clear. `found` is the stop
    string that ended the text, "" while there is none. Of several that begin at the same character, the longest that is
    complete with this portion counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted((s for s in stops if s), key=len, reverse=True)
        self._held = ""
        self.found = ""

    def feed(self, text: str) -> str:
        """What is clear now. Nothing more comes once `found` is set."""
        if not self._stops or self.found:
            return "" if self.found else text
        self._held += text
        hits = [(at, -len(s), s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if hits:
            at, _, self.found = min(hits)
            clear, self._held = self._held[:at], ""
            return clear
        keep = max((n for s in self._stops for n in _overlaps(self._held, s)), default=0)
        clear, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return clear

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        rest, self._held = self._held, ""
        return rest


def _overlaps(text: str, stop: str) -> list[int]:
    """The lengths n < len(stop) for which `text` ends with the first n characters of `stop`."""
    return [n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])][:1]
