"""Real chat templates: what they write for random tool calls is read back as the same calls.

    python scripts/template_roundtrip.py FOLDER [-n 10000] [NAME ...]

FOLDER holds *.jinja files, such as models/templates of llama.cpp. Every template gets `n` random messages with one to
three calls: unicode, nesting, quotes, and the format's own markers inside strings. They are read twice: token by token,
as the engine does it, where a marker inside a string is told from a real one; and as plain text.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import calls, vocab
from tinychat.engine.prompt import Chat
from tinychat.engine.tokenizer import Tokenizer
from tinychat.errors import TinychatError


def model(template: str) -> tuple[Chat, Tokenizer]:
    """A chat whose control tokens are the tags of the template."""
    tags = dict.fromkeys(re.findall(r"</?[^<>\s{}'\"=]+>|\[/?[A-Z_]+\]|\]~b\]|\[e~\[", template))
    metadata = vocab.bpe("qwen2", ["<s>", "</s>", *(t for t in tags if t not in ("<s>", "</s>"))], eos_token_id="</s>")
    metadata["tokenizer.chat_template"] = template
    tokenizer = Tokenizer(metadata)
    return Chat(metadata, tokenizer), tokenizer


def check(chat: Chat, tokenizer: Tokenizer, rng: random.Random) -> tuple[bool, bool, str]:
    """One message: was it read back from tokens, from text; and what happened if not."""
    form = chat.call_format
    number = rng.choice((1, 1, 2, 3)) if form.parallel else 1
    made = [calls.call(rng, form.markers) for _ in range(number)]
    if len({call["function"]["name"] for call, _ in made}) < number:
        return True, True, ""
    tools = [tool for _, tool in made]
    want = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c, _ in made]
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call for call, _ in made]}
    turn = calls.written(chat, tokenizer, message, tools)
    got = calls.message_of(calls.read(chat, tokenizer, turn, tools))["calls"]
    text = calls.parsed(chat, turn.answer, tools, turn.prompt)["calls"]
    return got == want, text == want, f"want {want}\n got {got}\n in {turn.answer!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("-n", type=int, default=10_000)
    parser.add_argument("--show", action="store_true", help="print the first failure of each template")
    options = parser.parse_args()
    worst = 0
    for path in sorted(options.folder.glob("*.jinja")):
        if options.names and not any(name in path.stem for name in options.names):
            continue
        try:
            chat, tokenizer = model(path.read_text())
            chat.render([{"role": "user", "content": "Q"}])
        except TinychatError as e:
            print(f"{path.stem:55} {e}")
            continue
        note = (
            "plain: " + (chat.fallback or "the template shows no calls")
            if chat.call_format.plain
            else chat.call_format.form
        )
        rng, tokens, texts, first = random.Random(1), 0, 0, ""
        for _ in range(options.n):
            try:
                by_token, by_text, what = check(chat, tokenizer, rng)
            except (ValueError, TinychatError) as e:
                by_token, by_text, what = False, False, repr(e)
            tokens, texts = tokens + by_token, texts + by_text
            first = first or ("" if by_token else what)
        worst = max(worst, options.n - tokens)
        print(f"{path.stem:55} {tokens:6} of {options.n} from tokens, {texts:6} from text   {note}", flush=True)
        if first and options.show:
            print("   ", first)
    return worst > 0


if __name__ == "__main__":
    sys.exit(main())
