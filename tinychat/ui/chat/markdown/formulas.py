r"""TeX formulas in Markdown: kept from its escapes, and shown in Unicode where that says the same.

Delimiters are \( \), \[ \] and $$ $$, and $ $ with no blank inside the marks and no digit after them, so that prices
stay prices. What Unicode cannot say is shown as it was written.
"""

from __future__ import annotations

import re
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.ruler import RuleOptionsType
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

LONGEST_LINE, LONGEST_BLOCK = 1000, 100  # characters and lines in which a formula's end is looked for
_FORMULA = re.compile(
    rf"\\\(([^`]{{1,{LONGEST_LINE}}}?)\\\)|\\\[([^`]{{1,{LONGEST_LINE}}}?)\\\]|"
    r"\$\$(.+?)\$\$|\$(?!\s)((?:[^$\\\n]|\\.)+?)(?<!\s)\$(?!\d)",
    re.S,
)
_ESCAPABLE = frozenset("*_`#~<>|+-.!\"'&:=@$]")  # what Markdown itself gives a meaning; a TeX \\ \{ \, \( stays
_BRACED = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"  # three levels deep
_FRACTION = re.compile(rf"\\[dt]?frac\s*{_BRACED}\s*{_BRACED}")
_ROOT = re.compile(rf"\\sqrt\s*{_BRACED}")
_TEXT = re.compile(r"\\(?:text|mathrm|operatorname|textbf|textit)\s*\{([^{}]*)\}")
_SCRIPT = re.compile(r"([_^])\{([^{}]*)\}")
_FUNCTION = re.compile(r"\\(lim|sin|cos|tan|log|ln|exp|max|min|arg|det|dim|gcd|sup|inf|tanh)(?![a-zA-Z])")
_ROWS = re.compile(r"\\(?:begin|end)\{(?:aligned|align|gathered|gather|split|equation)\*?\}")
_SPACES = re.compile(r"\\(?:[,;:! ]|quad|qquad)(?![a-zA-Z])")


def formulas(parser: MarkdownIt) -> None:
    """Adds the formulas to `parser` as tokens `formula`, and takes from its escapes those that only TeX uses."""
    parser.inline.ruler.before("escape", "formula", _formula)
    alternatives: RuleOptionsType = {"alt": ["paragraph", "reference", "blockquote", "list"]}
    parser.block.ruler.before("fence", "formula_block", _formula_block, alternatives)


def _formula(state: StateInline, silent: bool) -> bool:
    char = state.src[state.pos]
    if char not in "\\$":
        return False
    if found := _FORMULA.match(state.src, state.pos, state.posMax):
        if not silent:
            token = state.push("formula", "", 0)
            token.content, token.markup = next(g for g in found.groups() if g), found[0]
        state.pos = found.end()
        return True
    if char == "\\" and state.pos + 1 < state.posMax and state.src[state.pos + 1] not in _ESCAPABLE | {"\n"}:
        width = 2 if state.src[state.pos + 1] == "\\" else 1  # the second \ of \\ escapes nothing
        if not silent:
            state.pending += state.src[state.pos : state.pos + width]
        state.pos += width
        return True
    return False


def _formula_block(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    """Lines from one that begins with \\[ or $$ to one that ends with \\] or $$, without a blank line."""
    lines: list[str] = []
    for row in range(first, min(last, first + LONGEST_BLOCK)):
        line = state.src[state.bMarks[row] + state.tShift[row] : state.eMarks[row]].strip()
        if row == first and (state.is_code_block(row) or line[:2] not in ("\\[", "$$")):
            return False
        lines.append(line)
        close, inner = "\\]" if lines[0][0] == "\\" else "$$", line[2:] if row == first else line
        if not line:
            return False
        if close in inner:
            text = "\n".join(lines)
            if not inner.endswith(close) or close in inner[:-2] or len(text) == 4:
                return False
            if not silent:
                token = state.push("formula_block", "", 0)
                token.content, token.markup, token.map = text[2:-2], text, [first, row + 1]
                state.line = row + 1
            return True
    return False


def formula_rows(tex: str, source: str) -> str:
    """A formula of its own with a line for each of its rows, or `source` where one of them has no equal."""
    lines = [line.replace("&", " ") for line in re.split(r"\\\\", _ROWS.sub("", tex)) if line.strip()]
    texts = [formula_text(line, "") for line in lines]
    return "\n".join(texts) if texts and all(texts) else source


@lru_cache(maxsize=1024)
def formula_text(tex: str, source: str) -> str:
    """`tex` in Unicode on one line, or `source` where anything in it has no equal."""
    import unicodeit  # 0.1 s that a chat without formulas does not need

    text = re.sub(r"\\(?:left|right)(?![a-z])\.?", "", " ".join(tex.split()))
    text = _FUNCTION.sub(r"\1", _TEXT.sub(r"\1", _SPACES.sub(" ", text)))
    text = text.replace(r"\{", "\x01").replace(r"\}", "\x02")  # braces that are meant
    for _ in range(4):  # nested ones from the inside
        text = _FRACTION.sub(lambda m: f"{_grouped(m[1])}/{_grouped(m[2])}", text)
        text = _ROOT.sub(lambda m: f"√{_grouped(m[1])}", text)
    text = unicodeit.replace(text)
    text = _SCRIPT.sub(lambda m: f"{m[1]}{_grouped(m[2].strip())}", text)
    if re.search(r"[\\{}&]", text):
        return source
    return text.replace("\x01", "{").replace("\x02", "}").replace("\u2009", " ").strip()


def _grouped(tex: str) -> str:
    """In brackets where it is more than one number, letter (with an index) or command."""
    tex = tex.strip()
    return tex if re.fullmatch(r"\\[a-zA-Z]+|\d+|\w(?:[_^]\w)?", tex) else f"({tex})"
