"""Reads one JSON value from text that arrives in portions."""

from __future__ import annotations

import json
import re

MAX_DEPTH = 100
_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.\w]+")
_SPACE = re.compile(r"[ \t\r\n]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as models trained on Python write them


class BadJson(ValueError):
    """The text is not JSON."""


class JsonStream:
    """Reads one value. `feed` returns its text as valid JSON: control characters in strings are escaped, a backslash
    that begins no valid escape is doubled, NUL is dropped."""

    def __init__(self) -> None:
        self.done = False
        self._open: list[str] = []
        self._expect = "value"  # value, item, key, first key, colon, comma, string, escape, hex, scalar
        self._is_key = False
        self._digits = 0
        self._scalar = ""

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads from text[at] on. Returns the position where it stopped (after the value when `done`) and the text of
        the value that it read. Raises BadJson."""
        out: list[str] = []
        while at < len(text) and not self.done:
            match self._expect:
                case "string":
                    at = self._string(text, at, out)
                case "escape" | "hex":
                    at = self._escape(text, at, out)
                case "scalar":
                    at = self._word(text, at, out)
                case _:
                    at = self._structure(text, at, out)
        return at, "".join(out)

    def finish(self) -> str:
        """Called at the end of the text: returns the rest of a number, whose end no character marked. Raises
        BadJson."""
        if self._expect != "scalar" or self._open:
            raise BadJson("the text ends inside a value")
        out: list[str] = []
        self._word(" ", 0, out)
        return "".join(out)

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if run := _RUN.match(text, at):
            out.append(run[0])
            return run.end()
        c = text[at]
        if c == '"':
            out.append(c)
            if self._is_key:
                self._expect = "colon"
            else:
                self._ended()
        elif c == "\\":
            self._expect = "escape"
        elif c != "\0":
            out.append(json.dumps(c)[1:-1])
        return at + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        c = text[at]
        if self._expect == "hex":
            if c not in "0123456789abcdefABCDEF":
                raise BadJson("a \\u is not followed by four hexadecimal digits")
            out.append(c)
            self._digits -= 1
            self._expect = "hex" if self._digits else "string"
        elif c == "u":
            out.append("\\u")
            self._expect, self._digits = "hex", 4
        else:
            out.append("\\" + c if c in '"\\/bfnrt' else "\\\\" + json.dumps(c, ensure_ascii=False)[1:-1])
            self._expect = "string"
        return at + 1

    def _word(self, text: str, at: int, out: list[str]) -> int:
        if run := _SCALAR.match(text, at):
            self._scalar += run[0]
            return run.end()
        word = _WORDS.get(self._scalar, self._scalar)
        try:
            json.loads(word, parse_constant=_refuse)
        except ValueError:
            raise BadJson(f"{word[:40]!r} is no value") from None
        out.append(word)
        self._scalar = ""
        self._ended()
        return at

    def _structure(self, text: str, at: int, out: list[str]) -> int:
        if space := _SPACE.match(text, at):
            out.append(space[0] if self._open else "")
            return space.end()
        c, expect = text[at], self._expect
        if c == "\0":
            return at + 1
        if c == '"' and expect in ("value", "item", "key", "first key"):
            self._is_key, self._expect = expect.endswith("key"), "string"
        elif c in "{[" and expect in ("value", "item"):
            if len(self._open) >= MAX_DEPTH:
                raise BadJson(f"it is nested deeper than {MAX_DEPTH}")
            self._open.append(c)
            self._expect = "first key" if c == "{" else "item"
        elif c == ":" and expect == "colon":
            self._expect = "value"
        elif c == "," and expect == "comma":
            self._expect = "key" if self._open[-1] == "{" else "value"
        elif c in "}]" and expect in ("comma", "first key" if c == "}" else "item"):
            if (self._open[-1] == "{") != (c == "}"):
                raise BadJson("brackets do not match")
            self._open.pop()
            self._ended()
        elif expect in ("value", "item") and _SCALAR.match(c):
            self._expect = "scalar"
            return at
        else:
            raise BadJson(f"{c!r} does not belong there")
        out.append(c)
        return at + 1

    def _ended(self) -> None:
        """A value is complete."""
        self._expect = "comma"
        self.done = not self._open


def _refuse(name: str) -> None:
    raise ValueError(name)
