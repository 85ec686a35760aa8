"""`tinychat tokenize`: prints the tokens of a text."""

from __future__ import annotations

from tinychat.commands.loading import header, prompt_text
from tinychat.console import show_json
from tinychat.errors import printable


def tokenize(text: str, prompt: str, *, as_json: bool) -> None:
    """The ids of a raw prompt, as llama.cpp's llama-tokenize gives them."""
    from tinychat.engine.tokenizer import Tokenizer

    prompt = prompt_text(prompt)
    with header(text) as (_, path):
        tokenizer = Tokenizer.from_gguf(path)
        ids = tokenizer.encode_prompt(prompt)
        tokens = [tokenizer.token_text(i) for i in ids]
    if as_json:
        return show_json({"ids": ids, "tokens": tokens})
    for i, token in zip(ids, tokens):
        print(f"{i:>8}  {printable(token, newlines=False)}")
