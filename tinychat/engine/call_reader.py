"""Parses the calls that a model writes, while they stream. The text of a malformed call becomes part of the answer,
with a note that gives the reason."""

from __future__ import annotations

import ast
import json
import random
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tinychat.engine.json_stream import BadJson, JsonStream
from tinychat.engine.scanner import MARK, NAME, NO, PARTIAL, Fragment, Malformed, Marker, Scanner, Steps, skip
from tinychat.engine.tool_calls import ID, CallFormat


@dataclass
class _Call:
    index: int
    id: str = ""
    name: str = ""
    waiting: str = ""  # arguments written before the name
    started: bool = False
    complete: bool = False  # whether the arguments are complete


class CallReader:
    """Reads calls of `tools` in the format `form` from `scanner`. `special`: the markup that consists of special
    tokens. `notes` says which calls could not be parsed, and why."""

    def __init__(
        self,
        scanner: Scanner,
        form: CallFormat,
        tools: Sequence[Mapping[str, Any]],
        special: frozenset[str],
        notes: list[str],
    ) -> None:
        self._scan, self.form, self._notes = scanner, form, notes
        self._calls = 0
        self._call: _Call | None = None  # the call that is being read
        self._raw = 0  # its position in the text
        self._keys: list[str] = []  # the arguments that its tool lists
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas = {f.get("name"): f.get("parameters") or {} for f in functions}
        self._section_close = Marker(form.section_close)
        self._closes = [Marker(part) for part in form.call_close.split()]
        self._after_name, self._key_open = Marker(form.after_name), Marker(form.key_open)
        self._value_open = Marker(form.value_open)
        self._other_open = Marker(_general(form.value_open, form.other_open))
        self._value_close = Marker(form.value_close)
        self._quote_open = Marker(form.quote_open)
        self._quote_close = Marker(form.quote_close + form.value_close)
        self._close_tokens = sum(form.value_close.count(text) for text in special)
        # Some models leave out the first tag of several.
        last = form.call_open.split()[-1:] if form.form != "json" else []
        texts = [form.section_open + form.call_open, form.call_open, *last]
        self._openings = [m for text in dict.fromkeys(texts) if (m := Marker(text)) and m.text[0] in "<["]
        self._openings += [m for m in (Marker(texts[0]),) if m and m.text[0] not in "<["]

    def match_opening(self, at: int) -> list[int]:
        """Marker.match for each markup that can begin a call."""
        return [m.match(self._scan.text, at, self._scan.ended) for m in self._openings] or [NO]

    def match_bare(self, begin: int) -> int:
        """The position where a call without markup, with or without a code fence, can begin; or NO or PARTIAL."""
        scan = self._scan
        text = scan.text[begin:]
        if not scan.ended and "```json".startswith(text):
            return PARTIAL
        fence = next((f for f in ("```json", "```") if text.startswith(f)), "")
        at = skip(scan.text, begin + len(fence))
        if at == len(scan.text):
            return NO if scan.ended else PARTIAL
        return at if scan.text[at] in "{[" else NO

    def find_opening(self) -> tuple[int, int]:
        """Marker.find for the first markup of a call."""
        scan = self._scan
        found = [m.find(scan.text, scan.at, scan.ended) for m in self._openings]
        return min(found, key=lambda place: (place[0], -place[1]), default=(len(scan.text), NO))

    def read(self, at: int, bare: bool) -> Steps:
        """Reads one or more calls; the text of the first begins at `at`. `bare`: the call has no markup, so that the
        text may not be a call. Returns whether it is one."""
        self._raw, calls = self._scan.at, self._calls
        try:
            following: int | None = at
            while following is not None:
                self._scan.at = following
                if self.form.form == "json":
                    yield from self._json(bare)
                else:
                    yield from self._named(self._new())
                yield from self._close()
                self._raw = self._scan.at
                following = yield from self._following()
            if bare:
                yield from self._scan.take(_FENCE)
        except (Malformed, BadJson) as e:
            self._give_up(str(e), silently=bare and self._calls == calls)
        return self._calls > calls

    def _give_up(self, why: str, silently: bool) -> None:
        """Returns the text read since the last complete call to the answer."""
        call, self._call = self._call or _Call(self._calls), None
        if not silently:
            self._scan.fragments.append(Fragment("call", "", call.index, call.id, call.name, why))
            self._notes.append(f"a tool call could not be read: {why}")
        self._scan.give("answer", self._scan.text[self._raw : self._scan.at])

    def _new(self) -> _Call:
        self._call = call = _Call(self._calls)
        return call

    def _made(self) -> None:
        """Ends the present call, which is complete."""
        self._call, self._raw = None, self._scan.at

    def _push(self, call: _Call, text: str) -> None:
        """Appends `text` to the arguments of `call`."""
        call.waiting += text
        if not call.name or not call.waiting:
            return
        if call.started:
            self._scan.fragments.append(Fragment("call", call.waiting, call.index))
        else:
            self._calls += 1
            call.id = call.id or "".join(random.choices(string.ascii_letters + string.digits, k=9))
            self._scan.fragments.append(Fragment("call", call.waiting, call.index, call.id, call.name))
        call.started, call.waiting = True, ""

    def _close(self) -> Steps:
        """Passes all markup that follows a call."""
        for marker in self._closes:
            if not (yield from self._scan.take(marker)):
                break

    def _following(self) -> Steps:
        """The position of the next call's text, or None after the last call."""
        if (yield from self._scan.take(self._section_close)):
            return None
        yield from self._scan.take(_COMMA)
        for marker in self._openings:
            if (yield from self._scan.take(marker)):
                return self._scan.at
        if self.form.form == "json" and not self.form.call_open.strip() and self.form.section_open.strip():
            at = skip(self._scan.text, self._scan.at)
            return at if self._scan.text[at : at + 1] == "{" else None
        return None

    # --- json ---

    def _json(self, bare: bool) -> Steps:
        if (yield from self._scan.peek()) == "[":
            self._scan.at += 1
            while (yield from self._scan.peek()) != "]":
                yield from self._json_call(bare)
                if (yield from self._scan.peek()) == ",":
                    self._scan.at += 1
            self._scan.at += 1
        else:
            yield from self._json_call(bare)

    def _json_call(self, bare: bool) -> Steps:
        call = self._new()
        try:
            yield from self._object(call, (), bare)
        except Malformed:
            if not (self._scan.ended and call.name and call.complete):  # only closing brackets are missing
                raise
        if not call.name:
            raise Malformed("it has no name")
        if not call.complete:
            self._check(call, bare)
            self._push(call, "{}")
        self._made()

    def _object(self, call: _Call, path: tuple[str, ...], bare: bool) -> Steps:
        name, arguments = self.form.name_path, self.form.arguments_path
        if (yield from self._scan.peek()) != "{":
            raise Malformed("it is no JSON object")
        self._scan.at += 1
        if (yield from self._scan.peek()) == "}":
            self._scan.at += 1
            return
        while True:
            if (yield from self._scan.peek()) != '"':
                raise Malformed("a key is missing")
            key = yield from self._value()
            if (yield from self._scan.peek()) != ":":
                raise Malformed("a colon is missing")
            self._scan.at += 1
            here = (*path, key)
            inner = (yield from self._scan.peek()) == "{" and here in (name[: len(here)], arguments[: len(here)])
            if not name and not path and not call.name:
                call.name = key
                yield from self._arguments(call, bare)
            elif name and here == name:
                value = yield from self._value()
                if not isinstance(value, str) or not value:
                    raise Malformed("its name is no text")
                call.name = value
                self._check(call, bare)
                self._push(call, "")
            elif name and path == arguments[:-1] and key in (arguments[-1], "arguments", "parameters"):
                yield from self._arguments(call, bare)
            elif inner:
                yield from self._object(call, here, bare)
            elif bare and not call.name and here != self.form.id_path:
                raise Malformed("it is no call")
            else:
                value = yield from self._value()
                if here == self.form.id_path and isinstance(value, str):
                    call.id = value
            mark = yield from self._scan.peek()
            self._scan.at += mark in ",}"
            if mark == "}":
                return
            if mark != ",":
                raise Malformed("a comma is missing")

    def _check(self, call: _Call, bare: bool) -> None:
        if bare and call.name not in self._schemas:
            raise Malformed("it names no known tool")

    def _value(self) -> Steps:
        """Reads one JSON value."""
        stream, parts = JsonStream(), []
        while not stream.done:
            self._scan.at, part = stream.feed(self._scan.text, self._scan.at)
            parts.append(part)
            if not stream.done:
                yield from self._scan.more()
        return json.loads("".join(parts))

    def _arguments(self, call: _Call, bare: bool = False) -> Steps:
        """Reads a call's arguments, a JSON object or a string that contains one, and emits them as they come."""
        if call.name:
            self._check(call, bare)
        first = yield from self._scan.peek()
        if first == '"':
            text = yield from self._value()
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise Malformed("its arguments are no JSON object")
            self._push(call, text)
        elif first == "{":
            stream = JsonStream()
            while not stream.done:
                self._scan.at, part = stream.feed(self._scan.text, self._scan.at)
                self._push(call, part)
                if not stream.done:
                    yield from self._scan.more()
        else:
            raise Malformed("its arguments are no JSON object")
        call.complete = True

    # --- the name in markup ---

    def _named(self, call: _Call) -> Steps:
        yield from self._scan.peek()
        while (
            (found := NAME.match(self._scan.text, self._scan.at))
            and found.end() == len(self._scan.text)
            and not self._scan.ended
        ):
            yield
        if not found:
            raise Malformed("it has no name")
        call.name, self._scan.at = found[0], found.end()
        yield from self._scan.take(self._after_name)
        if self.form.form == "named":
            yield from self._arguments(call)
        else:
            yield from self._tagged(call)
        self._made()

    def _tagged(self, call: _Call) -> Steps:
        schema = self._schemas.get(call.name) or {}
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._keys = (
            list(properties) if isinstance(properties, Mapping) and "additionalProperties" not in schema else []
        )
        self._push(call, "{")
        comma = ""
        while (yield from self._scan.take(self._key_open)):
            key, string = yield from self._key()
            self._push(call, f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            comma = ", "
            kind = properties.get(key, {}) if isinstance(properties, Mapping) else {}
            yield from self._tagged_value(call, string, kind)
        if self._closes and not (yield from self._at_close()):
            raise Malformed("its arguments cannot be read")
        self._push(call, "}")

    def _at_close(self) -> Steps:
        """Whether the call ends here."""
        while True:
            at = skip(self._scan.text, self._scan.at)
            end = self._closes[0].match(self._scan.text, at, self._scan.ended)
            if at == len(self._scan.text) and self._scan.ended:
                return True
            if end != PARTIAL and at < len(self._scan.text):
                return end >= 0
            yield

    def _key(self) -> Steps:
        """(key, is its value a string: None where the markup does not tell)."""
        same = self._value_open.text == self._other_open.text
        while True:
            found = [
                m.find(self._scan.text, self._scan.at, self._scan.ended) for m in (self._value_open, self._other_open)
            ]
            at, end = min(found)
            if end >= 0:
                key = self._scan.text[self._scan.at : at].replace(MARK, "")
                self._scan.at = end
                marker = self._value_open if found[0] == (at, end) else self._other_open
                while len(self._scan.text) - end < len(marker.tail) and not self._scan.ended:
                    yield  # the line break that belongs to the markup has yet to come
                self._scan.at += len(marker.tail) * self._scan.text.startswith(marker.tail, end)
                return key, None if same else marker is self._value_open
            yield from self._scan.more()

    def _tagged_value(self, call: _Call, string: bool | None, schema: Any) -> Steps:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if string is None and (kind == "string" or (schema and kind is None and _is_words(schema))):
            string = True
        parts: list[str] = []
        if string:
            self._push(call, '"')
        quoted = string and (yield from self._scan.take(self._quote_open))
        close = self._quote_close if quoted else self._value_close
        lead = self.form.value_close[:1] if self.form.value_close[:1].isspace() and not quoted else ""
        while True:
            at, end = self._value_end(close)
            stop = (
                at
                if end >= 0 or at < len(self._scan.text) or not lead
                else at - self._scan.text[self._scan.at : at].endswith(lead)
            )
            if lead and (end >= 0 or at < len(self._scan.text)) and self._scan.text[self._scan.at : at].endswith(lead):
                stop = at - 1
            part = self._scan.text[self._scan.at : max(stop, self._scan.at)].replace(MARK, "")
            self._scan.at += len(self._scan.text[self._scan.at : max(stop, self._scan.at)])
            if string:
                self._push(call, json.dumps(part, ensure_ascii=False)[1:-1])
            else:
                parts.append(part)
            if end >= 0:
                self._scan.at = end
                break
            yield from self._scan.more()
        self._push(call, '"' if string else _typed("".join(parts), kind))

    def _key_follows(self, at: int) -> int:
        """Marker.match for the markup of one more argument; its key must be one of the tool's, where the tool lists
        them."""
        at = self._key_open.match(self._scan.text, at, self._scan.ended)
        if at < 0 or not self._keys:
            return at
        known = [Marker(key + self._value_open.text).match(self._scan.text, at, self._scan.ended) for key in self._keys]
        known += [
            Marker(key + self._other_open.text).match(self._scan.text, at, self._scan.ended) for key in self._keys
        ]
        return max((end for end in known if end >= 0), default=PARTIAL if PARTIAL in known else NO)

    def _value_end(self, close: Marker) -> tuple[int, int]:
        """(end of a value, end of `close`, its closing markup), which counts only where the text after it can follow a
        value. Otherwise as Marker.find."""
        at = self._scan.at
        while True:
            at, end = close.find(self._scan.text, at, self._scan.ended)
            if end < 0:
                return at, end
            exact = self._scan.text.count(MARK, at, end) >= self._close_tokens
            after = skip(self._scan.text, end)
            follows = [
                self._key_follows(after),
                *(m.match(self._scan.text, after, self._scan.ended) for m in self._closes[:1]),
            ]
            if exact and (any(f >= 0 for f in follows) or (self._scan.ended and after == len(self._scan.text))):
                return at, end
            if exact and not self._scan.ended and (PARTIAL in follows or after == len(self._scan.text)):
                return at, PARTIAL
            at = at + 1 + (self._scan.text[at] == MARK)


def _general(string: str, other: str) -> str:
    """The markup before a value of any type, made from those of a string and of a number, which may differ in a
    word."""
    if string == other:
        return string
    head = next((i for i, (a, b) in enumerate(zip(string, other)) if a != b), 0)
    tail = next((i for i, (a, b) in enumerate(zip(string[:head:-1], other[:head:-1])) if a != b), 0)
    while head and string[head - 1].isalpha():
        head -= 1
    while tail and string[len(string) - tail].isalpha():
        tail -= 1
    return string[:head] + ID + string[len(string) - tail :]


_COMMA, _FENCE = Marker(","), Marker("```")


def _is_words(schema: Mapping[str, Any]) -> bool:
    """Whether a schema without a type lists only strings."""
    words = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return bool(words) and all(isinstance(word, str) for word in words)


def _typed(text: str, kind: Any) -> str:
    """JSON text of a value written without quotes in markup, parsed as JSON, else as a Python literal, else as a
    string."""
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
