"""How full the context is, of what, and whether another answer fits. Token counts are those of the real prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tinychat.chat.conversation import Conversation, Turn
from tinychat.engine.engine import Engine

ANSWER_ROOM = 256  # tokens an answer should at least have


@dataclass(frozen=True)
class Usage:
    """Tokens of the context by what they are; `answer` grows while it is written."""

    system: int = 0
    history: int = 0
    thinking: int = 0
    answer: int = 0
    limit: int = 0

    @property
    def used(self) -> int:
        return self.system + self.history + self.thinking + self.answer

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)

    def with_answer(self, tokens: int) -> Usage:
        return replace(self, answer=tokens)


@dataclass(frozen=True)
class Room:
    """`conversation` needs `tokens` for its prompt and at least `reserve` for an answer, the context has `limit`.

    The user decides: leave out the oldest turns, leave out thinking (of `thinking` tokens), or stop. `typed` is the
    message that would not be sent then; `start` is the first turn that would change.
    """

    conversation: Conversation
    go_on: bool
    tokens: int
    reserve: int
    limit: int
    thinking: int
    droppable: int  # turns that can be left out
    typed: Turn | None = None
    start: int = 0

    @property
    def options(self) -> tuple[str, ...]:
        """The choices that can help, for Controller.resolve."""
        turns = ("turns",) if self.droppable else ()
        thinking = ("thinking",) if self.thinking and self.tokens - self.thinking + self.reserve <= self.limit else ()
        return (*turns, *thinking, "stop")


def prompt_of(engine: Engine, conversation: Conversation, go_on: bool, closed: bool = False) -> list[int]:
    """The ids the model reads: `go_on` leaves the last answer open, `closed` ends after it. Raises TinychatError."""
    last = conversation.turns[-1]
    if last.raw:
        asked = conversation.last_prompt
        text = "".join(t.content for t in conversation.turns[asked or 0 :])
        return engine.tokenizer.encode(text, special=True)
    thinking = conversation.parameters.thinking
    ids = engine.chat.render(
        conversation.messages(), thinking=thinking, add_generation_prompt=not closed, continue_final=go_on
    )
    tags = engine.chat.think_tags
    if go_on and tags and last.thinking and not last.text and not last.thinking_open:
        ids += engine.tokenizer.encode(f"\n{tags[1]}\n\n", special=True)
    return ids


def measure(engine: Engine, conversation: Conversation, go_on: bool, closed: bool = False) -> tuple[Usage, list[int]]:
    """The prompt and what it consists of. Raises TinychatError when it cannot be rendered."""
    ids = prompt_of(engine, conversation, go_on, closed)
    answer = int(conversation.turns[-1].stats.get("generated_tokens", 0)) if go_on else 0
    system = thinking = 0
    if not conversation.turns[-1].raw:
        text = conversation.parameters.system.strip()
        system = len(engine.tokenizer.encode(text)) if text else 0
        thinking = _thinking(engine, conversation.cut(len(conversation.turns) - 1) if go_on else conversation)
    history = max(0, len(ids) - system - thinking - answer)
    return Usage(system, history, thinking, answer, engine.info.max_context), ids


def room_for(
    engine: Engine, conversation: Conversation, go_on: bool, prompt_tokens: int | None = None, always: bool = False
) -> Room | None:
    """None when the prompt and an answer fit the context, or what to ask the user about. Raises TinychatError."""
    limit = engine.info.max_context
    tokens = len(prompt_of(engine, conversation, go_on)) if prompt_tokens is None else prompt_tokens
    reserve = min(conversation.parameters.max_tokens or ANSWER_ROOM, ANSWER_ROOM, limit // 4)
    if tokens + reserve <= limit and not always:
        return None
    droppable = sum(t.role == "user" for t in conversation.sent) - 1
    return Room(conversation, go_on, tokens, reserve, limit, _thinking(engine, conversation), max(0, droppable))


def _thinking(engine: Engine, conversation: Conversation) -> int:
    """Tokens of thinking that the template really sends back."""
    if not conversation.send_thinking or not any(t.thinking for t in conversation.sent):
        return 0
    bare = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in conversation.messages()]
    with_thinking = engine.chat.render(conversation.messages(), add_generation_prompt=False)
    return max(0, len(with_thinking) - len(engine.chat.render(bare, add_generation_prompt=False)))
