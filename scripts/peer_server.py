"""The chat's side against a real server of another make: llama-server, built and started here, asked through the
remote backend.

    python -m scripts.peer_server LLAMA MODEL.gguf [--threads N]
    python -m scripts.peer_server URL

LLAMA are llama.cpp's sources (vendor/llama.cpp in the sdist of PyPI's llama-cpp-python); llama-server is built there
where it is not yet (cmake and a C++ compiler, minutes). With a URL a server that runs is asked. Prints a line for each
thing that was tried; exits with 1 where one is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from tinychat.backend.protocol import DoesNotFit, Event, Failed, Finished, Piece, Prompted, Request, ToolCall, text_of
from tinychat.backend.remote import RemoteBackend
from tinychat.kernels.sampling import Sampling

START_S = 120.0
CONTEXT = 2048
QUESTION = {"role": "user", "content": "Name three colours."}
ASKED = Request(messages=(QUESTION,), sampling=Sampling(temperature=0.0), max_tokens=24)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@contextmanager
def llama_server(llama: Path, model: Path, threads: int) -> Iterator[str]:
    """The URL of a llama-server with `model`, built where there is none."""
    program = llama / "build/bin/llama-server"
    if not program.exists():
        subprocess.run(["cmake", "-B", "build", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF"], cwd=llama, check=True)
        subprocess.run(["cmake", "--build", "build", "--target", "llama-server", "-j"], cwd=llama, check=True)
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    options = ["--jinja", "-c", str(CONTEXT), "-np", "1", "-t", str(threads), "--port", str(port)]
    process = subprocess.Popen(
        [program, "-m", model, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=llama
    )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"llama-server did not start (exit code {process.poll()})")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


class Asker:
    """What is tried, one method each; the return value is what was seen, in words. Raises AssertionError."""

    def __init__(self, backend: RemoteBackend) -> None:
        self.backend = backend

    def ask(self, request: Request = ASKED, **changes: Any) -> tuple[list[Event], str]:
        """(the events of an answer that ended well, its text)."""
        events = list(self.backend.answer(replace(request, **changes)))
        assert isinstance(events[-1], Finished), events[-1]
        return events, text_of(events)

    def conversation(self) -> str:
        first = self.ask()[1]
        turns = (QUESTION, {"role": "assistant", "content": first}, {"role": "user", "content": "And one more?"})
        again, second = self.ask(messages=turns)
        end = again[-1]
        assert first and second and isinstance(end, Finished)
        assert end.usage.cached > 0 and end.stats.decode_tok_s > 0 and end.usage.exact, end
        return f"{end.usage.prompt} tokens, {end.usage.cached} of them cached"

    def counts(self) -> str:
        """What is counted before is what the answer says."""
        events, _ = self.ask()
        counted, end = self.backend.measure(ASKED), events[-1]
        assert isinstance(end, Finished) and isinstance(events[0], Prompted)
        assert not counted.exact or counted.prompt == end.usage.prompt, (counted, end.usage)
        return f"{counted.prompt} tokens{'' if counted.exact else ', estimated'}"

    def limit(self) -> str:
        events, _ = self.ask(max_tokens=3)
        end = events[-1]
        assert isinstance(end, Finished) and (end.reason, end.usage.answer) == ("length", 3), end
        return end.reason

    def stop_string(self) -> str:
        whole = self.ask()[1]
        word = whole.split()[2]
        text = self.ask(stop=(word,))[1]
        assert word not in text and whole.startswith(text), (whole, text)
        return f"before {word!r}"

    def sampling(self) -> str:
        """Every parameter that the chat can set, DRY with a window over everything among them."""
        chosen = Sampling(
            temperature=0.8,
            repeat_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=0.2,
            dry_multiplier=0.8,
            dry_penalty_last_n=-1,
            seed=3,
        )
        first, second = (self.ask(sampling=chosen)[1] for _ in range(2))
        assert first == second, "the seed is not honoured"
        return "the same answer twice with one seed"

    def bias(self) -> str:
        answer = self.ask(logprobs=0)[1]
        banned = httpx.post(self.backend.url + "/tokenize", json={"content": answer.split()[0]}, timeout=20)
        ids = as_ids(banned.json() if banned.is_success else {})
        if not ids:
            return "not tried: the server has no /tokenize"
        biased = Sampling(temperature=0.0, logit_bias=tuple((i, -100.0) for i in set(ids)))
        other = self.ask(sampling=biased)[1]
        assert other.split()[0] != answer.split()[0]
        return "another answer"

    def goes_on(self) -> str:
        begun = {"role": "assistant", "content": "Red, green and"}
        _, text = self.ask(messages=(QUESTION, begun), continue_final=True, max_tokens=8)
        assert text and not text.startswith("Red, green and")
        return repr(text)

    def raw(self) -> str:
        _, text = self.ask(messages=(), raw="The capital of France is", max_tokens=4)
        assert text
        return repr(text)

    def logprobs(self) -> str:
        events, text = self.ask(logprobs=2)
        tokens = [t for e in events if isinstance(e, Piece) for t in e.tokens]
        assert tokens and all(t.logprob <= 0 for t in tokens) and "".join(t.text for t in tokens) == text
        return f"of {len(tokens)} tokens"

    def schema(self) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
        _, text = self.ask(response_format=form, max_tokens=40)
        assert isinstance(json.loads(text)["n"], int)
        return text

    def required_call(self) -> str:
        if not self.backend.info.can.tools:
            return "not tried: the server says that its model takes no tools"
        events, _ = self.ask(tools=(TOOL,), tool_choice="required", max_tokens=80)
        calls = [e for e in events if isinstance(e, ToolCall)]
        end = events[-1]
        assert isinstance(end, Finished) and end.reason == "tool_calls" and calls[0].name == "add", events
        assert isinstance(json.loads("".join(c.arguments for c in calls if c.index == 0)), dict)
        return "".join(c.arguments for c in calls)

    def too_long(self) -> str:
        long = {"role": "user", "content": "word " * (2 * self.backend.info.max_context)}
        end = [*self.backend.answer(replace(ASKED, messages=(long,)))][-1]
        assert isinstance(end, DoesNotFit) and end.usage.prompt > end.usage.limit > 0, end
        return f"{end.usage.prompt:,} tokens, the context holds {end.usage.limit:,}"

    def cancel(self) -> str:
        """An answer that is stopped frees the server for the next one."""
        request = replace(ASKED, max_tokens=1500, messages=({"role": "user", "content": "Count to a thousand."},))
        for event in (events := self.backend.answer(request)):
            if isinstance(event, Piece):
                request.cancel.set()
            last = event
        assert isinstance(last, Finished) and last.reason == "stopped", last
        del events
        began = time.monotonic()
        self.ask(max_tokens=1)
        return f"the next answer came after {time.monotonic() - began:.1f} s"

    def refused(self) -> str:
        end = [*self.backend.answer(replace(ASKED, tools=({"type": "nonsense"},)))][-1]
        assert isinstance(end, Failed) and "\n" not in end.message, end
        return end.message[:80]


def as_ids(body: Any) -> list[int]:
    return [i for i in body.get("tokens", []) if isinstance(i, int)] if isinstance(body, dict) else []


def tried(asker: Asker) -> int:
    """Tries everything; how much was wrong."""
    wrong = 0
    names = [name for name, value in vars(Asker).items() if callable(value) and name[0] != "_" and name != "ask"]
    for name in names:
        attempt: Callable[[], str] = getattr(asker, name)
        try:
            said = attempt()
        except (AssertionError, LookupError, ValueError, httpx.HTTPError) as e:
            wrong += 1
            said = f"WRONG: {type(e).__name__} {' '.join(str(e).split())[:300]}"
        print(f"{name:14} {said}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="llama.cpp's sources, or the URL of a server that runs")
    parser.add_argument("model", type=Path, nargs="?", help="a GGUF file for llama-server")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.server.startswith("http"):
        with closing(RemoteBackend.open(options.server)) as backend:
            return bool(tried(Asker(backend)))
    if options.model is None:
        parser.error("llama-server needs a model")
    llama, model = Path(options.server).resolve(), options.model.resolve()
    with llama_server(llama, model, options.threads) as url, closing(RemoteBackend.open(url)) as backend:
        return bool(tried(Asker(backend)))


if __name__ == "__main__":
    sys.exit(main())
