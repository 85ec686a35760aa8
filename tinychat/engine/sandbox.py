"""The Jinja environment for untrusted chat templates. Only what this module lists can be used.

Values are str, int, float, bool, None, list (and tuple), dict, and Jinja's namespace, loop and macro objects, with only
the methods, filters, tests and functions named below. Before an operation runs, the number of characters and items that
it creates or visits is subtracted from a budget, which grows with the conversation. Where Jinja compiles an operation
to plain Python (loops, comparisons, slices, `~`), the template is rewritten to call a filter that does so.
"""

from __future__ import annotations

import json
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import SandboxedEnvironment, SecurityError
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

WORK = 1 << 22  # units of one rendering: about a byte of memory or 10 ns each
WORK_PER_CHARACTER = 64  # units added per character of the conversation
SECONDS = 0.5  # of this thread's CPU time
SECONDS_PER_CHARACTER = 2e-6
_STEP, _ITEM, _PIECE = 16, 8, 80  # units: of any operation, of a place in a list, of a small object
_BITS = 2048  # largest size of a whole number
_PLACES = 30  # most decimal places of round()

_SEARCHES = {"startswith", "endswith", "find", "rfind", "index", "rindex", "count", "removeprefix", "removesuffix"} | {
    f"is{kind}"
    for kind in ("alnum", "alpha", "ascii", "decimal", "digit", "lower", "numeric", "space", "title", "upper")
}
_COPIES = {"strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "casefold", "swapcase"}
_SPLITS = {"split", "rsplit", "splitlines", "partition", "rpartition"}
_METHODS: dict[type, set[str]] = {
    str: _SEARCHES | _COPIES | _SPLITS | {"replace", "join", "format"},
    list: {"index", "count"},
    tuple: {"index", "count"},
    dict: {"get", "items", "keys", "values"},
}
_LOOP = {
    *("index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem", "depth", "depth0"),
    "cycle",
}
# Jinja's own filters, and the units that each character or item of their input costs.
_FILTERS = {
    "abs": 1,
    "capitalize": 4,
    "count": 0,
    "dictsort": 16,
    "e": 6,
    "escape": 6,
    "first": 0,
    "float": 1,
    "int": 1,
    "items": 16,
    "last": 0,
    "length": 0,
    "list": 8,
    "lower": 4,
    "map": 4,
    "max": 4,
    "min": 4,
    "reject": 4,
    "rejectattr": 4,
    "reverse": 4,
    "safe": 1,
    "select": 4,
    "selectattr": 4,
    "sort": 16,
    "string": 4,
    "title": 60,
    "trim": 4,
    "unique": 8,
    "upper": 4,
}
_TESTS = {
    *("boolean", "callable", "defined", "divisibleby", "even", "false", "float", "integer", "iterable", "lower"),
    *("mapping", "none", "number", "odd", "sequence", "string", "true", "undefined", "upper"),
}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}
_COMPARING_TESTS = {"==": "eq", "equalto": "eq", "eq": "eq", "!=": "ne", "ne": "ne", ">": "gt", "gt": "gt"} | {
    **{"greaterthan": "gt", ">=": "gteq", "ge": "gteq", "<": "lt", "lt": "lt", "lessthan": "lt"},
    **{"<=": "lteq", "le": "lteq", "in": "in"},
}


@dataclass(frozen=True)
class _Method:
    """A method of a value, by name; only `Sandbox.call` can use it."""

    owner: Any
    name: str


@dataclass(frozen=True)
class _Function:
    """A global function."""

    run: Callable[..., Any]


