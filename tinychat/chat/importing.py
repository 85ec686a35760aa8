"""Conversations from other programs: ChatGPT's export (conversations.json, or the zip with it) and that of llama.cpp's
web page.

Both keep messages as a tree; it becomes the tree of versions. What has no place here (images, calls of tools) is left
out and counted. The files are not trusted: whatever has the wrong type is as if it were not there.
"""

from __future__ import annotations

import json
import lzma
import math
import re
import time
import uuid
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinychat.chat.conversation import Attachment, Conversation, Turn
from tinychat.chat.history import History
from tinychat.chat.saving import patiently
from tinychat.errors import TinychatError, printable

_BAD_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError)
LARGEST = 1 << 30  # bytes of JSON that are read
_LISTS = re.compile(r"(.*/)?conversations[-_.\w]*\.json")  # in ChatGPT's zip
_SPACE = uuid.UUID("f1d2b5a4-3f0e-4a51-9f7b-6f2f5f1f7a10")  # of the ids that imported conversations get


@dataclass
class Imported:
    """What a file has. `left_out` counts what could not be taken over, by its name in the singular."""

    conversations: list[tuple[Conversation, float]] = field(default_factory=list)  # with the time of the latest change
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Node:
    """A message of another program, or (role "") what stands in the tree in its place."""

    id: str
    parent: str
    role: str = ""
    text: str = ""
    thinking: str = ""
    model: str = ""
    created: float = 0.0
    files: tuple[Attachment, ...] = ()


def take(history: History, path: Path) -> str:
    """Puts the conversations of `path` into the history, but for those that it has already; returns what was done, in
    one line. Raises TinychatError."""
    found, known = read(path), history.ids()
    new = [(c, updated) for c, updated in found.conversations if c.id not in known]
    for conversation, updated in new:
        patiently(lambda c=conversation, at=updated: history.save(c, at))  # type: ignore[misc]
    here = len(found.conversations) - len(new)
    line = f"imported {_count(len(new), 'conversation')}" + (f"; {here:,} were here already" if here else "")
    parts = [_count(n, what) for what, n in found.left_out.most_common()]
    return line + (f"; not taken over: {', '.join(parts)}" if parts else "")


def _count(n: int, what: str) -> str:
    first, _, rest = what.partition(" of ")
    return f"{n:,} {first}{'s' * (n != 1)}" + (f" of {rest}" if rest else "")


def read(path: Path) -> Imported:
    """Raises TinychatError for a file that cannot be read or is neither export."""
    shown, found = printable(str(path), newlines=False), Imported()
    try:
        for text in _texts(path):
            data = json.loads(text)
            for item in data if isinstance(data, list) else [data]:
                _take(_dict(item), found)
    except OSError as e:
        raise TinychatError(f"{shown}: {(e.strerror or str(e)).lower()}") from None
    except (ValueError, RecursionError, MemoryError, EOFError, NotImplementedError, RuntimeError, *_BAD_ZIP):
        raise TinychatError(f"{shown} cannot be read: it is damaged, or no JSON") from None
    if not found.conversations:
        raise TinychatError(f"{shown} has no conversation of ChatGPT (conversations.json) or of llama.cpp's web page")
    return found


