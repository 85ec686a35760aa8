"""The built-in tools for files: list, glob, grep, read a part, write and edit, all inside one folder."""

from __future__ import annotations

import difflib
import fnmatch
import io
from collections.abc import Mapping
from typing import Any

from tinychat.errors import TinychatError, encodable, printable
from tinychat.tools import search
from tinychat.tools.folder import Folder, Missing
from tinychat.tools.protocol import CallContext, CallStopped, Question, Tool

LINES = 400  # lines that read_file returns when the call names no number
FEWEST = 50  # lines that it returns at least: small models ask for one line and never for the rest
FOUND = 500  # most paths or lines that glob and grep return
MAX_EDIT = 1024 * 1024  # bytes of a file that is written or edited
_PATH = {"type": "string", "description": "path relative to the folder"}


def reading(folder: Folder) -> tuple[Tool, ...]:
    """The tools that only read."""

    def list_files(arguments: Mapping[str, Any], context: CallContext) -> str:
        _ask_to_read(folder, context)
        found = folder.entries(arguments.get("path", "."))
        ends = {"folder": "/", "link": " (a link, not followed)", "other": " (no regular file)"}
        lines = [f"{name}{ends.get(kind, f'  {size:,} bytes')}" for name, kind, size in found]
        return _listed(lines, "entries")

    def glob(arguments: Mapping[str, Any], context: CallContext) -> str:
        _ask_to_read(folder, context)
        pattern = tuple(part for part in arguments["pattern"].split("/") if part not in ("", "."))
        found = []
        for path, kind in folder.walk():
            if context.cancel.is_set():
                raise CallStopped("stopped")
            if kind == "file" and matches(tuple(path.split("/")), pattern):
                found.append(path)
        return _listed(found, "files")

    def grep(arguments: Mapping[str, Any], context: CallContext) -> str:
        _ask_to_read(folder, context)
        where = arguments.get("path", ".")
        found = search.grep(folder, arguments["pattern"], where, arguments.get("glob", ""), FOUND + 1, context.cancel)
        narrowed = not found and (where != "." or "glob" in arguments)
        return _listed(found, "lines") + (" there; without path and glob all files are searched" if narrowed else "")

    def read_file(arguments: Mapping[str, Any], context: CallContext) -> str:
        _ask_to_read(folder, context)
        name, start = arguments["path"], max(1, arguments.get("start", 1))
        lines = lines_of(_text(folder.read(name), name))
        part = lines[start - 1 : start - 1 + max(FEWEST, arguments.get("lines", LINES))]
        if not part:
            return f"the file has only {len(lines):,} lines" if lines else "the file is empty"
        if len(part) == len(lines):
            return "".join(part)
        return f"[lines {start} to {start + len(part) - 1} of {len(lines)}]\n{''.join(part)}"

    return (
        Tool("list_files", "List a directory of the folder.", _object({"path": _PATH}), list_files),
        Tool(
            "glob",
            "Find files by name. Hidden directories are left out.",
            _object({"pattern": {"type": "string", "description": "as *.py or src/**/test_*"}}, "pattern"),
            glob,
        ),
        Tool(
            "grep",
            "Search the text of files for a regular expression (Python's); gives path:line: text.",
            _object(
                {
                    "pattern": {"type": "string"},
                    "path": {"type": "string", "description": "a file or directory to search in (default: all)"},
                    "glob": {"type": "string", "description": "only files with such a name, as *.py"},
                },
                "pattern",
            ),
            grep,
        ),
        Tool(
            "read_file",
            f"Read a text file, or {LINES} lines of a long one.",
            _object(
                {
                    "path": _PATH,
                    "start": {"type": "integer", "description": "first line, from 1"},
                    "lines": {"type": "integer", "description": f"how many (default {LINES}, at least {FEWEST})"},
                },
                "path",
            ),
            read_file,
        ),
    )


