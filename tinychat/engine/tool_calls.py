"""Derives the format of a model's tool calls from its own chat template.

The template renders one made-up conversation with and without calls. The names, keys and values in it are probes that
occur nowhere else, so the text between them is the markup. Three forms cover the templates in use:

    json    <tool_call>{"name": "f", "arguments": {...}}</tool_call>, also as an array, nested or {"f": {...}}
    named   <function=f>{...}</function>: the name in markup, the arguments as one JSON object
    tagged  <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>: strings bare, other values as JSON

A template that shows no calls gets the `PLAIN` form: tools described in the system message, calls and results as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tinychat.errors import TinychatError

ID = "\ue000"  # in a marker: the place of a call's id

ToolSchema = Mapping[str, Any]
"""A tool as OpenAI writes it."""
Message = Mapping[str, Any]
"""A message as OpenAI writes it: role (system, user, assistant, tool) and content (text); of an assistant perhaps
reasoning_content and tool_calls; of a tool tool_call_id and name. Of a last answer that shall go on, with
reasoning_content: without content its thinking goes on, with empty content the thinking is over."""
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]
"""render(messages, tools, add_generation_prompt); raises TinychatError."""


@dataclass(frozen=True)
class CallFormat:
    """The markup of calls: section_open, one or more of (call_open, call, call_close), section_close.

    json: a call is one JSON object (`array`: all calls are one array of them); `name_path`, `arguments_path` and
    `id_path` are the keys that lead to the parts; an empty `name_path` means {name: arguments}.
    named and tagged: call_open is followed by the name and `after_name`. An argument is `key_open`, key, `value_open`
    (for a string) or `other_open`, value, `value_close`; a string may stand between `quote_open` and `quote_close`.
    """

    form: Literal["json", "named", "tagged"]
    section_open: str = ""
    call_open: str = ""
    call_close: str = ""
    section_close: str = ""
    between: str = ""  # white space or a comma between two calls
    array: bool = False
    name_path: tuple[str, ...] = ("name",)
    arguments_path: tuple[str, ...] = ("arguments",)
    id_path: tuple[str, ...] = ()
    after_name: str = ""
    key_open: str = ""
    value_open: str = ""
    other_open: str = ""
    value_close: str = ""
    quote_open: str = ""  # around a string that could be taken for markup: <![CDATA[
    quote_close: str = ""
    parallel: bool = True  # the template takes several calls in one message
    id_is_name: bool = False  # it shows only the call's id, which is functions.NAME:INDEX
    plain: bool = False  # not the template's own: see `as_plain`

    @property
    def markers(self) -> list[str]:
        """Every piece of markup that is not empty."""
        parts = [self.section_open, self.call_open, self.call_close, self.section_close, self.after_name]
        parts += [self.key_open, self.value_open, self.other_open, self.value_close]
        return [part for part in parts if part.strip()]


PLAIN = CallFormat("json", call_open="<tool_call>\n", call_close="\n</tool_call>", between="\n", plain=True)
PLAIN_MARKS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_PLAIN_SYSTEM = """You can call functions to help the user. The functions, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write only this, with its arguments as a JSON object; a result follows in <tool_response></tool_response>:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def as_plain(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[dict[str, Any]]:
    """The same conversation for a template that knows no tools: the roles system, user, assistant, and text."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    out: list[dict[str, Any]] = [{"role": "system", "content": _PLAIN_SYSTEM.format(tools=listed)}] if tools else []
    follows_result = False
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if follows_result:
                out[-1]["content"] += "\n" + text
            else:
                out.append({"role": "user", "content": text})
        elif role == "system" and len(out) == 1 and tools:
            out[0]["content"] = f"{text}\n\n{out[0]['content']}"
        else:
            calls = "\n".join(
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
                for call in message.get("tool_calls", ())
            )
            text = "\n".join(part for part in (text, calls) if part)
            out.append({k: v for k, v in message.items() if k != "tool_calls"} | {"content": text})
        follows_result = role == "tool"
    return out


# --- the analysis ---

_USER = {"role": "user", "content": "zquser"}
_NAMES = ("zqname1", "zqname2")
_IDS = ("zqidaaa1x", "zqidaaa2x")  # nine letters and digits, which is what Mistral's templates demand
_ARGS: dict[str, Any] = {"zqkey1": "zqval1", "zqkey2": "zqval2"}


def tool(name: str, properties: Mapping[str, Any], description: str = "") -> dict[str, Any]:
    """A tool as OpenAI writes it; all properties are required."""
    schema = {"type": "object", "properties": dict(properties), "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_TOOLS = [tool(name, {key: {"type": "string", "description": "d"} for key in _ARGS}, "d") for name in _NAMES]


def find_format(render: Render, thinking: Sequence[str] = ()) -> CallFormat | None:
    """The format of calls in the template that `render` runs; None if it shows no calls, or none that can be parsed.

    `thinking` are the tags of the model's thinking, which a template may write in front of calls.
    """
    for id_is_name in (False, True):
        for number in (2, 1):
            try:
                shown = _RenderedCalls(render, number, id_is_name)
                found = shown.json() or shown.named() or shown.tagged(render)
            except (TinychatError, ValueError):
                continue
            if found:
                found = replace(found, section_open=_without(found.section_open, thinking))
                found = found if found.section_open else replace(found, call_open=_without(found.call_open, thinking))
                return replace(found, parallel=number == 2, id_is_name=id_is_name)
    return None


class _RenderedCalls:
    """The text that the template renders for an assistant's turn with `number` calls."""

    def __init__(self, render: Render, number: int, id_is_name: bool, args: Mapping[str, Any] = _ARGS) -> None:
        plain = render([_USER, {"role": "assistant", "content": "zqcontent"}], _TOOLS, False)
        text = render([_USER, _turn(number, id_is_name, args)], _TOOLS, False)
        for probe in _IDS if not id_is_name else ():
            text = text.replace(probe, ID)
        content = plain.rindex("zqcontent")  # raises ValueError where the template shows nothing
        prompt = render([_USER], _TOOLS, True)  # may have written a part of the turn: <think></think>
        begin = max(len(_common_head(front, text)) for front in (plain[:content] + "zqcontent", prompt))
        ending = _common_tail(plain[content + len("zqcontent") :], text[begin:])
        self.text, self.begin, self.end = text[: len(text) - len(ending)], begin, len(text) - len(ending)
        self.names = []
        at = begin
        for name in _NAMES[:number]:
            at = self.text.index(name, at)
            self.names.append(at)
            at += len(name)

    def json(self) -> CallFormat | None:
        """The names are inside JSON objects."""
        found = [self._object(self.names[0], self.begin)]
        if found[0] is None:
            return None
        first, end, value = found[0]
        array = isinstance(value, list)
        last = end
        between = ""
        if not array and len(self.names) == 2:
            second = self._object(self.names[1], end)
            if second is None:
                return None
            between, last = self.text[end : second[0]], second[1]
        call = value[0] if array else value
        marks = _sections(self.text[self.begin : first], between, self.text[last:], len(self.names) == 2 and not array)
        paths = {text: path for path, text in _leaves(call)}
        arguments = paths.get(_ARGS["zqkey1"], ())[:-1]
        if (name := paths.get(_NAMES[0])) is None:
            name = () if arguments == (_NAMES[0],) else None
        if name is None or not arguments:
            return None
        return replace(
            marks,
            array=array,
            name_path=name,
            arguments_path=arguments if name else (),
            id_path=paths.get(ID, ()),
        )

    def named(self) -> CallFormat | None:
        """The arguments are a JSON object behind the name."""
        spans = []
        for at in self.names:
            begin = at + len(_NAMES[0])
            found = self._object(self.text.index("zqkey1", begin), begin)
            if found is None or not isinstance(found[2], dict):
                return None
            spans.append(found)
        between = self.text[spans[0][1] : self.names[1]] if len(spans) == 2 else ""
        marks = _sections(self.text[self.begin : self.names[0]], between, self.text[spans[-1][1] :], len(spans) == 2)
        after = self.text[self.names[0] + len(_NAMES[0]) : spans[0][0]]
        return replace(marks, form="named", after_name=after)

    def tagged(self, render: Render) -> CallFormat | None:
        """Every argument has markup of its own."""
        at, cuts = self.names[0] + len(_NAMES[0]), []
        for probe in ("zqkey1", "zqval1", "zqkey2", "zqval2"):
            found = self.text.index(probe, at)
            cuts.append(self.text[at:found])
            at = found + len(probe)
        front, value_open, middle, _ = cuts
        tail = self.text[self.text.rindex("zqval2") + len("zqval2") :]
        between = self.text[at : self.names[1]] if len(self.names) == 2 else tail
        key_open = _common_tail(front, middle)
        value_close = _common_head(middle[: len(middle) - len(key_open)], between)
        closing = between[len(value_close) :] if len(self.names) == 2 else ""
        marks = _sections(
            self.text[self.begin : self.names[0]], closing, tail[len(value_close) :], len(self.names) == 2
        )
        if not (key_open.strip() and value_open.strip() and value_close.strip() and marks.call_open.strip()):
            return None
        if any(probe in value_close + key_open for probe in ("zqkey", "zqval", "zqname")):
            return None
        # A number instead of a string: some templates name the type in the markup.
        text = render([_USER, _turn(1, False, {"zqkey1": 7})], _TOOLS, False)
        key = text.rindex("zqkey1") + len("zqkey1")
        other_open = text[key : text.index("7", key)]
        if not text.startswith("7" + value_close.rstrip(), key + len(other_open)):
            return None
        quote_open, quote_close = _quotes(render, value_open, value_close)
        return replace(
            marks,
            form="tagged",
            after_name=front[: len(front) - len(key_open)],
            key_open=key_open,
            value_open=value_open,
            other_open=other_open,
            value_close=value_close,
            quote_open=quote_open,
            quote_close=quote_close,
        )

    def _object(self, inside: int, start: int) -> tuple[int, int, Any] | None:
        """(begin, end, value) of the outermost JSON object or array from `start` on that holds position `inside`."""
        for begin in range(start, inside):
            if self.text[begin] in "{[":
                try:
                    value, end = json.JSONDecoder().raw_decode(self.text, begin)
                except ValueError:
                    continue
                if end > inside:
                    return begin, end, value
        return None


def _quotes(render: Render, value_open: str, value_close: str) -> tuple[str, str]:
    """What the template writes around a string with a tag in it, in the tagged form; empty where nothing."""
    value = "<zq>\nval"
    text = render([_USER, _turn(1, False, {"zqkey1": value})], _TOOLS, False)
    _, _, text = text.rpartition("zqkey1" + value_open)
    before, found, after = text.partition(value)
    behind, closed, _ = after.partition(value_close)
    return (before, behind) if found and closed and before and behind else ("", "")


def _turn(number: int, id_is_name: bool, args: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {
            "id": f"functions.{name}:{i}" if id_is_name else _IDS[i],
            "type": "function",
            "function": {"name": name, "arguments": dict(args)},
        }
        for i, name in enumerate(_NAMES[:number])
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _sections(before: str, between: str, after: str, two: bool) -> CallFormat:
    """Tells the markup of a call from that of the section around all calls."""
    if not two:
        return CallFormat("json", call_open=before, call_close=after)
    close = _common_head(between, after)
    rest = between[len(close) :]
    opening = _common_tail(before, rest)
    return CallFormat(
        "json",
        section_open=before[: len(before) - len(opening)],
        call_open=opening,
        between=rest[: len(rest) - len(opening)],
        call_close=close,
        section_close=after[len(close) :],
    )


def _shared(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))]


def _common_head(a: str, b: str) -> str:
    """The longest common beginning that does not end inside a tag."""
    head = _shared(a, b)
    for left, right in ("<>", "[]"):
        if (at := head.rfind(left)) > head.rfind(right):
            head = head[:at]
    return head


def _common_tail(a: str, b: str) -> str:
    """The longest common end that does not begin inside a tag."""
    tail = _shared(a[::-1], b[::-1])[::-1]
    for left, right in ("<>", "[]"):
        at, begins = tail.find(right), tail.find(left)
        if at >= 0 and not 0 <= begins < at:
            tail = tail[at + 1 :]
    return tail


def _leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, dict):
        return [(path, value)]
    return [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, key))]


def _without(text: str, tags: Sequence[str]) -> str:
    """`text` without the thinking tags that it begins with."""
    while tag := next((tag for tag in tags if text.lstrip().startswith(tag)), ""):
        text = text.lstrip()[len(tag) :]
    return text
