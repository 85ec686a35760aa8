"""Turns a conversation into the exact prompt, with the file's own chat template, or a preset where the file has none
that works.

The template's markup becomes control tokens. A `<|im_end|>` inside a message stays text, because a MessageGuard breaks
it before the template runs; afterwards the prompt is cut at the remaining special tokens, and the guard restores the
text. Plain markup and the text beside it are still encoded together, so that an ordinary message gives the same ids as
llama.cpp gives for the rendered prompt. The guard also covers the names, descriptions, arguments and results of tools.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tinychat.engine import harmony
from tinychat.engine.answer import AnswerParser
from tinychat.engine.guard import MessageGuard, SpecialStrings, unused
from tinychat.engine.messages import checked, checked_tools, suited
from tinychat.engine.presets import GEMMA4_THINK, PRESETS, THINK, find_preset
from tinychat.engine.template import ChatTemplate
from tinychat.engine.tokenizer import Tokenizer
from tinychat.engine.tool_calls import PLAIN, PLAIN_MARKS, CallFormat, Message, ToolSchema, as_plain, find_format
from tinychat.errors import TinychatError, printable

_HARMONY_HEADER = 1 << 14  # tokens of a prompt's end in which the last message's header is looked for
_NO_TOOLS = "the chat template knows no tools; the system message describes them"


class Chat:
    """Renders conversations for one model.

    Attributes: `source`, "file" for the model's own template or the name of a preset; `fallback`, empty or one line
    that says why the last prompt was not made as the file asks; `think_tags`, the pair that encloses this model's
    thinking, or None; `template_s` and `tokenise_s`, seconds of the last `render`.
    """

    def __init__(self, metadata: Mapping[str, Any], tokenizer: Tokenizer, preset: str | None = None) -> None:
        """`preset` forces one of PRESETS over the file's own template. Raises TinychatError for one that does not
        exist."""
        if preset is not None and preset not in PRESETS:
            raise TinychatError(f"chat preset {printable(repr(preset))} does not exist; there are {', '.join(PRESETS)}")
        self.tokenizer = tokenizer
        own = metadata.get("tokenizer.chat_template")
        self._preset_name = self.source = preset or find_preset(metadata, tokenizer)
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
        self.fallback = self._trouble
        self._written: CallFormat | None = None  # of the calls in the last prompt with tools
        self._texts = dict(tokenizer.marks)
        self.template_s = self.tokenise_s = 0.0
        template = (self._own or self._preset).source
        marks = dict(tokenizer.marks)
        tags = GEMMA4_THINK if GEMMA4_THINK[1] in marks else THINK
        known = all(tag in template or tokenizer.token_id(tag) is not None for tag in tags)
        self.harmony = harmony.is_harmony(marks)
        self.think_tags = harmony.THINK if self.harmony else tags if known else None
        self._open, self._close = tags
        begin, end = self._open.removesuffix("thought"), self._close
        self._think_ids = (marks[begin], marks[end]) if begin in marks and end in marks else None
        # What must stay text in a message: all control tokens, and of the user-defined ones those that this chat uses
        # as markup (others, such as runs of spaces, are part of how ordinary text is encoded).
        used = {text for text in marks if text in template and not text.isspace()} | {*THINK, *PLAIN_MARKS}
        special = [text for text, token in tokenizer.marks if tokenizer.is_special(token) or text in used]
        self._special = SpecialStrings(special)

    def render(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[ToolSchema] | None = None,
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
        ids = self.tokenizer.encode_pieces(pieces)
        self.template_s, self.tokenise_s = rendered - started, time.perf_counter() - rendered
        return ids

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside an open think block, so that the answer begins with thinking."""
        if self.think_tags is None:
            return False
        if self.harmony:
            whole = self.tokenizer.decode(prompt_ids[-_HARMONY_HEADER:], special=True).rpartition("<|start|>")[2]
            return self.think_tags[0] in whole and "<|end|>" not in whole
        start = max((i + 1 for i, token in enumerate(prompt_ids) if self._ends_turn(token)), default=0)
        answer = prompt_ids[start:]
        if self._think_ids:
            begin, end = self._think_ids
            return begin in answer and end not in answer[answer.index(begin) :]
        role, opened, rest = self.tokenizer.decode(answer, special=True).partition(self._open)
        return bool(opened) and self._close not in rest and len(role.split()) < 2

    # --- what the model answers ---

    @cached_property
    def call_format(self) -> CallFormat:
        """How this model's calls are written; `plain` when its template knows none."""
        if self.harmony:
            return harmony.CALLS
        if self._own is None:
            return PLAIN
        own = self._own
        return (
            find_format(lambda m, tools, end: self._run(own, m, tools, None, end), (self._open, self._close)) or PLAIN
        )

    @property
    def answer_format(self) -> CallFormat:
        """How the last prompt with tools has them written: plain, too, where the template failed for them."""
        return self._written or self.call_format

    def parser(
        self, prompt: str | Sequence[int] = "", tools: Sequence[ToolSchema] | None = None, marked: bool = False
    ) -> AnswerParser:
        """Takes the answer to `prompt` (its end suffices) apart as it comes. `marked`: it comes from a decoder that
        shows `shown_ids` behind MARK."""
        ids = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else prompt
        form = self.answer_format if tools else None
        special = frozenset[str]()
        if marked:
            markup = [*(form.markers if form else ()), *(self.think_tags or ())]
            markup += harmony.MARKS if self.harmony else ()
            special = frozenset(text for text in self._texts if any(text in part for part in markup))
        kind = harmony.HarmonyParser if self.harmony else AnswerParser
        return kind(self.think_tags, self.opens_thinking(ids), form, tools or (), special)

    def shown_ids(self, parser: AnswerParser) -> list[int]:
        """The special tokens that `parser` looks for."""
        return [self._texts[text] for text in parser.special]

    # --- how it is made ---

    def _format_of(self, template: ChatTemplate) -> CallFormat:
        return self.call_format if template is self._own or self.harmony else PLAIN

    def _pieces(
        self,
        messages: Sequence[Message],
        thinking: bool | None,
        add_generation_prompt: bool,
        continue_final: bool,
        tools: Sequence[ToolSchema] | None,
    ) -> list[int | str]:
        prepared, tools = checked(messages, self.think_tags), checked_tools(tools)
        if continue_final and (not prepared or prepared[-1]["role"] != "assistant"):
            raise TinychatError("only an assistant's message can be continued, and the last message is not one")
        self.fallback, errors = self._trouble, []
        for template in (self._own, self._preset):
            if template is None:
                continue
            try:
                if tools and self._format_of(template).plain:
                    self.fallback = self.fallback or _NO_TOOLS
                if continue_final:
                    pieces = self._continued(template, prepared, thinking, tools)
                else:
                    pieces = self._cut(*self._rendered(template, prepared, thinking, add_generation_prompt, tools))
                if tools:
                    self._written = self._format_of(template)
                return pieces
            except TinychatError as e:
                errors.append(str(e))
                self.fallback = f"{e}; using the {self._preset_name} format"
        raise TinychatError(errors[-1])

    def _continued(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        thinking: bool | None,
        tools: Sequence[ToolSchema] | None,
    ) -> list[int | str]:
        """The prompt up to the end of the last message's text."""
        last = messages[-1]
        reasoning = last.get("reasoning_content", "")
        field = "content" if last["content"] or not reasoning else "reasoning_content"
        end = unused(messages, tools)[0]
        if not reasoning or template is self._own or self.harmony:
            try:
                text, guard = self._rendered(
                    template, [*messages[:-1], last | {field: last[field] + end}], thinking, False, tools
                )
                if end in text:
                    return self._cut(text.partition(end)[0], guard)
            except TinychatError:
                pass  # some templates refuse a conversation that ends with an assistant's message
        # The template drops or moves the text: the prompt for an answer, and then what came of that answer so far.
        text, guard = self._rendered(template, messages[:-1], True if reasoning else thinking, True, tools, last)
        content, reasoning = guard.apart["content"], guard.apart.get("reasoning_content", "")
        line = "" if text.endswith(self._open) else "\n"
        opened = text.rstrip().endswith(self._open)
        text += ("" if opened or not reasoning else self._open + line) + reasoning
        text += (f"{line}{self._close}{line * 2}" if content and (opened or reasoning) else "") + content
        return self._cut(text, guard)

    def _rendered(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        thinking: bool | None,
        generate: bool,
        tools: Sequence[ToolSchema] | None,
        apart: Message | None = None,
    ) -> tuple[str, MessageGuard]:
        """What the template makes of the guarded messages; `apart` is one that is guarded and not rendered."""
        used = tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)
        form = self._format_of(template) if used else None
        guard = MessageGuard(messages if form is None else suited(messages, form), tools, apart, self._special)
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
        tokenizer = self.tokenizer
        bos, eos = (
            "" if token is None else tokenizer.token_text(token) for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        # Templates use one of two names for the switch, and leave the choice to the model if the variable is not set.
        switch: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        if self.harmony:
            switch |= {} if thinking is not False else {"reasoning_effort": "low"}
            messages = [harmony.named(message) for message in messages]
        return template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=generate,
            bos_token=bos,
            eos_token=eos,
            **switch,
        )

    def _cut(self, text: str, guard: MessageGuard) -> list[int | str]:
        """Rendered text as special tokens and the plain text between them."""
        pieces = [p if isinstance(p, int) else guard.restore(p) for p in self.tokenizer.split(text, special=True)]
        bos = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and (not pieces or pieces[0] != bos):
            pieces.insert(0, bos)
        return pieces

    def _name(self, piece: int | str) -> str:
        return piece if isinstance(piece, str) else self.tokenizer.token_text(piece)

    def _ends_turn(self, token: int) -> bool:
        return self.tokenizer.is_special(token) and token not in (self._think_ids or ())
