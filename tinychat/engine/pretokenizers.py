"""The pre-tokenizers of byte-pair vocabularies by llama.cpp's names (`tokenizer.ggml.pre`).

Each stage splits every fragment of the stage before into its matches and the gaps between them. Where llama.cpp departs
from a model's published expression (it knows one class of letters, so youtu and kimi-k2 do not split camelCase; its
whitespace never belongs to a CJK range), so do these: the ids are the same as llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(digits: str, suffix: str = "") -> str:
    """Of GPT-4o and Mistral's Tekken: words are split where a small letter comes before a capital one."""
    high, low = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{high}*{low}+{suffix}|{lead}{high}+{low}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"


def _words(digits: str, letters: str = r"\p{L}", spaces: str = _SPACES) -> str:
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    return rf"{_CONTRACTION}|{word}|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*{spaces}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LATIN = (  # the letters of DeepSeek's tokenizer.json
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-"
    "ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN = (
    r"\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}"
    r"\x{2B820}-\x{2CEAF}\x{2CEB0}-\x{2EBEF}\x{2F800}-\x{2FA1F}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions, one per stage, and what a file with this pre-tokenizer leaves out."""

    stages: tuple[str, ...]
    ignore_merges: bool = False  # a fragment that is a token as a whole is not merged from smaller ones
    add_bos: bool = False
    default_bos: int | None = 11  # llama.cpp's when the file names none


_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_FAMILIES: list[tuple[str, PreTokenizer]] = [
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    ),
    ("gpt-4o llama4 kanana2", PreTokenizer((_cased(r"\p{N}{1,3}", f"(?:{_CONTRACTION})?"),))),
    ("tekken", PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, add_bos=True)),
    ("glm4 glm5", PreTokenizer(_LLAMA3, ignore_merges=True, default_bos=None)),
    ("chatglm-bpe", PreTokenizer(_LLAMA3, default_bos=None)),
    ("dbrx smaug-bpe", PreTokenizer(_LLAMA3)),
    ("qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan kormo solar-open grok-2", PreTokenizer((_words(r"\p{N}"),))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer((_words(r"\p{N}", spaces=r"|\s*[\r\n]|\s+(?!\S)|\s+"),)),
    ),
    ("qwen35", PreTokenizer((_words(r"\p{N}", r"\p{L}\p{M}"),))),
    ("gpt-2 olmo mpt phi-2 jais exaone4 trillion gigachat a.x-4.0 mellum granite-docling", PreTokenizer((_GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_LATIN}]+",
                r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
                r"(?<!\s)\s+\z",
                r"[[一-龥ࠀ-一가-퟿]&&[^\s]]+",
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-v3 joyai-llm hunyuan-dense hy_v4",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                r"[一-龥぀-ゟ゠-ヿ]+",
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
            )
        ),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
                rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{_CONTRACTION})?|\p{{N}}| "
                rf"?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",
            ),
            ignore_merges=True,
        ),
    ),
    (
        "kimi-k2",
        PreTokenizer(
            (
                rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_CONTRACTION})?"
                rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
            )
        ),
    ),
    ("default", PreTokenizer((r"[\p{P}$+<=>\^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
]
PRE_TOKENIZERS = {name: pre for names, pre in _FAMILIES for name in names.split()}