class Sandbox(SandboxedEnvironment):
    """The environment. `start` gives a rendering its budget; what exceeds it raises SecurityError."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed before there is a budget; _finalize sees to it too
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        self.start({})
        functions: dict[str, Callable[..., Any]] = {
            "range": self._range,
            "dict": self._dict,
            "namespace": self._namespace,
            "raise_exception": _raise,
            "strftime_now": _strftime,
        }
        self.globals = {name: _Function(f) for name, f in functions.items()}
        self.filters = {name: self._paid(FILTERS[name], units) for name, units in _FILTERS.items()} | {
            "default": FILTERS["default"],
            "d": FILTERS["default"],
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": self._round,
            "sum": self._sum,
            "tojson": self._tojson,
            "_compare": self._compare,
            "_concat": self._concat,
            "_slice": self._slice,
            "_steps": self._steps,
            "_toll": self._toll,
        }
        self.tests = {name: self._test(TESTS[name]) for name in _TESTS} | {
            name: self._comparing_test(comparison) for name, comparison in _COMPARING_TESTS.items()
        }

    # --- the budget ---

    def start(self, variables: Mapping[str, Any]) -> None:
        """Begins a rendering over `variables`. Raises SecurityError for values of other types than those above."""
        self._left, self._ends = 1 << 62, float("inf")
        self._looked = 0
        self.weigh(dict(variables))
        size = (1 << 62) - self._left
        self._left = WORK + WORK_PER_CHARACTER * size
        self._ends = time.thread_time() + SECONDS + SECONDS_PER_CHARACTER * size

    def pay(self, units: int) -> None:
        self._left -= _STEP + units
        if self._left < 0:
            raise SecurityError("it asks for too much memory or work")
        self._looked += 1
        if not self._looked & 63 and time.thread_time() > self._ends:
            raise SecurityError("it takes too long")

    def weigh(self, value: Any, units: int = 1) -> None:
        """Subtracts `units` for every character and item of `value`, at any depth, from the budget. Raises
        SecurityError for other types."""
        if isinstance(value, str):
            return self.pay(units * len(value))
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                self.pay(units * len(item))
            elif isinstance(item, dict):
                self.pay(units * _PIECE * len(item))
                stack += item.keys()
                stack += item.values()
            elif isinstance(item, list | tuple):
                self.pay(units * _ITEM * len(item))
                stack += item
            elif item is None or isinstance(item, int | float | Undefined):
                self.pay(units * _ITEM)
            else:
                raise SecurityError("it uses a value that is no text, number, list or dict")

    # --- what Jinja compiles a template to ---

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metered().visit(source), *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """obj.attribute: a method by name, an item of a dict or a namespace, a figure of a loop; else undefined."""
        self.pay(0)
        if isinstance(obj, Undefined):
            return getattr(obj, attribute)  # raises, saying what is undefined
        kind = next((kind for kind in _METHODS if isinstance(obj, kind)), None)
        if kind and attribute in _METHODS[kind]:
            return _Method(obj, attribute)
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        if isinstance(obj, Namespace):
            held = object.__getattribute__(obj, "_Namespace__attrs")
            if attribute in held:
                return held[attribute]
        if isinstance(obj, LoopContext) and attribute in _LOOP:
            return _Method(obj, attribute) if attribute == "cycle" else getattr(obj, attribute)
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """obj[argument]."""
        if isinstance(obj, str | list | tuple | dict):
            self.weigh(argument)  # hashed, and compared with keys
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        if isinstance(argument, str):
            return self.getattr(obj, argument)
        return self.undefined(obj=obj, name=argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A method or function of the lists above, a macro, or the loop of a recursive one."""
        __self.pay(_PIECE * (1 + len(args) + len(kwargs)))
        if isinstance(__obj, _Method | _Function):
            kwargs = {k: v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")}  # Jinja's own
        if isinstance(__obj, _Method):
            return __self._plain(__self._run(__obj.owner, __obj.name, args, kwargs))
        if isinstance(__obj, _Function):
            return __obj.run(*args, **kwargs)
        if isinstance(__obj, LoopContext) and args:
            args = (__self._steps(args[0]), *args[1:])
        elif not isinstance(__obj, Macro | Undefined):
            raise SecurityError("it calls something that is no function")
        return __context.call(__obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """left operator right."""
        sizes = [
            len(v) * (1 if isinstance(v, str) else _ITEM) for v in (left, right) if isinstance(v, str | list | tuple)
        ]
        if operator == "*" and sizes:
            times = right if isinstance(right, int) else left
            self.pay(sizes[0] * max(times, 0) if isinstance(times, int) else 0)
        elif operator == "%" and isinstance(left, str):
            return self._percent(left, right)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _BITS:
                raise SecurityError("it computes with numbers that are too large")
            self.pay(bits)
        else:
            self.pay(sum(sizes))
        return super().call_binop(context, operator, left, right)

    # --- methods ---

    def _run(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(owner, LoopContext):
            return owner.cycle(*args)
        if isinstance(owner, dict):
            self.pay(0 if name == "get" else 2 * _PIECE * len(owner))
            for key in args[:1]:
                self.weigh(key)
        elif isinstance(owner, list | tuple):
            self.weigh(owner)
            self.weigh(list(args))
        elif name == "join":
            return self._join(args[0], owner)
        elif name == "replace":
            return self._replace(owner, *args, **kwargs)
        elif name == "format":
            return self._format(owner, args, kwargs)
        else:
            self.weigh([*args, *kwargs.values()])
            self.pay(len(owner) * (4 if name in _COPIES else 1))
            if name in _SPLITS:
                mark = args[0] if args else kwargs.get("sep")
                pieces = owner.count(mark) if isinstance(mark, str) and mark else len(owner) // 2
                self.pay(_PIECE * (pieces + 1))
        return getattr(owner, name)(*args, **kwargs)

    def _format(self, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """str.format with plain fields: {}, {0} and {name}, each of them once."""
        fields = re.findall(r"\{\{|\}\}|\{(\w*)\}|([{}])", text)
        self.pay(len(text) + _PIECE * len(fields))
        if any(stray for _, stray in fields):
            raise SecurityError("it formats with a width or an attribute")
        for _ in range(max(1, len(fields))):  # each field may take it all
            self.weigh([*args, *kwargs.values()], 4)
        return text.format(*args, **kwargs)

    def _percent(self, text: str, values: Any) -> str:
        """text % values with plain places: %s, %d, %i, %r, %f, %% and %(name)s."""
        self.pay(len(text))
        if re.search(r"%(?!%|(\(\w+\))?[sdirf])", text.replace("%%", "")):
            raise SecurityError("it formats with a width or a pattern that is not known")
        for _ in range(max(1, text.count("%"))):
            self.weigh(values, 4)
        return text % values

    # --- filters and tests ---

    def _plain(self, value: Any) -> Any:
        """`value` as one of the types that exist here: iterators as lists, Markup as str."""
        if isinstance(value, str):
            return str(value)
        if value is None or isinstance(value, int | float | list | tuple | dict | Undefined | Namespace | Macro):
            if isinstance(value, int) and value.bit_length() > _BITS:
                raise SecurityError("it computes with numbers that are too large")
            return value
        out = []
        for item in value:
            self.pay(_ITEM)
            out.append(item)
        return out

    def _paid(self, f: Callable[..., Any], units: int) -> Callable[..., Any]:
        """Filter `f`, made to subtract `units` per character and item of its arguments from the budget."""
        at = 1 if hasattr(f, "jinja_pass_arg") else 0

        @wraps(f)  # keeps what Jinja marked on the filter
        def paid(*args: Any, **kwargs: Any) -> Any:
            for value in (*args[at:], *kwargs.values()):
                if units:
                    self.weigh(value, units)
                else:
                    self.pay(0)
            return self._plain(f(*args, **kwargs))

        return paid

    def _test(self, f: Any) -> Callable[..., bool]:
        @wraps(f)
        def tested(*args: Any) -> bool:
            self.pay(sum(4 * len(a) for a in args if isinstance(a, str)))
            return bool(f(*args))

        return tested

    def _comparing_test(self, comparison: str) -> Callable[[Any, Any], bool]:
        return lambda left, right: self._compare(left, comparison, right)

    def _compare(self, left: Any, *rest: Any) -> bool:
        """A chain: left, then name and value of each comparison."""
        for name, right in zip(rest[::2], rest[1::2]):
            self.weigh(left)
            self.weigh(right)
            if not _COMPARISONS[name](left, right):
                return False
            left = right
        return True

    def _concat(self, parts: Iterable[Any]) -> str:
        out = []
        for part in parts:
            self.weigh(part, 1 if isinstance(part, str) else 4)
            out.append(str(part))
        return "".join(out)

    def _slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        if not isinstance(value, str | list | tuple):
            raise SecurityError("it takes a part of something that is no text or list")
        self.pay(len(value) * (1 if isinstance(value, str) else _ITEM))
        return value[start:stop:step]

    def _steps(self, values: Any) -> Iterator[Any]:
        """The items of `values`, for a loop."""
        if not isinstance(values, str | list | tuple | dict | Undefined):
            raise SecurityError("it goes through something that is no list, dict or text")
        for value in values:
            self.pay(_PIECE)
            yield value

    def _toll(self, nothing: str, characters: int) -> str:
        self.pay(characters)
        return nothing

    def _join(self, values: Any, d: str = "", attribute: str | int | None = None) -> str:
        parts: list[Any] = []
        for value in self._steps(values):
            parts += ([d] if parts else []) + [value if attribute is None else self.getitem(value, attribute)]
        return self._concat(parts)

    def _replace(self, s: Any, old: str, new: str, count: int | None = -1) -> str:
        text = self._concat([s])
        found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
        self.pay(len(text) + found * len(new))
        return text.replace(old, new, found)

    def _indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = self._concat([s])
        lines = text.count("\n") + 1
        self.pay(_PIECE * lines + lines * (len(width) if isinstance(width, str) else width))
        pad = width if isinstance(width, str) else " " * width
        return "\n".join(
            pad + line if (first or n) and (line or blank) else line for n, line in enumerate(text.split("\n"))
        )

    def _round(self, value: Any, precision: int = 0, method: str = "common") -> Any:
        self.weigh(value)
        if not isinstance(precision, int) or abs(precision) > _PLACES:
            raise SecurityError("it rounds to a place far away")
        return FILTERS["round"](value, precision, method)

    def _sum(self, values: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        total = start
        for value in self._steps(values):
            value = value if attribute is None else self.getitem(value, attribute)
            if not isinstance(total, int | float) or not isinstance(value, int | float):
                raise SecurityError("it adds up what are no numbers")
            total += value
        return total

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
            raise SecurityError("it indents JSON too far")
        depth = _depth(value, self)
        self.weigh(value, 6 + (indent or 0) * depth // _ITEM)  # \u0000 for a character; the indent for an item
        for text in separators or ():
            self.weigh(text)
            self.weigh(value, len(text))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    # --- functions ---

    def _range(self, *args: Any) -> list[int]:
        values = range(*args)
        if len(values) > 100_000:
            raise SecurityError("it counts to more than 100,000")
        self.pay(36 * len(values))
        return list(values)

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        for value in args:
            self.pay(_PIECE * (len(value) if isinstance(value, list | tuple | dict) else 1))
        return dict(*args, **kwargs)

    def _namespace(self, *args: Any, **kwargs: Any) -> Namespace:
        return Namespace(self._dict(*args, **kwargs))


def _depth(value: Any, sandbox: Sandbox) -> int:
    """How deep lists and dicts are nested in `value`, counted to 1,000: Python's JSON writer goes no deeper."""
    level, depth = [value], 0
    while level and depth < 1000:
        depth += 1
        sandbox.pay(_ITEM * len(level))
        inner = [v for v in level if isinstance(v, list | tuple | dict) and v]
        level = [child for v in inner for child in (v.values() if isinstance(v, dict) else v)]
    return depth


class _Metered(NodeTransformer):
    """Rewrites loops, comparisons, slices, `~` and plain text to call filters that use the budget; Jinja has no hook
    for them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter("_steps", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        rest: list[nodes.Expr] = []
        for operand in node.ops:
            rest += [nodes.Const(operand.op, lineno=node.lineno), operand.expr]
        return _filter("_compare", node.expr, *rest)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        none = nodes.Const(None, lineno=node.lineno)
        return _filter("_slice", node.node, node.arg.start or none, node.arg.stop or none, node.arg.step or none)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        characters = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        self.generic_visit(node)
        empty, n = nodes.Const("", lineno=node.lineno), nodes.Const(characters, lineno=node.lineno)
        node.nodes = [_filter("_toll", empty, n), *node.nodes]
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise SecurityError("it switches escaping on")


def _filter(name: str, value: Any, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


class Generation(Extension):
    """`{% generation %}` marks text for training; in a prompt it is replaced by its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    context.environment.weigh(value, 1 if isinstance(value, str) else 4)  # type: ignore[attr-defined]
    return value


def _raise(message: Any) -> None:
    raise TemplateError(str(message)[:1000] if isinstance(message, str) else "it refuses the conversation")


def _strftime(pattern: Any) -> str:
    if not isinstance(pattern, str) or len(pattern) > 100 or re.search(r"%(?![-_]?[a-zA-Z%])", pattern):
        raise SecurityError("it asks for a date in a strange format")
    return datetime.now().strftime(pattern)