def _texts(path: Path) -> Iterator[bytes]:
    """The JSON texts of a file, or those in a zip."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as f:
            yield _limited(f.read(LARGEST + 1))
        return
    with zipfile.ZipFile(path) as archive:
        for name in sorted(filter(_LISTS.fullmatch, archive.namelist())):
            with archive.open(name) as f:
                yield _limited(f.read(LARGEST + 1))


def _limited(text: bytes) -> bytes:
    if len(text) > LARGEST:
        raise TinychatError(f"a file of more than {LARGEST >> 30} GiB is not read")
    return text


def _take(item: dict[str, Any], found: Imported) -> None:
    conv = _dict(item.get("conv"))
    if "mapping" in item:
        source, title = _str(item.get("conversation_id")) or _str(item.get("id")), _str(item.get("title"))
        created, updated = _time(item.get("create_time")), _time(item.get("update_time"))
        nodes, last = [*_of_chatgpt(_dict(item["mapping"]), found.left_out)], _str(item.get("current_node"))
    elif "conv" in item and "messages" in item:
        source, title = _str(conv.get("id")), _str(conv.get("name"))
        created, updated = 0.0, _time(conv.get("lastModified"), 1000)
        nodes, last = [*_of_llama(_list(item["messages"]), found.left_out)], _str(conv.get("currNode"))
    else:
        return
    conversation = _conversation(nodes, last, found.left_out)
    if not conversation.turns:
        found.left_out["empty conversation"] += 1
        return
    times = [t.created for t in (*conversation.turns, *conversation.others)]
    conversation = replace(
        conversation,
        id=uuid.uuid5(_SPACE, source or json.dumps([title, times])).hex,
        model_title=" ".join(title.split())[:200],
        created=created or min(times),
    )
    found.conversations.append((conversation, updated or max(times)))


def _of_chatgpt(mapping: dict[str, Any], left_out: Counter[str]) -> Iterator[_Node]:
    for id, entry in mapping.items():
        node = _Node(id, _str(_dict(entry).get("parent")))
        message = _dict(_dict(entry).get("message"))
        content, meta = _dict(message.get("content")), _dict(message.get("metadata"))
        kind, role = _str(content.get("content_type")), _str(_dict(message.get("author")).get("role"))
        node = replace(node, created=_time(message.get("create_time")), model=_str(meta.get("model_slug")))
        if not message or meta.get("is_visually_hidden_from_conversation") or kind == "reasoning_recap":
            yield node
        elif kind == "thoughts":
            thoughts = [_dict(t) for t in _list(content.get("thoughts"))]
            text = "\n\n".join(_str(t.get("content")) or _str(t.get("summary")) for t in thoughts)
            yield replace(node, role="assistant", thinking=text)
        elif role == "tool" or (role == "assistant" and _str(message.get("recipient")) not in ("", "all")):
            left_out["result of a tool" if role == "tool" else "call of a tool"] += 1
            yield node
        elif role in ("user", "assistant") and kind in ("text", "multimodal_text", "code"):
            left_out["file"] += len(_list(meta.get("attachments")))
            text = "\n\n".join(filter(None, _parts(content, left_out)))
            yield replace(node, role=role, text=text)
        else:
            left_out["system message" if role == "system" else "message of another kind"] += bool(_parts(content, None))
            yield node
    left_out += Counter()  # without the zeros


def _parts(content: dict[str, Any], left_out: Counter[str] | None) -> list[str]:
    """The texts of a message of ChatGPT."""
    texts = [_str(content.get("text"))]
    for part in _list(content.get("parts")):
        if isinstance(part, dict):
            kind = _str(part.get("content_type"))
            texts.append(_str(part.get("text")))  # of speech
            if left_out is not None and not texts[-1]:
                left_out["image" if "image" in kind else "recording" if "audio" in kind else "part of a message"] += 1
        else:
            texts.append(_str(part))
    return [text for text in texts if text.strip()]


def _of_llama(messages: list[Any], left_out: Counter[str]) -> Iterator[_Node]:
    before, tree = "", any(isinstance(m, dict) and m.get("parent") is not None for m in messages)
    for message in map(_dict, messages):
        id, role, text = _name(message.get("id")), _str(message.get("role")), _str(message.get("content"))
        node = _Node(
            id, _name(message.get("parent")) if tree else before, created=_time(message.get("timestamp"), 1000)
        )
        before = id
        if role not in ("user", "assistant") or message.get("type") == "root":
            left_out["result of a tool" if role == "tool" else "system message"] += bool(text.strip())
            yield node
            continue
        left_out["call of a tool"] += _str(message.get("toolCalls")) not in ("", "[]")
        thinking = _str(message.get("reasoningContent")) or _str(message.get("thinking"))
        if not thinking and (inside := re.match(r"\s*<think>(.*?)</think>", text, re.S)):
            thinking, text = inside.group(1).strip(), text[inside.end() :].lstrip()
        files = []
        for extra in map(_dict, _list(message.get("extra"))):
            if _str(extra.get("content")):
                files.append(Attachment(_str(extra.get("name")) or "file", _str(extra.get("content"))))
            else:
                kind = _str(extra.get("type")).lower()
                left_out["image" if "image" in kind else "recording" if "audio" in kind else "file"] += 1
        model = _str(message.get("model"))
        yield replace(node, role=role, text=text, thinking=thinking, model=model, files=tuple(files))
    left_out += Counter()


def _conversation(nodes: Sequence[_Node], last: str, left_out: Counter[str]) -> Conversation:
    """The nodes as turns: an answer in several messages is one turn, and every answer follows a question."""
    order = {node.id: (node.created, i) for i, node in enumerate(nodes)}
    children: dict[str, list[_Node]] = {}
    for node in sorted({n.id: n for n in nodes}.values(), key=lambda n: order[n.id]):
        children.setdefault(node.parent if node.parent in order else "", []).append(node)
    turns: dict[int, Turn] = {}
    begins: dict[int, int] = {}  # a longer answer -> the one that is its beginning
    place = {"": 0}  # the turn of each node
    below: list[tuple[_Node, int]] = [(node, 0) for node in reversed(children.get("", []))]

    def add(turn: Turn, parent: int) -> int:
        turns[len(turns) + 1] = replace(turn, id=len(turns) + 1, parent=parent)
        return len(turns)

    while below:
        node, at = below.pop()
        if node.id in place:
            continue
        above, created = turns.get(at), node.created or time.time()
        if node.role == "user" and (node.text or node.files):
            if above is not None and above.role == "user":  # whose answer was stopped before it began
                at = add(Turn("assistant", "", stop_reason="stopped", created=above.created), at)
            at = add(Turn("user", node.text, files=node.files, created=created), at)
        elif node.role == "assistant" and (node.text or node.thinking):
            if above is None:
                left_out["answer without a question"] += 1
            else:
                if above.role == "assistant":
                    begins[len(turns) + 1], at = at, above.parent
                at = add(Turn("assistant", node.text, node.thinking, model=node.model, created=created), at)
        place[node.id] = at
        below += [(child, at) for child in reversed(children.get(node.id, []))]
    used, begun = {turn.parent for turn in turns.values()}, set(begins.values())
    kept = [_whole(turns, begins, id) for id in turns if id in used or id not in begun]
    ids = {turn.id for turn in kept}
    end = place[last] if place.get(last) in ids else max(ids, default=0)
    return Conversation(others=tuple(kept), made=len(turns)).show(end)


def _whole(turns: dict[int, Turn], begins: dict[int, int], id: int) -> Turn:
    """The turn with what it goes on from in front."""
    turn, parts = turns[id], [id]
    if turn.role != "assistant" or turn.stop_reason:
        return turn
    while (id := begins.get(id, 0)) != 0:
        parts.append(id)
    text, thinking = (
        "\n\n".join(filter(None, values))
        for values in zip(*((turns[part].text, turns[part].thinking) for part in reversed(parts)))
    )
    return replace(turn, text=text, thinking=thinking, stop_reason="eos" if text else "stopped")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _str(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _name(value: Any) -> str:
    """An id, which may be a number."""
    return str(value) if isinstance(value, str | int) else ""


def _time(value: Any, per_second: float = 1) -> float:
    """A Unix time in seconds; 0 for what is none."""
    if not isinstance(value, int | float) or not 0 < value < 1e14 or math.isnan(value):
        return 0.0
    return min(value / per_second, 4e9)
