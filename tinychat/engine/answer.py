"""Takes apart what a model writes, while it streams: thinking, answer and tool calls.

The parser is a coroutine over a buffer: it runs until it needs text that has not come, and gives out what is clear.
Markup never reaches the reader. A call that is broken becomes text again, with a note that says why.
"""

from __future__ import annotations

import ast
import json
import random
import re
import string
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from tinychat.engine.json_stream import BadJson, JsonStream
from tinychat.engine.tool_calls import ID, CallFormat

Kind = Literal["thinking", "answer", "call"]
MARK = "\0"  # in fed text: a special token follows; no other text holds it

_BLANK_LINES = re.compile(r"^\s*[\r\n]")
_NAME = re.compile(r"[\w./-]+")
_NO, _PARTIAL = -1, -2
_Steps = Generator[None, None, Any]


@dataclass(frozen=True)
class Piece:
    """A stretch of output.

    Of a call, `text` is more of its arguments (JSON text) and `index` its number; the first piece carries `id` and
    `name`; one with a `note` takes the call back: its arguments never became complete, and its text follows as answer.
    """

    kind: Kind
    text: str
    index: int = 0
    id: str = ""
    name: str = ""
    note: str = ""


class _Malformed(Exception):
    """The text is no call."""


class _Marker:
    """Markup to be found in text: white space inside it is optional and may vary, and so may numbers and ids."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self.tail = text[len(text.rstrip()) :]  # white space behind it
        self.parts = [part for part in re.split(rf"(\s+|\d+|{ID})", self.text.replace("><", "> <")) if part]

    def __bool__(self) -> bool:
        return bool(self.parts)

    def match(self, text: str, at: int, ended: bool) -> int:
        """Where it ends when it stands at text[at]; _NO; or _PARTIAL when the text ends before that is clear."""
        for part in self.parts:
            if part.isspace():
                at = _skip(text, at)
            elif part.isdigit() or part == ID:
                run = (re.compile(r"\d*") if part.isdigit() else _NAME).match(text, at)
                end = run.end() if run else at
                if end == len(text) and not ended:
                    return _PARTIAL
                if end == at:
                    return _NO
                at = end
            else:
                for c in part:
                    while at < len(text) and text[at] == MARK:
                        at += 1
                    if at == len(text):
                        return _NO if ended else _PARTIAL
                    if text[at] != c:
                        return _NO
                    at += 1
        return at

    def find(self, text: str, at: int, ended: bool) -> tuple[int, int]:
        """The first place where it matches or may match, and what `match` says there; (len(text), _NO) if nowhere."""
        while (at := text.find(self.text[0], at)) >= 0:
            if (end := self.match(text, at, ended)) != _NO:
                return (at - 1 if at and text[at - 1] == MARK else at), end
            at += 1
        return len(text), _NO


def _general(string: str, other: str) -> str:
    """The markup in front of a value of any type, from that of a string and that of a number: a word may differ."""
    if string == other:
        return string
    head = next((i for i, (a, b) in enumerate(zip(string, other)) if a != b), 0)
    tail = next((i for i, (a, b) in enumerate(zip(string[:head:-1], other[:head:-1])) if a != b), 0)
    while head and string[head - 1].isalpha():
        head -= 1
    while tail and string[len(string) - tail].isalpha():
        tail -= 1
    return string[:head] + ID + string[len(string) - tail :]


def _skip(text: str, at: int) -> int:
    """Behind white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


@dataclass
class _Call:
    index: int
    id: str = ""
    name: str = ""
    waiting: str = ""  # arguments that came before the name
    started: bool = False
    complete: bool = False  # the arguments are


