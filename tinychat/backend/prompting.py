"""A request as the ids that a model reads: rendered, counted part by part, and with what does not fit left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinychat.backend.protocol import DoesNotFit, Message, Request, Usage, reserve_for
from tinychat.engine.engine import Engine
from tinychat.errors import TinychatError

ROOMY = 3 / 4  # of the context, that a prompt may fill after turns were left out: what is left out makes the prompt new
# for the KV cache, so enough goes at once that the next messages fit as well


@dataclass(frozen=True)
class RenderedPrompt:
    """`ids` is what the model reads; `dropped` messages were left out of it."""

    ids: list[int]
    usage: Usage
    dropped: int = 0


class PromptMaker:
    """Makes the prompts of one engine, on its thread. `template_s` and `tokenise_s`: seconds, since `make` began."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.template_s = self.tokenise_s = 0.0

    def make(self, request: Request) -> RenderedPrompt | DoesNotFit:
        """The prompt of `request`, after its `overflow` where it does not fit. Raises TinychatError."""
        self.template_s = self.tokenise_s = 0.0
        prompt, limit = self._counted(request), self._engine.info.max_context
        reserve = reserve_for(request.max_tokens, limit)
        if len(prompt.ids) + reserve > limit and request.raw is None:
            if request.overflow == "thinking":
                prompt = self._counted(replace(request, messages=_without_thinking(request)))
            elif request.overflow == "oldest":
                prompt = self._without_oldest(request, int(limit * ROOMY)) or prompt
        if len(prompt.ids) + reserve > limit:
            left = replace(request, messages=request.messages[prompt.dropped :])
            return DoesNotFit(prompt.usage, reserve, self._droppable(left, limit - reserve))
        return prompt

    def measure(self, request: Request) -> Usage:
        """What the prompt takes of the context. Raises TinychatError."""
        return self._counted(request).usage

    def text(self, request: Request) -> str:
        """The prompt as it would be written down. Raises TinychatError."""
        return self._engine.tokenizer.decode(self._ids(request), special=True)

    def _counted(self, request: Request) -> RenderedPrompt:
        ids, limit = self._ids(request), self._engine.info.max_context
        if request.raw is not None:
            return RenderedPrompt(ids, Usage(history=len(ids), limit=limit))
        encode = self._engine.tokenizer.encode
        messages = request.messages
        system = sum(len(encode(_text(m).strip())) for m in messages if m.get("role") == "system")
        bare = _without_thinking(request)
        thinking = 0 if bare == messages else len(ids) - len(self._ids(replace(request, messages=bare)))
        answer = 0
        if request.continue_final and messages:
            answer = len(encode(messages[-1].get("reasoning_content") or "")) + len(encode(_text(messages[-1])))
        thinking = max(0, thinking)
        tools = len(ids) - len(self._ids(replace(request, tools=(), tool_choice="none"))) if offered(request) else 0
        tools += sum(len(encode(_text(m))) for m in messages if m.get("role") == "tool")
        history = max(0, len(ids) - system - thinking - tools - answer)
        return RenderedPrompt(ids, Usage(system, history, thinking, tools, answer, limit))

    def _droppable(self, request: Request, most: int) -> int:
        """How many of the oldest exchanges can be left out; 0 where the last one alone takes more than `most` tokens,
        so that it would not help."""
        older = len(_questions(request.messages)) - 1 if request.raw is None else 0
        return older if older > 0 and len(self._ids(_without(request, older))) <= most else 0

    def _without_oldest(self, request: Request, most: int) -> RenderedPrompt | None:
        """Without as few of the oldest exchanges as bring the prompt to `most` tokens, or without all but the last one.

        None where there is only one. Takes log2(exchanges) renderings.
        """
        starts = _questions(request.messages)
        few = _first(1, len(starts) - 1, lambda n: len(self._ids(_without(request, n))) <= most)
        return replace(self._counted(_without(request, few)), dropped=starts[few] - _head(request)) if few else None

    def _ids(self, request: Request) -> list[int]:
        """Raises TinychatError for messages that are no conversation."""
        chat, tokenizer = self._engine.chat, self._engine.tokenizer
        if request.raw is not None:
            return tokenizer.encode_prompt(request.raw)
        messages = [dict(m) | {"content": _text(m)} if m.get("role") == "assistant" else m for m in request.messages]
        last = request.messages[-1] if request.messages else {}
        answered = last.get("role") == "assistant" and not request.continue_final
        ids = chat.render(
            messages,
            thinking=request.thinking,
            add_generation_prompt=not answered,
            continue_final=request.continue_final,
            tools=offered(request),
        )
        self.template_s, self.tokenise_s = self.template_s + chat.template_s, self.tokenise_s + chat.tokenise_s
        if request.continue_final and chat.think_tags and last.get("reasoning_content") and last.get("content") == "":
            ids += tokenizer.encode(f"\n{chat.think_tags[1]}\n\n", special=True)
        return ids


def offered(request: Request) -> tuple[Mapping[str, Any], ...]:
    """The tools that the answer may call: all, the one that `tool_choice` names, or none. Raises TinychatError."""
    choice = request.tool_choice
    if choice == "none" or request.raw is not None:
        return ()
    if choice in ("auto", "required") and isinstance(choice, str):
        if choice == "required" and not request.tools:
            raise TinychatError("a call is required, and there are no tools")
        return request.tools
    name = (choice.get("function") or choice).get("name") if isinstance(choice, Mapping) else None
    chosen = tuple(tool for tool in request.tools if (tool.get("function") or {}).get("name") == name)
    if not chosen:
        raise TinychatError("tool_choice is auto, none, required or the name of one of the tools")
    return chosen


def _text(message: Message) -> Any:
    content = message.get("content")
    return "" if content is None else content


def _questions(messages: Sequence[Message]) -> list[int]:
    """Where an exchange begins: the messages of the user."""
    return [i for i, m in enumerate(messages) if m.get("role") == "user"]


def _head(request: Request) -> int:
    """The number of system messages at the beginning: 0 or 1."""
    return int(bool(request.messages) and request.messages[0].get("role") == "system")


def _without(request: Request, oldest: int) -> Request:
    """Without that many of the oldest exchanges."""
    messages = request.messages
    return replace(request, messages=(*messages[: _head(request)], *messages[_questions(messages)[oldest] :]))


def _without_thinking(request: Request) -> tuple[Message, ...]:
    """The messages without past thinking; that of an answer which goes on stays."""
    past = len(request.messages) - request.continue_final
    return tuple(
        {k: v for k, v in m.items() if k != "reasoning_content"} if i < past and m.get("reasoning_content") else m
        for i, m in enumerate(request.messages)
    )


def _first(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """The least n in low..high that is `enough` (then every larger one is), or `high`; 0 for an empty range."""
    if low > high:
        return 0
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
