"""A model's own chat template: Jinja as HF transformers renders it, in a sandbox with a bound on time and memory.

Jinja's sandbox keeps a template away from Python; it does not keep it from a loop over loops or from a string of a
gigabyte. Here every loop step, call and filter, and every character a template makes, is paid for out of a budget.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from tinychat.errors import TinychatError, printable

MAX_SOURCE = 1 << 18  # characters; the longest published template has some 20,000
MAX_WORK = 1 << 26  # characters made and steps taken in one rendering
MAX_SECONDS = 3.0

# Filters that pass items on, and filters that make text of whatever they get. No other filter exists.
_ITEM_FILTERS = {
    "attr",
    "count",
    "d",
    "default",
    "dictsort",
    "first",
    "groupby",
    "items",
    "last",
    "length",
    "list",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "sort",
    "sum",
    "unique",
}
_TEXT_FILTERS = {
    "abs",
    "capitalize",
    "e",
    "escape",
    "float",
    "int",
    "lower",
    "round",
    "safe",
    "string",
    "striptags",
    "title",
    "trim",
    "truncate",
    "upper",
    "urlencode",
    "wordcount",
}
_BLOCKED_METHODS = {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"}


class ChatTemplate:
    """A compiled template. Raises TinychatError, in one line, for a source that is broken or far too long."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lock = threading.Lock()  # one budget, so one rendering at a time
        self._env = _Sandbox()
        if len(source) > MAX_SOURCE:
            raise TinychatError(f"the chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed")
        try:
            self._template = self._env.from_string(source)
        except Exception as e:
            raise _failure(e) from None

    def render(self, **variables: Any) -> str:
        """The text. Raises TinychatError when the template fails, refuses the conversation, or asks for too much."""
        with self._lock:
            self._env.start()
            try:
                return self._template.render(variables)
            except Exception as e:
                raise _failure(e) from None


def _failure(e: Exception) -> TinychatError:
    why = str(e) or type(e).__name__
    return TinychatError(f"the file's chat template failed: {printable(why[:200], newlines=False)}")


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.start()
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime
        del self.globals["lipsum"]
        items = {name: self._guard(self.filters[name], False) for name in _ITEM_FILTERS}
        texts = {name: self._guard(self.filters[name], True) for name in _TEXT_FILTERS}
        ours = {"join": self._join, "replace": self._replace, "indent": self._indent, "tojson": self._tojson}
        self.filters = items | texts | ours | {"_steps": self._steps, "_concat": self.concat}

    # --- the budget ---

    def start(self) -> None:
        self._left, self._deadline = MAX_WORK, time.monotonic() + MAX_SECONDS

    def pay(self, n: int) -> None:
        self._left -= n
        if self._left < 0:
            raise SecurityError("it asks for too much memory")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it takes longer than {MAX_SECONDS:g} seconds")

    def pay_for(self, value: Any, deep: bool = False) -> Any:
        """Pays for the characters and items of `value`; `deep`, for all that its text would hold."""
        stack = [value]
        while stack:
            item = stack.pop()
            self.pay(1 + (len(item) if isinstance(item, str | list | tuple | dict) else 0))
            if deep and isinstance(item, dict):
                stack += [*item.keys(), *item.values()]
            elif deep and isinstance(item, list | tuple):
                stack += item
        return value

    def _guard(self, f: Callable[..., Any], text: bool) -> Callable[..., Any]:
        at = 1 if hasattr(f, "jinja_pass_arg") else 0

        @wraps(f)  # keeps what Jinja marked on the filter
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if text:
                self.pay_for(args[at], deep=True)
            return self.pay_for(f(*args, **kwargs))

        return guarded

    # --- the hooks of the sandbox ---

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metered().visit(source), *args, **kwargs)

    def wrap_str_format(self, value: Any) -> None:
        """str.format pads to any width; without Jinja's wrapper it is a blocked method."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (isinstance(obj, str) and attr in _BLOCKED_METHODS) and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            return __self._replace(owner, *args)
        if isinstance(owner, str) and name == "join":
            return __self._join(args[0], owner)
        return __self.pay_for(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and (isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple)):
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            self.pay(len(sequence) * max(times, 0))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > 1024:
                raise SecurityError("it computes with numbers that are too large")
        elif operator == "%" and isinstance(left, str):
            if len(left) > 1000 or re.search(r"%[^a-zA-Z%]*(\d{3}|\*)", left):
                raise SecurityError("it formats with a width or a pattern that is too long")
            for _ in range(left.count("%")):  # each place may take it all
                self.pay_for(right, deep=True)
        return self.pay_for(super().call_binop(context, operator, left, right))

    def concat(self, parts: Iterable[Any]) -> str:
        out = []
        for part in parts:
            self.pay_for(part, deep=True)
            out.append(str(part))
        return "".join(out)

    # --- filters with a bound or with HF's behaviour ---

    def _steps(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.pay(1)
            yield value

    def _join(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        parts: list[Any] = []
        for value in values:
            parts += ([d] if parts else []) + [value if attribute is None else self.getitem(value, attribute)]
        return self.concat(parts)

    def _replace(self, s: Any, old: str, new: str, count: int = -1) -> str:
        text = self.concat([s])
        found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
        self.pay(len(text) + found * len(new))
        return text.replace(old, new, found)

    def _indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = self.concat([s])
        self.pay(len(width) if isinstance(width, str) else width)
        pad = width if isinstance(width, str) else " " * width
        self.pay((text.count("\n") + 1) * len(pad))
        lines = text.split("\n")
        return "\n".join(pad + line if (first or n) and (line or blank) else line for n, line in enumerate(lines))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        self.pay_for(value, deep=True)
        if indent is not None and not 0 <= indent <= 16:
            raise SecurityError("it indents JSON too far")
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Metered(NodeTransformer):
    """Sends every loop and every `~` through a filter that pays: the sandbox has no hook for these two."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_steps", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(
            nodes.List(node.nodes, lineno=node.lineno), "_concat", [], [], None, None, lineno=node.lineno
        )


class _Generation(Extension):
    """`{% generation %}` marks what a trainer learns from; for a prompt its body is all there is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    # Also keeps Jinja from evaluating constant expressions while it compiles, before there is a budget.
    if not isinstance(value, str | Undefined):
        context.environment.pay_for(value, deep=True)  # type: ignore[attr-defined]
    return value


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime(pattern: str) -> str:
    if len(pattern) > 100 or re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise SecurityError("it asks for a date in a strange format")
    return datetime.now().strftime(pattern)
