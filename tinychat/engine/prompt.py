"""From a conversation to the exact prompt: the file's own chat template, or a preset where it has none that works.

What people and models write is text and stays text. A template's markup becomes control tokens; a `<|im_end|>` inside a
message does not. For that the first character of every special string in a message is replaced, before the template
runs, by a private-use character that occurs nowhere in the conversation; the template works on strings as ever, the
prompt is cut at the special tokens that are left, and then the characters come back. So plain markup and the text
beside it are still encoded in one piece, and an ordinary message gives the ids that llama.cpp gives for the rendered
prompt. The same holds for what tools are called, described, given and return.
"""

from __future__ import annotations

import json
import re
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

from tinychat.engine.answer import AnswerParser
from tinychat.engine.json_stream import MAX_DEPTH
from tinychat.engine.template import ChatTemplate
from tinychat.engine.tokenizer import Tokenizer
from tinychat.engine.tool_calls import PLAIN, PLAIN_MARKS, CallFormat, Tool, as_plain, find_format
from tinychat.errors import TinychatError, printable

ROLES = ("system", "user", "assistant", "tool")
_OPEN, _CLOSE = "<think>", "</think>"

# Presets are templates like those in files, so that there is one way to render. Past thinking is never sent back.
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_THINK_OFF = "{{ '<think>\n\n</think>\n\n' if add_generation_prompt and enable_thinking is false }}"
PRESETS = {
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}"
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "qwen2": _CHATML + _THINK_OFF,
    "chatml": _CHATML,
    "glm4": (
        "[gMASK]<sop>{% for m in messages %}"
        "<|{{ m.role }}|>{{ '</think>' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>"
        "{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}"
    ),
    "deepseek-llm": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}"
        "{% else %}{{ 'User: ' if m.role == 'user' }}{{ m.content }}{{ '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "youtu": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|' + (m.role | capitalize) + '|>' if m.role != 'system' }}{{ m.content }}"
        "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<|Assistant|>"
        "{{ '<think>\n' if enable_thinking is true }}{% endif %}" + _THINK_OFF
    ),
    "olmo": (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n"
        "{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "kimi-k2": (
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
    ),
    "gemma3": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ messages[0].content + '\n\n' if loop.index == 2 and messages[0].role == 'system' }}{{ m.content | trim }}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "plain": (
        "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}{{ '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}
_BY_PRE = {
    "llama3": "llama3",
    "llama-v3": "llama3",
    "llama-bpe": "llama3",
    "glm4": "glm4",
    "youtu": "youtu",
    "deepseek-llm": "deepseek-llm",
    "olmo": "olmo",
    "kimi-k2": "kimi-k2",
    "smollm": "chatml",
}

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Segment:
    """A stretch of a prompt. `special`: one token of markup; `message`: whose text it is (None: the template's own)."""

    text: str
    special: bool
    message: int | None


class Chat:
    """Renders conversations for one model.

    Attributes: `source`, "file" for the model's own template or the name of a preset; `note`, empty or one line that
    says why the last prompt was not made the way the file asks for; `think_tags`, the pair that encloses this model's
    thinking, or None; `template_s` and `tokenise_s`, seconds of the last `render`.
    """

    def __init__(self, metadata: Mapping[str, Any], tokenizer: Tokenizer, preset: str | None = None) -> None:
        """`preset` forces one of PRESETS over the file's own template. Raises TinychatError for one that does not
        exist."""
        if preset is not None and preset not in PRESETS:
            raise TinychatError(f"chat preset {printable(repr(preset))} does not exist; there are {', '.join(PRESETS)}")
        self._tokenizer = tokenizer
        own = metadata.get("tokenizer.chat_template")
        self._preset_name = self.source = preset or self._find_preset(metadata)
        self._preset = ChatTemplate(PRESETS[self.source])
        self._own: ChatTemplate | None = None
        self._trouble = ""
        if preset is None and isinstance(own, str) and own.strip():
            try:
                self._own, self.source = ChatTemplate(own), "file"
            except TinychatError as e:
                self._trouble = f"{e}; using the {self.source} format"
        elif preset is None:
            self._trouble = f"the file has no chat template; using the {self.source} format"
        self.note = self._trouble
        self._texts = dict(tokenizer.marks)
        self.template_s = self.tokenise_s = 0.0
        template = (self._own or self._preset).source
        marks = dict(tokenizer.marks)
        known = all(tag in template or tokenizer.token_id(tag) is not None for tag in (_OPEN, _CLOSE))
        self.think_tags = (_OPEN, _CLOSE) if known else None
        self._think_ids = (marks[_OPEN], marks[_CLOSE]) if _OPEN in marks and _CLOSE in marks else None
        # What must stay text in a message: all control tokens, and of the user-defined ones those that this chat uses
        # as markup (others, such as runs of spaces, are part of how ordinary text is encoded).
        used = {text for text in marks if text in template and not text.isspace()} | {_OPEN, _CLOSE, *PLAIN_MARKS}
        self.guarded = [text for text, token in tokenizer.marks if tokenizer.is_special(token) or text in used]
        self.heads = {text[:n] for text in self.guarded for n in range(1, len(text))}
        self.tails = {text[n:] for text in self.guarded for n in range(1, len(text))}

    # --- the prompt in three forms ---

    def render(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> list[int]:
        """The prompt's ids, with one BOS if the model wants it.

        `messages`: {"role", "content"} and for an assistant perhaps "reasoning_content" and "tool_calls"; thinking
        inside an assistant's content is taken out of it. Calls, results and `tools` as OpenAI writes them.
        `thinking`: asks a model that can do both to think or not; None leaves it the choice. `continue_final`: the last
        message is an assistant's and unfinished, the prompt ends where its text does. Raises TinychatError for messages
        that are no conversation.
        """
        started = time.perf_counter()
        pieces = list(self._pieces(messages, thinking, add_generation_prompt, continue_final, tools))
        rendered = time.perf_counter()
        ids = self._tokenizer.encode_pieces(pieces)
        self.template_s, self.tokenise_s = rendered - started, time.perf_counter() - rendered
        return ids

    def text(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> str:
        """The prompt as it would be written down."""
        return "".join(map(self._name, self._pieces(messages, thinking, add_generation_prompt, continue_final, tools)))

    def segments(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> list[Segment]:
        """The prompt cut where markup and messages begin and end; the texts together are `text`."""
        pieces = self._pieces(messages, thinking, add_generation_prompt, continue_final, tools)
        whole = "".join(map(self._name, pieces))
        prepared, stand_ins = self._prepare(messages), iter(_unused(messages, tools))
        # Where the messages are: once more, with the first and the last character of each one made recognisable.
        edges = [(next(stand_ins), next(stand_ins)) for _ in prepared]
        marked = [_with_edges(message, *edge) for message, edge in zip(prepared, edges)]
        found = "".join(map(self._name, self._pieces(marked, thinking, add_generation_prompt, continue_final, tools)))
        if len(found) != len(whole):  # the template looks at those characters; then nobody can say
            found = ""
        spans = sorted(
            (found.find(first), max(found.find(first), found.find(last)) + 1, i)
            for i, (first, last) in enumerate(edges)
            if first in found
        )
        cuts, owners = [0], [-1]  # owners[i] begins at cuts[i]; -1 is the template
        for begin, end, i in spans:
            cuts += [begin, end]
            owners += [i, -1]
        segments: list[Segment] = []
        begin = 0
        for piece in pieces:
            end = begin + len(self._name(piece))
            for left, right in pairwise([begin, *(cut for cut in cuts if begin < cut < end), end]):
                i = owners[bisect_right(cuts, left) - 1]
                owner = None if i < 0 else i
                special = isinstance(piece, int) and owner is None
                last_one = segments[-1] if segments else None
                if last_one and not last_one.special and not special and last_one.message == owner:
                    segments[-1] = Segment(last_one.text + whole[left:right], False, owner)
                elif left < right:
                    segments.append(Segment(whole[left:right], special, owner))
            begin = end
        return segments

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Does a prompt end inside an open think block, so that the answer begins with thinking?"""
        if self.think_tags is None:
            return False
        start = max((i + 1 for i, token in enumerate(prompt_ids) if self._ends_turn(token)), default=0)
        answer = prompt_ids[start:]
        if self._think_ids:
            begin, end = self._think_ids
            return begin in answer and end not in answer[answer.index(begin) :]
        role, opened, rest = self._tokenizer.decode(answer, special=True).partition(_OPEN)
        return bool(opened) and _CLOSE not in rest and len(role.split()) < 2

    # --- what the model answers ---

    @cached_property
    def call_format(self) -> CallFormat:
        """How this model's calls are written; `plain` when its template knows none."""
        if self._own is None:
            return PLAIN
        own = self._own
        return find_format(lambda m, tools, end: self._run(own, m, tools, None, end), (_OPEN, _CLOSE)) or PLAIN

    def parser(
        self, prompt: str | Sequence[int] = "", tools: Sequence[Tool] | None = None, marked: bool = False
    ) -> AnswerParser:
        """Takes the answer to `prompt` (its end suffices) apart as it comes. `marked`: it comes from a decoder that
        shows `shown_ids` behind MARK."""
        ids = self._tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else prompt
        form = self.call_format if tools else None
        special = frozenset[str]()
        if marked:
            markup = [*(form.markers if form else ()), *(self.think_tags or ())]
            special = frozenset(text for text in self._texts if any(text in part for part in markup))
        return AnswerParser(self.think_tags, self.opens_thinking(ids), form, tools or (), special)

    def shown_ids(self, parser: AnswerParser) -> list[int]:
        """The special tokens that `parser` looks for."""
        return [self._texts[text] for text in parser.special]

    def parse(self, answer: str, tools: Sequence[Tool] | None = None, prompt_text: str = "") -> dict[str, Any]:
        """What `answer` says: {"content", "reasoning_content", "tool_calls"}, and "note" where a call was broken.

        `prompt_text` is the end of the rendered prompt, which may have opened the thinking; where it is empty, an
        answer that closes thinking without opening it tells the same. Calls as OpenAI writes them.
        """
        ends = [self._tokenizer.token_text(token) for token in self._tokenizer.stop_ids]
        while end := next((end for end in ends if end and answer.rstrip().endswith(end)), ""):
            answer = answer.rstrip().removesuffix(end)
        parser = self.parser(prompt_text, tools)
        if self.think_tags and not prompt_text and not answer.lstrip().startswith(_OPEN) and _CLOSE in answer:
            parser = AnswerParser(self.think_tags, True, parser.form, tools or ())
        pieces = parser.feed(answer) + parser.flush()
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.kind == "call" and piece.note:
                del calls[piece.index]
            elif piece.kind == "call":
                call = calls.setdefault(
                    piece.index,
                    {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}},
                )
                call["function"]["arguments"] += piece.text
        message: dict[str, Any] = {
            "content": "".join(piece.text for piece in pieces if piece.kind == "answer"),
            "reasoning_content": "".join(piece.text for piece in pieces if piece.kind == "thinking"),
            "tool_calls": list(calls.values()),
        }
        return message | ({"note": parser.notes[0]} if parser.notes else {})

    # --- how it is made ---

    def _format_of(self, template: ChatTemplate) -> CallFormat:
        return self.call_format if template is self._own else PLAIN

    def _pieces(
        self,
        messages: Sequence[Message],
        thinking: bool | None,
        add_generation_prompt: bool,
        continue_final: bool,
        tools: Sequence[Tool] | None,
    ) -> list[int | str]:
        prepared, tools = self._prepare(messages), _checked(tools)
        if continue_final and (not prepared or prepared[-1]["role"] != "assistant"):
            raise TinychatError("only an assistant's message can be continued, and the last message is not one")
        self.note, errors = self._trouble, []
        for template in (self._own, self._preset):
            if template is None:
                continue
            try:
                if tools and self._format_of(template).plain:
                    self.note = self.note or "the chat template knows no tools; the system message describes them"
                if continue_final:
                    return self._continued(template, prepared, thinking, tools)
                return self._cut(*self._rendered(template, prepared, thinking, add_generation_prompt, tools))
            except TinychatError as e:
                errors.append(str(e))
                self.note = f"{e}; using the {self._preset_name} format"
        raise TinychatError(errors[-1])

    def _prepare(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages, checked, an assistant's thinking apart from its answer."""
        prepared: list[dict[str, Any]] = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
            if role not in ROLES:
                raise TinychatError(
                    f"a message has the role {printable(repr(role))}; expected one of {', '.join(ROLES)}"
                )
            content = "" if content is None and calls and role == "assistant" else content
            if not isinstance(content, str) or not isinstance(reasoning, str | None):
                raise TinychatError(f"the {role} message is no text")
            if role == "assistant" and reasoning is None and self.think_tags:
                if _CLOSE in content:  # taken apart as Qwen's and GLM's own templates do
                    reasoning = content.split(_CLOSE)[0].rstrip("\n").split(_OPEN)[-1].lstrip("\n")
                    content = content.split(_CLOSE)[-1].lstrip("\n")
                elif content.lstrip().startswith(_OPEN):  # stopped while it was thinking
                    reasoning, content = content.lstrip()[len(_OPEN) :].lstrip("\n"), ""
            prepared.append({"role": role, "content": content})
            if reasoning:
                prepared[-1]["reasoning_content"] = reasoning
            if calls and role == "assistant":
                prepared[-1]["tool_calls"] = _checked_calls(calls)
            if role == "tool":
                prepared[-1] |= {k: str(message[k]) for k in ("tool_call_id", "name") if message.get(k) is not None}
        return prepared

    def _continued(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        thinking: bool | None,
        tools: Sequence[Tool] | None,
    ) -> list[int | str]:
        """The prompt up to the end of the last message's text."""
        last = messages[-1]
        reasoning = last.get("reasoning_content", "")
        field = "content" if last["content"] or not reasoning else "reasoning_content"
        end = _unused(messages, tools)[0]
        if not reasoning or template is self._own:
            try:
                text, guard = self._rendered(
                    template, [*messages[:-1], last | {field: last[field] + end}], thinking, False, tools
                )
                if end in text:
                    return self._cut(text.partition(end)[0], guard)
            except TinychatError:
                pass  # a template may refuse a conversation that ends so
        # The template drops or moves the text: the prompt for an answer, and then what came of that answer so far.
        text, guard = self._rendered(template, messages[:-1], True if reasoning else thinking, True, tools, last)
        content, reasoning = guard.apart["content"], guard.apart.get("reasoning_content", "")
        line = "" if text.endswith(_OPEN) else "\n"
        opened = text.rstrip().endswith(_OPEN)
        text += ("" if opened or not reasoning else _OPEN + line) + reasoning
        text += (f"{line}{_CLOSE}{line * 2}" if content and (opened or reasoning) else "") + content
        return self._cut(text, guard)

    def _rendered(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        thinking: bool | None,
        generate: bool,
        tools: Sequence[Tool] | None,
        apart: Message | None = None,
    ) -> tuple[str, _Guard]:
        """What the template makes of the guarded messages; `apart` is one that is guarded and not rendered."""
        used = tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)
        form = self._format_of(template) if used else None
        guard = _Guard(messages if form is None else _suited(messages, form), tools, apart, self)
        if form and form.plain:
            return self._run(template, as_plain(guard.messages, guard.tools), None, thinking, generate), guard
        return self._run(template, guard.messages, guard.tools or None, thinking, generate), guard

    def _run(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        thinking: bool | None,
        generate: bool,
    ) -> str:
        tokenizer = self._tokenizer
        bos, eos = (
            "" if token is None else tokenizer.token_text(token) for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        # Templates call the switch by one of two names; a variable that is not set is how they know "not asked for".
        switch = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        return template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=generate,
            bos_token=bos,
            eos_token=eos,
            **switch,
        )

    def _cut(self, text: str, guard: _Guard) -> list[int | str]:
        """Rendered text as special tokens and the plain text between them."""
        pieces = [p if isinstance(p, int) else guard.restore(p) for p in self._tokenizer.split(text, special=True)]
        bos = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos is not None and (not pieces or pieces[0] != bos):
            pieces.insert(0, bos)
        return pieces

    def _name(self, piece: int | str) -> str:
        return piece if isinstance(piece, str) else self._tokenizer.token_text(piece)

    def _ends_turn(self, token: int) -> bool:
        return self._tokenizer.is_special(token) and self._tokenizer.token_text(token) not in (_OPEN, _CLOSE)

    def _find_preset(self, metadata: Mapping[str, Any]) -> str:
        if metadata.get("general.architecture") == "gemma3":
            return "gemma3"
        pre, thinks = str(metadata.get("tokenizer.ggml.pre")), self._tokenizer.token_id(_OPEN) is not None
        if pre in _BY_PRE:
            return _BY_PRE[pre]
        if pre == "qwen2" and thinks:
            return "qwen2"
        return "chatml" if self._tokenizer.token_id("<|im_start|>") is not None else "plain"


class _Guard:
    """The messages and tools with every special string in them broken, and the way back."""

    def __init__(
        self, messages: list[dict[str, Any]], tools: Sequence[Tool] | None, apart: Message | None, chat: Chat
    ) -> None:
        self._stand_ins = _unused([*messages, apart or {}], tools)
        self._by_char: dict[str, str] = {}
        self._chat = chat
        self.messages = [{k: v if k == "role" else self._break(v) for k, v in m.items()} for m in messages]
        self.tools = self._break(list(tools or ()))
        self.apart = self._break(dict(apart or {}))
        self._back = str.maketrans({stand_in: char for char, stand_in in self._by_char.items()})

    def restore(self, text: str) -> str:
        if "\\u" in text or "\\U" in text:  # a template may write JSON in ASCII, or a value as Python does
            for char, stand_in in self._by_char.items():
                text = text.replace(json.dumps(stand_in)[1:-1], json.dumps(char)[1:-1])
                text = text.replace(repr(stand_in)[1:-1], repr(char)[1:-1])
        return text.translate(self._back)

    def _stand_in(self, char: str) -> str:
        return self._by_char.setdefault(char, self._stand_ins[len(self._by_char)])

    def _break(self, value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise TinychatError(f"a tool or a call is nested deeper than {MAX_DEPTH}")
        if isinstance(value, Mapping):
            return {self._break(k): self._break(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._break(item, depth + 1) for item in value]
        return self._break_text(value) if isinstance(value, str) else value

    def _break_text(self, text: str) -> str:
        for mark in self._chat.guarded:
            if mark in text:
                text = text.replace(mark, self._stand_in(mark[0]) + mark[1:])
        # A special string may also come together from the edge of a message and what the template writes beside it.
        reach = len(self._chat.guarded[0]) if self._chat.guarded else 0
        for n in range(1, min(reach, len(text) + 1)):
            if text[-n:] in self._chat.heads:
                text = text[:-n] + self._stand_in(text[-n]) + text[len(text) - n + 1 :]
            if text[:n] in self._chat.tails:
                text = self._stand_in(text[0]) + text[1:]
        return text


def _checked(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The tools, as templates expect them. Raises TinychatError."""
    out = []
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise TinychatError('a tool is no {"type": "function", "function": {"name": ...}}')
        out.append({"type": "function", "function": {"description": "", "parameters": {}} | dict(function)})
    return out


def _checked_calls(calls: Any) -> list[dict[str, Any]]:
    """An assistant's calls with their arguments as objects, which is what templates expect. Raises TinychatError."""
    out = []
    for call in calls if isinstance(calls, list | tuple) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
            raise TinychatError('a tool call is no {"id": ..., "function": {"name": ..., "arguments": ...}}')
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, Mapping):
            raise TinychatError(f"the arguments of a call of {printable(name)} are no JSON object")
        out.append(
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {"name": name, "arguments": dict(arguments)},
            }
        )
    return out


def _suited(messages: list[dict[str, Any]], form: CallFormat) -> list[dict[str, Any]]:
    """The messages with ids as every template takes them, and one call a message where it takes no more."""
    known: dict[str, tuple[str, str]] = {}  # id: the id in the prompt, the function's name
    out: list[dict[str, Any]] = []
    splits: list[dict[str, Any]] = []  # calls beyond the first of a message, each to follow a result
    for message in messages:
        if message["role"] == "tool":
            new, name = known.get(message.get("tool_call_id", ""), ("", ""))
            out.append(({"name": name} if name else {}) | message | ({"tool_call_id": new} if new else {}))
            if splits:
                out.append({"role": "assistant", "content": "", "tool_calls": [splits.pop(0)]})
            continue
        calls = []
        for call in message.get("tool_calls", ()):
            old, name, n = call["id"], call["function"]["name"], len(known)
            new = old if re.fullmatch("[A-Za-z0-9]{9}", old) else f"call{n:05d}"  # Mistral's templates refuse others
            known[old] = (f"functions.{name}:{n}" if form.id_is_name else new, name)
            calls.append(call | {"id": known[old][0]})
        splits = [] if form.parallel else calls[1:]
        out.append(message | ({"tool_calls": calls if form.parallel else calls[:1]} if calls else {}))
    return out


def _unused(messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[str]:
    """Private-use characters that occur in no message and no tool."""
    used = set(json.dumps([messages, tools], ensure_ascii=False, default=str))
    return list(islice((c for c in map(chr, range(0x100000, 0x10FFFE)) if c not in used), 4096))


def _with_edges(message: dict[str, str], first: str, last: str) -> dict[str, str]:
    """`message` with its first and last character that is no white space replaced (only the first if it is the only
    one)."""
    text = message["content"]
    if end := len(text.rstrip()):
        begin = len(text) - len(text.lstrip())
        text = text[: end - 1] + last + text[end:]
        text = text[:begin] + first + text[begin + 1 :]
    return message | {"content": text}
