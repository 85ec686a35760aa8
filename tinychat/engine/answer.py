"""Splits the text that a model generates, while it streams, into thinking, answer and tool calls.

Markup is removed. The text of a malformed call becomes part of the answer, with a note that gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinychat.engine.call_reader import CallReader
from tinychat.engine.scanner import MARK, NO, PARTIAL, Fragment, Marker, Scanner, Steps, TextKind, skip
from tinychat.engine.tool_calls import CallFormat


@dataclass
class AnswerParser:
    """Splits text that is fed in portions of any size into thinking, answer and calls.

    `tags` enclose thinking (None: the model has none). Thinking can only come first: a tag in the middle of an answer
    is text. `opened`: the prompt ended inside thinking. Blank lines after a tag are dropped, and so is white space
    before a closing tag or a call. `form` None: there are no calls. `tools`, in OpenAI's form, tell which arguments are
    strings where the markup does not. `special`: the markup that consists of special tokens in this model; the fed text
    then has MARK before each of them, and such a token is dropped where no markup belongs, unless it is a tag.
    """

    tags: tuple[str, str] | None = None
    opened: bool = False
    form: CallFormat | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    special: frozenset[str] = frozenset()
    kind: TextKind = "answer"
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kind = "thinking" if self.opened else "answer"
        stray = "|".join(re.escape(text) for text in self.special if text not in (self.tags or ()))
        self._scan = Scanner(re.compile(f"{MARK}(?:{stray})" if stray else MARK) if self.special else None)
        self.form = self.form if self.tools else None
        self._calls = CallReader(self._scan, self.form, self.tools, self.special, self.notes) if self.form else None
        self._plain = False  # True: the rest of the text is answer
        self._steps: Steps = self._run()
        next(self._steps)

    def feed(self, text: str) -> list[Fragment]:
        """The fragments that `text` makes unambiguous."""
        scan = self._scan
        if self._plain and MARK not in text:
            return [Fragment("answer", text)] if text else []
        if scan.at and self.kind != "call":
            scan.text, scan.at = scan.text[scan.at :], 0
        scan.text += text
        return self._step()

    def flush(self) -> list[Fragment]:
        """The fragments that were held back; called at the end of the output."""
        self._scan.ended = True
        return self._step()

    def _step(self) -> list[Fragment]:
        next(self._steps, None)
        return self._scan.taken()

    def _run(self) -> Steps:
        yield
        if self.tags:
            yield from self._thinking(Marker(self.tags[0]), Marker(self.tags[1]))
        if self._calls:
            yield from self._answer(self._calls)
        else:
            self._plain = True
            while True:
                self._scan.give("answer", self._scan.text[self._scan.at :])
                self._scan.at = len(self._scan.text)
                yield

    def _thinking(self, opening: Marker, closing: Marker) -> Steps:
        scan = self._scan
        while True:  # the opening tag may come even where the prompt has it already
            at = skip(scan.text, scan.at)
            end = opening.match(scan.text, at, scan.ended)
            if end >= 0:
                scan.at, self.kind = end, "thinking"
            if end != PARTIAL and (at < len(scan.text) or scan.ended):
                break
            yield
        if self.kind != "thinking":
            return
        yield from scan.drop_blank_lines()
        while not scan.ended or scan.at < len(scan.text):
            at, end = closing.find(scan.text, scan.at, scan.ended)
            if self._calls and (call := scan.text.find(MARK, scan.at, at)) >= 0:  # a call ends the thinking as well
                at, end = (call, call) if max(self._calls.match_opening(call)) >= 0 else (at, end)
            thought = scan.text[scan.at : at].rstrip()
            scan.give("thinking", thought)
            if end >= 0:
                scan.at, self.kind = end, "answer"
                yield from scan.drop_blank_lines()
                return
            scan.at += len(thought)
            if scan.ended:
                scan.at = len(scan.text)
                return
            yield

    def _answer(self, calls: CallReader) -> Steps:
        scan = self._scan
        bare = calls.form.form == "json"  # a call without markup, as an answer's first words
        while True:
            if bare and (begin := skip(scan.text, scan.at)) < len(scan.text):
                marks = calls.match_opening(begin)
                call = PARTIAL if PARTIAL in marks else calls.match_bare(begin)
                bare = call == PARTIAL
                if call >= 0 and max(marks) < 0:
                    yield from self._section(calls, call, bare=True)
                    continue
                if bare:
                    yield
                    continue
            at, end = calls.find_opening()
            text = scan.text[scan.at : at]
            if end != NO or not scan.ended:  # white space in front of a call is dropped
                text = text.rstrip()
            scan.give("answer", text)
            scan.at += len(text)
            if end >= 0:
                yield from self._section(calls, end)
            elif scan.ended:
                return
            else:
                yield

    def _section(self, calls: CallReader, at: int, bare: bool = False) -> Steps:
        self.kind = "call"
        found = yield from calls.read(at, bare)
        self.kind = "answer"
        if found:
            yield from self._scan.drop_blank_lines()