@dataclass
class AnswerParser:
    """Fed with text in any portions, says what of it is thinking, answer and call.

    `tags` enclose thinking (None: the model has none), which comes first if at all: a tag in the middle of an answer is
    text. `opened`: the prompt ended inside thinking. Blank lines behind a tag and white space in front of a closing one
    or of a call are dropped. `form` None: there are no calls. `tools`, as OpenAI writes them, say which arguments are
    strings where the markup does not. `special`: the markup that is special tokens in this model; fed text then has
    MARK in front of each of them, and one where no markup belongs vanishes, but for the tags.
    """

    tags: tuple[str, str] | None = None
    opened: bool = False
    form: CallFormat | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    special: frozenset[str] = frozenset()
    kind: Kind = "answer"
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kind = "thinking" if self.opened else "answer"
        self._text, self._at, self._ended = "", 0, False
        self._pieces: list[Piece] = []
        self._calls = 0
        self._call: _Call | None = None  # the one that is being read
        self._raw = 0  # where it begins
        self._keys: list[str] = []  # the arguments that its tool lists
        functions = [tool.get("function", tool) for tool in self.tools]
        self._schemas = {f.get("name"): f.get("parameters") or {} for f in functions}
        form = self.form = self.form if self.tools else None
        if form:
            self._section_close, self._call_close = _Marker(form.section_close), _Marker(form.call_close)
            self._closes = [_Marker(part) for part in form.call_close.split()]
            self._after_name, self._key_open = _Marker(form.after_name), _Marker(form.key_open)
            self._value_open = _Marker(form.value_open)
            self._other_open = _Marker(_general(form.value_open, form.other_open))
            self._value_close = _Marker(form.value_close)
            self._close_tokens = sum(form.value_close.count(text) for text in self.special)
            # Some models leave out the first tag of several.
            last = form.call_open.split()[-1:] if form.form != "json" else []
            openings = [form.section_open + form.call_open, form.call_open, *last]
            self._openings = [m for text in dict.fromkeys(openings) if (m := _Marker(text)) and m.text[0] in "<["]
            self._openings += [m for m in (_Marker(openings[0]),) if m and m.text[0] not in "<["]
        stray = "|".join(re.escape(text) for text in self.special if text not in (self.tags or ()))
        self._stray = re.compile(f"{MARK}(?:{stray})" if stray else MARK) if self.special else None
        self._steps: _Steps = self._run()
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are clear now."""
        if self._at and self.kind != "call":
            self._text, self._at = self._text[self._at :], 0
        self._text += text
        return self._step()

    def flush(self) -> list[Piece]:
        """What was held back, at the end of the output."""
        self._ended = True
        return self._step()

    def _step(self) -> list[Piece]:
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _give(self, kind: Kind, text: str) -> None:
        if self._stray and MARK in text:
            text = self._stray.sub("", text).replace(MARK, "")
        if text:
            self._pieces.append(Piece(kind, text))

    def _more(self) -> _Steps:
        """Waits for text. Raises _Malformed when none will come."""
        if self._ended:
            raise _Malformed("the answer ends inside the call")
        yield

    # --- thinking and answer ---

    def _run(self) -> _Steps:
        yield
        if self.tags:
            yield from self._thinking(_Marker(self.tags[0]), _Marker(self.tags[1]))
        yield from self._answer()

    def _thinking(self, opening: _Marker, closing: _Marker) -> _Steps:
        while True:  # the opening tag may come even where the prompt has it already
            at = _skip(self._text, self._at)
            end = opening.match(self._text, at, self._ended)
            if end >= 0:
                self._at, self.kind = end, "thinking"
            if end != _PARTIAL and (at < len(self._text) or self._ended):
                break
            yield
        if self.kind != "thinking":
            return
        yield from self._drop_blank_lines()
        while not self._ended or self._at < len(self._text):
            at, end = closing.find(self._text, self._at, self._ended)
            if self.form and (call := self._text.find(MARK, self._at, at)) >= 0:  # a call ends the thinking as well
                marks = [m.match(self._text, call, self._ended) for m in self._openings]
                at, end = (call, call) if max(marks, default=_NO) >= 0 else (at, end)
            thought = self._text[self._at : at].rstrip()
            self._give("thinking", thought)
            if end >= 0:
                self._at, self.kind = end, "answer"
                yield from self._drop_blank_lines()
                return
            self._at += len(thought)
            if self._ended:
                self._at = len(self._text)
                return
            yield

    def _drop_blank_lines(self) -> _Steps:
        while not (rest := self._text[self._at :]).strip() and not self._ended:
            yield
        self._at = len(self._text) if not rest.strip() else self._at + len(rest) - len(_BLANK_LINES.sub("", rest))

    def _answer(self) -> _Steps:
        bare = self.form is not None and self.form.form == "json"  # a call without markup, as an answer's first words
        while True:
            if bare and (begin := _skip(self._text, self._at)) < len(self._text):
                marks = [m.match(self._text, begin, self._ended) for m in self._openings]
                call = _PARTIAL if _PARTIAL in marks else self._bare(begin)
                bare = call == _PARTIAL
                if call >= 0 and max(marks, default=_NO) < 0:
                    yield from self._section(call, bare=True)
                    continue
                if bare:
                    yield
                    continue
            at, end = len(self._text), _NO
            for marker in self._openings if self.form else ():
                found = marker.find(self._text, self._at, self._ended)
                at, end = min((at, end), found, key=lambda place: (place[0], -place[1]))
            text = self._text[self._at : at]
            if self.form and (end != _NO or not self._ended):  # white space in front of a call is dropped
                text = text.rstrip()
            self._give("answer", text)
            self._at += len(text)
            if end >= 0:
                yield from self._section(end)
            elif self._ended:
                return
            else:
                yield

    def _bare(self, begin: int) -> int:
        """Where a call without markup, perhaps fenced as code, may begin; else _NO or _PARTIAL."""
        text = self._text[begin:]
        if not self._ended and "```json".startswith(text):
            return _PARTIAL
        fence = next((f for f in ("```json", "```") if text.startswith(f)), "")
        at = _skip(self._text, begin + len(fence))
        if at == len(self._text):
            return _NO if self._ended else _PARTIAL
        return at if self._text[at] in "{[" else _NO

    # --- calls ---

    def _section(self, at: int, bare: bool = False) -> _Steps:
        """One call or several; the first one's text stands at `at`. `bare`: without any markup, so it may be text."""
        assert self.form
        self.kind, self._raw, calls = "call", self._at, self._calls
        try:
            following: int | None = at
            while following is not None:
                self._at = following
                if self.form.form == "json":
                    yield from self._json(bare)
                else:
                    yield from self._named(self._new())
                yield from self._close()
                self._raw = self._at
                following = yield from self._following()
            if bare:
                yield from self._take(_FENCE)
        except (_Malformed, BadJson) as e:
            self._give_up(str(e), silently=bare and self._calls == calls)
        self.kind = "answer"
        if self._calls > calls:
            yield from self._drop_blank_lines()

    def _give_up(self, why: str, silently: bool) -> None:
        """What has been read since the last complete call is text after all."""
        if self._call and self._call.started:
            self._pieces.append(Piece("call", "", self._call.index, note=why))
        self._call = None
        if not silently:
            self.notes.append(f"a tool call could not be read: {why}")
        self._give("answer", self._text[self._raw : self._at])

    def _new(self) -> _Call:
        self._call = call = _Call(self._calls)
        return call

    def _made(self) -> None:
        """The call that was begun is complete."""
        self._call, self._raw = None, self._at

    def _push(self, call: _Call, text: str) -> None:
        """More of the arguments."""
        call.waiting += text
        if not call.name or not call.waiting:
            return
        if call.started:
            self._pieces.append(Piece("call", call.waiting, call.index))
        else:
            self._calls += 1
            call.id = call.id or "".join(random.choices(string.ascii_letters + string.digits, k=9))
            self._pieces.append(Piece("call", call.waiting, call.index, call.id, call.name))
        call.started, call.waiting = True, ""

    def _peek(self) -> _Steps:
        """The next character that is no white space; stays in front of it."""
        while True:
            at = self._at
            while at < len(self._text) and (self._text[at].isspace() or self._text[at] == MARK):
                at += 1
            if at < len(self._text):
                self._at = at
                return self._text[at]
            yield from self._more()

    def _take(self, marker: _Marker) -> _Steps:
        """Passes `marker`, with white space in front; False where it does not stand."""
        while marker:
            at = _skip(self._text, self._at)
            end = marker.match(self._text, at, self._ended)
            if end >= 0:
                self._at = end
            if end != _PARTIAL and (at < len(self._text) or self._ended):
                return end >= 0
            yield
        return False

    def _close(self) -> _Steps:
        """The markup behind a call: all of it that is there."""
        for marker in self._closes:
            if not (yield from self._take(marker)):
                break

    def _following(self) -> _Steps:
        """Where the next call's text begins, or None behind the last call."""
        assert self.form
        if (yield from self._take(self._section_close)):
            return None
        yield from self._take(_COMMA)
        for marker in self._openings:
            if (yield from self._take(marker)):
                return self._at
        if self.form.form == "json" and not self.form.call_open.strip() and self.form.section_open.strip():
            at = _skip(self._text, self._at)
            return at if self._text[at : at + 1] == "{" else None
        return None

    # --- json ---

    def _json(self, bare: bool) -> _Steps:
        if (yield from self._peek()) == "[":
            self._at += 1
            while (yield from self._peek()) != "]":
                yield from self._json_call(bare)
                if (yield from self._peek()) == ",":
                    self._at += 1
            self._at += 1
        else:
            yield from self._json_call(bare)

    def _json_call(self, bare: bool) -> _Steps:
        call = self._new()
        try:
            yield from self._object(call, (), bare)
        except _Malformed:
            if not (self._ended and call.name and call.complete):  # only closing brackets are missing
                raise
        if not call.name:
            raise _Malformed("it has no name")
        if not call.complete:
            self._check(call, bare)
            self._push(call, "{}")
        self._made()

    def _object(self, call: _Call, path: tuple[str, ...], bare: bool) -> _Steps:
        assert self.form
        name, arguments = self.form.name_path, self.form.arguments_path
        if (yield from self._peek()) != "{":
            raise _Malformed("it is no JSON object")
        self._at += 1
        if (yield from self._peek()) == "}":
            self._at += 1
            return
        while True:
            if (yield from self._peek()) != '"':
                raise _Malformed("a key is missing")
            key = yield from self._value()
            if (yield from self._peek()) != ":":
                raise _Malformed("a colon is missing")
            self._at += 1
            here = (*path, key)
            inner = (yield from self._peek()) == "{" and here in (name[: len(here)], arguments[: len(here)])
            if not name and not path and not call.name:
                call.name = key
                yield from self._arguments(call, bare)
            elif name and here == name:
                value = yield from self._value()
                if not isinstance(value, str) or not value:
                    raise _Malformed("its name is no text")
                call.name = value
                self._check(call, bare)
                self._push(call, "")
            elif name and path == arguments[:-1] and key in (arguments[-1], "arguments", "parameters"):
                yield from self._arguments(call, bare)
            elif inner:
                yield from self._object(call, here, bare)
            elif bare and not call.name and here != self.form.id_path:
                raise _Malformed("it is no call")
            else:
                value = yield from self._value()
                if here == self.form.id_path and isinstance(value, str):
                    call.id = value
            mark = yield from self._peek()
            self._at += mark in ",}"
            if mark == "}":
                return
            if mark != ",":
                raise _Malformed("a comma is missing")

    def _check(self, call: _Call, bare: bool) -> None:
        if bare and call.name not in self._schemas:
            raise _Malformed("it names no known tool")

    def _value(self) -> _Steps:
        """One JSON value."""
        stream, parts = JsonStream(), []
        while not stream.done:
            self._at, part = stream.feed(self._text, self._at)
            parts.append(part)
            if not stream.done:
                yield from self._more()
        return json.loads("".join(parts))

    def _arguments(self, call: _Call, bare: bool = False) -> _Steps:
        """The JSON object of a call's arguments, given out as it comes; or a string that holds one."""
        if call.name:
            self._check(call, bare)
        first = yield from self._peek()
        if first == '"':
            text = yield from self._value()
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise _Malformed("its arguments are no JSON object")
            self._push(call, text)
        elif first == "{":
            stream = JsonStream()
            while not stream.done:
                self._at, part = stream.feed(self._text, self._at)
                self._push(call, part)
                if not stream.done:
                    yield from self._more()
        else:
            raise _Malformed("its arguments are no JSON object")
        call.complete = True

    # --- the name in markup ---

    def _named(self, call: _Call) -> _Steps:
        assert self.form
        yield from self._peek()
        while (found := _NAME.match(self._text, self._at)) and found.end() == len(self._text) and not self._ended:
            yield
        if not found:
            raise _Malformed("it has no name")
        call.name, self._at = found[0], found.end()
        yield from self._take(self._after_name)
        if self.form.form == "named":
            yield from self._arguments(call)
        else:
            yield from self._tagged(call)
        self._made()

    def _tagged(self, call: _Call) -> _Steps:
        schema = self._schemas.get(call.name) or {}
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._keys = (
            list(properties) if isinstance(properties, Mapping) and "additionalProperties" not in schema else []
        )
        self._push(call, "{")
        comma = ""
        while (yield from self._take(self._key_open)):
            key, string = yield from self._key()
            self._push(call, f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            comma = ", "
            kind = properties.get(key, {}) if isinstance(properties, Mapping) else {}
            yield from self._tagged_value(call, string, kind)
        if self._closes and not (yield from self._at_close()):
            raise _Malformed("its arguments cannot be read")
        self._push(call, "}")

    def _at_close(self) -> _Steps:
        """Does the call end here?"""
        while True:
            at = _skip(self._text, self._at)
            end = self._closes[0].match(self._text, at, self._ended)
            if at == len(self._text) and self._ended:
                return True
            if end != _PARTIAL and at < len(self._text):
                return end >= 0
            yield

    def _key(self) -> _Steps:
        """(key, is its value a string: None where the markup does not tell)."""
        same = self._value_open.text == self._other_open.text
        while True:
            found = [m.find(self._text, self._at, self._ended) for m in (self._value_open, self._other_open)]
            at, end = min(found)
            if end >= 0:
                key = self._text[self._at : at].replace(MARK, "")
                self._at = end
                marker = self._value_open if found[0] == (at, end) else self._other_open
                while len(self._text) - end < len(marker.tail) and not self._ended:
                    yield  # the line break that belongs to the markup has yet to come
                self._at += len(marker.tail) * self._text.startswith(marker.tail, end)
                return key, None if same else marker is self._value_open
            yield from self._more()

    def _tagged_value(self, call: _Call, string: bool | None, schema: Any) -> _Steps:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if string is None and (kind == "string" or (schema and kind is None and _is_words(schema))):
            string = True
        parts: list[str] = []
        if string:
            self._push(call, '"')
        lead = self.form.value_close[:1] if self.form and self.form.value_close[:1].isspace() else ""
        while True:
            at, end = self._value_end()
            stop = at if end >= 0 or at < len(self._text) or not lead else at - self._text[self._at : at].endswith(lead)
            if lead and (end >= 0 or at < len(self._text)) and self._text[self._at : at].endswith(lead):
                stop = at - 1
            part = self._text[self._at : max(stop, self._at)].replace(MARK, "")
            self._at += len(self._text[self._at : max(stop, self._at)])
            if string:
                self._push(call, json.dumps(part, ensure_ascii=False)[1:-1])
            else:
                parts.append(part)
            if end >= 0:
                self._at = end
                break
            yield from self._more()
        self._push(call, '"' if string else _typed("".join(parts), kind))

    def _key_follows(self, at: int) -> int:
        """As _Marker.match, for the markup of one more argument: of one that the tool has, where it lists them."""
        at = self._key_open.match(self._text, at, self._ended)
        if at < 0 or not self._keys:
            return at
        known = [_Marker(key + self._value_open.text).match(self._text, at, self._ended) for key in self._keys]
        known += [_Marker(key + self._other_open.text).match(self._text, at, self._ended) for key in self._keys]
        return max((end for end in known if end >= 0), default=_PARTIAL if _PARTIAL in known else _NO)

    def _value_end(self) -> tuple[int, int]:
        """Where a value ends and where its closing markup does: there only what can follow a value follows. As
        _Marker.find otherwise."""
        at = self._at
        while True:
            at, end = self._value_close.find(self._text, at, self._ended)
            if end < 0:
                return at, end
            exact = self._text.count(MARK, at, end) >= self._close_tokens
            after = _skip(self._text, end)
            follows = [self._key_follows(after), *(m.match(self._text, after, self._ended) for m in self._closes[:1])]
            if exact and (any(f >= 0 for f in follows) or (self._ended and after == len(self._text))):
                return at, end
            if exact and not self._ended and (_PARTIAL in follows or after == len(self._text)):
                return at, _PARTIAL
            at = at + 1 + (self._text[at] == MARK)


_COMMA, _FENCE = _Marker(","), _Marker("```")


def _is_words(schema: Mapping[str, Any]) -> bool:
    """Does a schema without a type list only strings?"""
    words = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return bool(words) and all(isinstance(word, str) for word in words)


def _typed(text: str, kind: Any) -> str:
    """JSON text of a value that stands bare in markup: as JSON, as a Python literal, or else as a string."""
    stream = JsonStream()
    try:
        at, value = stream.feed(text.strip(), 0)
        value += "" if stream.done else stream.finish()
        if stream.done and at == len(text.strip()):
            return value
    except BadJson:
        pass
    if kind in ("array", "object") and len(text) < 10_000:
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)