def writing(folder: Folder) -> tuple[Tool, ...]:
    """The tools that change files. Each asks first and shows the change as a diff."""

    def put(context: CallContext, tool: str, name: str, old: bytes | None, new: bytes) -> str:
        if len(new) > MAX_EDIT:
            raise TinychatError(f"{printable(name)!r} would have more than {MAX_EDIT:,} bytes")
        if new == old:
            return "the file holds exactly this already"
        diff = difference(name, old, new)
        path = "/".join(folder.parts(name))
        title = f"{'Change' if old is not None else 'Create'} {printable(path, newlines=False)}?"
        exact = f"{tool} {folder.path}/{path}\n{diff}"
        context.ask(Question("write", title, diff, exact, f"write {folder.path}"))
        folder.replace(name, new, old)
        lines = lines_of(diff)[2:]
        added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
        return f"written: +{added} -{removed} lines"

    def write_file(arguments: Mapping[str, Any], context: CallContext) -> str:
        _ask_to_read(folder, context)
        name = arguments["path"]
        if not folder.parts(name):
            raise TinychatError("a path of a file is needed")
        try:
            old = folder.read(name, MAX_EDIT)
            _text(old, name)
        except Missing:
            old = None
        return put(context, "write", name, old, encodable(arguments["content"]).encode())

    def edit_file(arguments: Mapping[str, Any], context: CallContext) -> str:
        _ask_to_read(folder, context)
        name, old, new = arguments["path"], arguments["old"], arguments["new"]
        data = folder.read(name, MAX_EDIT)
        text = _text(data, name)
        times = text.count(old) if old else 0
        if times != 1:
            why = "is empty" if not old else "occurs nowhere" if not times else f"occurs {times} times"
            raise TinychatError(f"the text to replace {why} in {printable(name)!r}; give one that occurs exactly once")
        return put(context, "edit", name, data, encodable(text.replace(old, new)).encode())

    return (
        Tool(
            "write_file",
            "Write a text file as a whole: a new one, or in place of the old one.",
            _object({"path": _PATH, "content": {"type": "string"}}, "path", "content"),
            write_file,
        ),
        Tool(
            "edit_file",
            "Replace a text that occurs exactly once in a file.",
            _object(
                {
                    "path": _PATH,
                    "old": {"type": "string", "description": "the text as it is, with its line breaks"},
                    "new": {"type": "string", "description": "what takes its place"},
                },
                "path",
                "old",
                "new",
            ),
            edit_file,
        ),
    )


def matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether the components of a path match those of a pattern; ** stands for any number of them. A pattern of one
    component matches a name in any directory."""
    if len(pattern) == 1 and pattern != ("**",):
        return fnmatch.fnmatchcase(path[-1], pattern[0])
    reached = {0}  # numbers of pattern components that the components so far can match
    for part in path:
        after = set[int]()
        for at in _past_stars(reached, pattern):
            if at < len(pattern) and pattern[at] == "**":
                after.add(at)
            elif at < len(pattern) and fnmatch.fnmatchcase(part, pattern[at]):
                after.add(at + 1)
        reached = after
    return len(pattern) in _past_stars(reached, pattern)


def difference(name: str, old: bytes | None, new: bytes) -> str:
    """A unified diff of `old` and `new`; it marks a last line without a line break."""
    before = lines_of(old.decode()) if old is not None else []
    after = lines_of(new.decode())
    shown = printable(name, newlines=False)
    source = f"a/{shown}" if old is not None else "/dev/null"
    lines = difflib.unified_diff(before, after, source, f"b/{shown}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ no line break at the end\n" for line in lines)


def lines_of(text: str) -> list[str]:
    """The lines with their line breaks; only \\n breaks a line."""
    return io.StringIO(text, newline="\n").readlines()


def _ask_to_read(folder: Folder, context: CallContext) -> None:
    detail = f"{folder.path}\n\nThe model may list, search and read every file in this folder. Links are not followed."
    context.ask(Question("read", "Read files in this folder?", detail, f"read {folder.path}", ""))


def _past_stars(reached: set[int], pattern: tuple[str, ...]) -> set[int]:
    """`reached`, and the places after each ** there, which may match no component."""
    out = set(reached)
    for at in reached:
        while at < len(pattern) and pattern[at] == "**":
            at += 1
            out.add(at)
    return out


def _text(data: bytes, name: str) -> str:
    try:
        if b"\0" in data:
            raise ValueError
        return data.decode()
    except ValueError:
        raise TinychatError(f"{printable(name)!r} is no UTF-8 text") from None


def _listed(lines: list[str], many: str) -> str:
    if not lines:
        return f"no {many}"
    more = f"\n[more than {FOUND} {many}; ask for fewer]" if len(lines) > FOUND else ""
    return "\n".join(lines[:FOUND]) + more


def _object(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required)}
