"""Chat templates that are made to hurt: random combinations of everything that takes time, memory or a way out."""

from __future__ import annotations

import random

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "U2"},
]
_BIG = ("9", "1000", "10000000", "300000000", "-1000000000", "999999999999", "2**62", "10**9", "0", "-1", "1e308")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = _words("""
    messages a b ns.v a b x messages[1] bos_token ns self nothing range tools
""")
_METHODS = _words("""
    format join split rsplit replace strip upper splitlines items keys values get count index title partition
    startswith casefold
""")
_OTHER_METHODS = _words("""
    encode format_map center ljust rjust zfill expandtabs translate append extend update pop copy setdefault
    fromkeys to_bytes hex bit_length __class__ __mro__ __globals__ __init__ __mul__ __format__ encode().hex
""")
_FILTERS = _words("""
    length list string upper tojson tojson(indent=10) tojson(indent=10000000) join join('xx') join(a)
    replace('','yyyy') replace('a',a) indent(999999999) indent(99) indent(a) round(-1000000000) round(300000000)
    round(5) sort unique reverse map('upper') map(attribute='role') map(attribute='role.role') select
    selectattr('role') sum sum(start='') sum(start=[]) min max first last escape dictsort items default(a) int
    int(base=36) float abs trim trim(a) capitalize safe title
""")
_OTHER_FILTERS = _words("""
    center(600000000) format(5) batch(3) batch(999999999) slice(3) slice(999999999) xmlattr groupby('role')
    random pprint wordwrap(1) wordcount truncate(999999999) urlize striptags urlencode filesizeformat
    attr('__class__') forceescape
""")
_FORMATS = (
    *("'%(a)600000000d'", "'%600000000d'", "'%.600000000f'", "'%*d'"),
    *("'%s' * 1000", "'%0999999999x'", "'%s%s%s%s'"),
)


_OPERATORS = ("*", "+", "~", "**", "%", "//", "-", "==", "in", "<", "and", "/")


def hostile(rng: random.Random) -> str:
    """A template, most often one that asks for far too much."""
    start = "{% set a = 'ab' %}{% set b = [1, 'x'] %}{% set x = {'a': 'b'} %}{% set ns = namespace(v='ab') %}"
    return start + "".join(_statement(rng, 3) for _ in range(rng.choice((1, 1, 2, 3, 5))))


def _one(rng: random.Random, known: tuple[str, ...], other: tuple[str, ...]) -> str:
    """Most often one that exists: what does not ends a template before it does anything."""
    return rng.choice(other if rng.random() < 0.03 else known)


def _statement(rng: random.Random, depth: int) -> str:
    inner = (lambda: _statement(rng, depth - 1)) if depth else (lambda: f"{{{{ {_value(rng, 2)} }}}}")
    match rng.randrange(10):
        case 0 | 1 | 2:
            return f"{{{{ {_value(rng, 4)} }}}}"
        case 3:
            return f"{{% for x in {_value(rng, 2)} %}}{inner()}{inner()}{{% endfor %}}"
        case 4:
            return f"{{% for x in range({rng.choice(_BIG)}) %}}{inner()}{{% endfor %}}"
        case 5:
            return f"{{% set a = {_value(rng, 3)} %}}{inner()}"
        case 6:  # doubles with every step
            grown = rng.choice(("ns.v + ns.v", "ns.v ~ ns.v", "ns.v * 2", "[ns.v, ns.v]", "ns.v | list", "{'k': ns.v}"))
            start = rng.choice(("'ab'", "[1, 2]", "3", "{}", _value(rng, 1)))
            return (
                f"{{% set ns = namespace(v={start}) %}}{{% for i in range({rng.choice(('30', '60', '100000'))}) %}}"
                f"{{% set ns.v = {grown} %}}{{% endfor %}}{{{{ {_filtered(rng, 'ns.v')} }}}}"
            )
        case 7:
            return f"{{% macro m(n) %}}{inner()}{{{{ m(n) }}}}{{{{ m(n) }}}}{{% endmacro %}}{{{{ m(1) }}}}"
        case 8:
            return f"{{% for m in messages recursive %}}{inner()}{{{{ loop(messages) }}}}{{% endfor %}}"
        case _:
            return f"{{% if {_value(rng, 2)} %}}{inner()}{{% else %}}{inner()}{{% endif %}}"


def _filtered(rng: random.Random, value: str) -> str:
    return f"({value})" + "".join(f" | {_one(rng, _FILTERS, _OTHER_FILTERS)}" for _ in range(rng.choice((1, 1, 2, 3))))


def _value(rng: random.Random, depth: int) -> str:
    if depth <= 0:
        return rng.choice((*_NAMES, *_BIG, "'a'", "'ab' * 5", "[]", "{}", "'é' * 1000", "true", "none"))

    def inner() -> str:
        return _value(rng, depth - 1)

    match rng.randrange(12):
        case 0 | 1:
            return f"({inner()} {rng.choice(_OPERATORS)} {inner()})"
        case 2:
            return f"({inner()} * {rng.choice(_BIG)})"
        case 3 | 4:
            return f"({_filtered(rng, inner())})"
        case 5 | 6:
            argument = rng.choice(("", inner(), inner(), rng.choice(_BIG)))
            return f"({inner()}).{_one(rng, _METHODS, _OTHER_METHODS)}({argument})"
        case 7:
            return f"range({', '.join(rng.choice((*_BIG, inner())) for _ in range(rng.choice((1, 2, 3))))})"
        case 8:
            return f"({rng.choice(_FORMATS)} % {rng.choice(('5', '(5, 6)', '{}', inner()))})"
        case 9:
            return f"[{inner()}, {inner()}, {inner()}]"
        case 10:
            return f"({inner()})[{rng.choice(('0', '-1', '::-1', ':999999999', rng.choice(_BIG), inner()))}]"
        case _:
            return rng.choice(
                (
                    f"namespace(v={inner()})",
                    f"dict(a={inner()})",
                    f"strftime_now({inner()})",
                    f"cycler({inner()})",
                    f"joiner({inner()})",
                    f"raise_exception({inner()})",
                    "lipsum(n=99999)",
                    "self.__init__",
                    "loop.cycle",
                )
            )
