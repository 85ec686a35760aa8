"""Points llama.cpp's own tests of llama-server (tools/server/tests) at our server.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 -d /tmp/llama
    tar xzf /tmp/llama/*.tar.gz -C /tmp/llama
    python -m scripts.llama_server_tests /tmp/llama/llama_cpp_python-0.3.36/vendor/llama.cpp [-k EXPR]

Nothing of those tests is kept here: they are copied to a temporary folder, with a conftest that starts our server, in
this process, where they would start llama-server, and that

- serves SmolLM2 in place of stories260K, which no package index has: so what a test knows of that model's words
  (`match_regex`) counts as said, and what it knows of its tokenizer fails and is listed below;
- adds a model's name to requests under /v1, where OpenAI requires one and llama-server does not.

Prints, per file, how many tests pass, and for each that does not why it does not apply; exits with 1 where a test fails
that no reason is known for.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FILES = (
    "test_basic",
    "test_chat_completion",
    "test_compat_anthropic",
    "test_compat_oai_responses",
    "test_completion",
    "test_ctx_shift",
    "test_ignore_eos",
    "test_metrics",
    "test_security",
    "test_template",
    "test_tokenize",
    "test_tool_call",
)
CONFTEST = """
import contextlib, sys, types
import pytest
sys.modules.setdefault("wget", types.ModuleType("wget"))
import utils
from scripts.llama_server_tests import Started

utils.match_regex = lambda regex, text: True
_request = utils.ServerProcess.make_request
_stream = utils.ServerProcess.make_stream_request

def _named(path, data):
    return {"model": "m"} | data if path.startswith("/v1/") and isinstance(data, dict) else data

def start(self, timeout_seconds=60):
    self.started = Started(self)
    utils.server_instances.add(self)

def stop(self):
    utils.server_instances.discard(self)
    if started := self.__dict__.pop("started", None):
        started.stop()

utils.ServerProcess.start, utils.ServerProcess.stop = start, stop
utils.ServerProcess.make_request = lambda self, method, path, data=None, *a, **k: _request(
    self, method, path, _named(path, data), *a, **k)
utils.ServerProcess.make_stream_request = lambda self, method, path, data=None, *a, **k: _stream(
    self, method, path, _named(path, data), *a, **k)

@pytest.fixture(autouse=True)
def stop_server_after_each_test():
    yield
    for server in set(utils.server_instances):
        server.stop()
"""

NO_PATH = r"404|Not Found: POST /completion|KeyError: '?(content|timings|0)'?"
COUNTS = r"^assert \d+ == \d+$"
HUB = r"[\w.-]+/[\w.-]+-GGUF:"  # the name of a model on a hub, among a test's parameters

# Why a test does not apply: (its whole name, what its failure says, the reason). Everything else must pass.
WHY: tuple[tuple[str, str, str], ...] = (
    (r"test_basic::test_load_split_model", NO_PATH, "/completion, llama-server's own, is not offered"),
    (r"test_basic::test_no_ui", NO_PATH, "the page is the chat, where the extra `web` is installed"),
    (r"test_basic::test_server_slots", NO_PATH, "there are no slots: one request at a time"),
    (r"test_basic::test_server_multiple_addresses", r"\[True, None\]", "a server has one address"),
    (r"test_basic::test_server_model_aliases_and_tags", r"KeyError: 'aliases'", "a server has one name"),
    (r"test_basic::test_server_props", r"'\.gguf' in '\w{32}'", "the cache names files by hash"),
    (
        r"test_chat_completion::test_chat_completion(_stream|_cached_tokens)?(\[.*\])?",
        COUNTS,
        "counts tokens of stories260K's tokenizer",
    ),
    (
        r"test_chat_completion::test_chat_template(_.*)?",
        r"'__verbose' in",
        "__verbose is not offered; /apply-template shows the prompt",
    ),
    (
        r"test_chat_completion::test_verbose_debug",
        r"400 == 200",
        "__verbose is not offered; /apply-template shows the prompt",
    ),
    (
        r"test_chat_completion::test_apply_chat_template",
        r"^AssertionError: assert '<",
        "another chat template: the model's own is used",
    ),
    (
        r"test_chat_completion::test_invalid_chat_completion_req\[messages7\]",
        r"200 == 400",
        "two messages of the assistant in a row are a conversation",
    ),
    (
        r"test_chat_completion::test_logprobs(_stream)?",
        r"top_logprobs: other tokens",
        "top_logprobs are refused by name: only the chosen token's probability is told",
    ),
    (
        r"test_chat_completion::test_return_progress\[.*\]",
        COUNTS,
        "counts batches of 64 tokens; progress comes in chunks of 256",
    ),
    (
        r"test_chat_completion::test_chat_completions_multiple_choices",
        r"400 == 200",
        "n > 1 is refused: one request at a time",
    ),
    (
        r"test_compat_anthropic::test_anthropic_(tool_result_with_image|vision_format_accepted)",
        r"400 == 500",
        "images are refused with 400, not 500",
    ),
    (
        r"test_compat_anthropic::test_anthropic_vision_base64_with_multimodal_model",
        r"huggingface\.co|image",
        "another model: one that sees",
    ),
    (
        r"test_compat_anthropic::test_anthropic_empty_messages",
        r"400 == 200",
        "a conversation without messages is refused with 400, as Anthropic does",
    ),
    (
        r"test_compat_anthropic::test_anthropic_thinking_history_in_\w+",
        r"more tokens with thinking|reasoning text in prompt",
        "another chat template: one that shows thinking",
    ),
    (
        r"test_compat_anthropic::test_anthropic_thinking_with_reasoning_model\[.*\]",
        r"thinking",
        "another model: one that thinks",
    ),
    (
        r"test_compat_oai_responses::test_responses_stream_with_llama_telemetry",
        r"None is not None",
        "at its token limit a response ends as incomplete, as OpenAI has it",
    ),
    (
        r"test_ctx_shift::test_ctx_shift_disabled_stream",
        r"'stop' is None",
        "SmolLM2 ends the text before 256 tokens; stories260K never does",
    ),
    (r"test_(completion|ctx_shift|ignore_eos)::.*", NO_PATH, "/completion, llama-server's own, is not offered"),
    (
        r"test_metrics::.*",
        NO_PATH + r"|200 == 501|Process-Start-Time-Unix",
        "/completion is not offered, /metrics is always there and has names of its own",
    ),
    (
        r"test_security::test_access_static_assets_without_api_key",
        NO_PATH,
        "the page is the chat, where the extra `web` is installed",
    ),
    (
        r"test_security::test_correct_api_key(_anthropic_header)?",
        NO_PATH,
        "/completion, llama-server's own, is not offered",
    ),
    (
        r"test_security::test_cors_o\w+(\[.*\])?",
        r"403 == 200",
        "a browser's page is refused unless its origin is named",
    ),
    (r"test_security::test_cors_proxy_\w+", NO_PATH, "there is no proxy"),
    (r"test_security::test_local_media_file\[.*\]", r"400 == 200", "images are refused with 400"),
    (
        r"test_template::test_add_generation_prompt\[.*-False\]",
        r"400 == 200",
        "add_generation_prompt false is refused: a prompt is made to be answered",
    ),
    (
        r"test_template::.*",
        r"Expected (prompt to end|today's date|generation prompt)",
        "another chat template: the model's own is used",
    ),
    (r"test_tokenize::test_tokenize_with_bos", COUNTS, "SmolLM2 has no BOS"),
    (
        r"test_tool_call::test_\w+\[.*\]",
        r"Template file .* does not exist",
        "needs a template that the sources do not have",
    ),
    (
        rf"test_tool_call::test_(weather|hello_world|calc_result|thoughts)\[.*{HUB}.*\]",
        r"Expected (1 tool call|something like|\^|To find)",
        "asks a named model of a hub for sense; SmolLM2 stands in for it",
    ),
)


class Started:
    """Our server for one of their ServerProcess objects, on its port."""

    def __init__(self, theirs: object) -> None:
        from tests.support.serving import serving_app
        from tinychat.backend.local import LocalBackend
        from tinychat.kernels.sampling import Sampling
        from tinychat.models import cache
        from tinychat.models.registry import resolve
        from tinychat.server.answer import ServedModel
        from tinychat.server.app import create_app
        from tinychat.server.security import Policy

        context = (theirs.n_ctx or 4096) // (theirs.n_slots or 1)  # type: ignore[attr-defined]
        path = cache.pull(resolve("smollm2:135m"))
        self.backend = LocalBackend.open(path, max_context=min(context, 8192), device="cpu")
        most = theirs.n_predict if (theirs.n_predict or 0) > 0 else None  # type: ignore[attr-defined]
        served = ServedModel(
            theirs.model_alias or "smollm2",  # type: ignore[attr-defined]
            self.backend,
            self.backend,
            Sampling(theirs.temperature),  # type: ignore[attr-defined]
            theirs.seed,  # type: ignore[attr-defined]
            most,
        )
        self._serving = serving_app(
            create_app(served, Policy(theirs.api_key), 16),  # type: ignore[attr-defined]
            theirs.server_port,  # type: ignore[attr-defined]
        )
        self._serving.__enter__()

    def stop(self) -> None:
        self._serving.__exit__(None, None, None)
        self.backend.close()


def run(llama: Path, expression: str) -> list[tuple[str, str, str]]:
    """(file, test, how it failed, "skipped", or "" where it passed) of every test."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "tools/server/tests"
        shutil.copytree(llama / "tools/server/tests", there)
        (there / "conftest.py").write_text(CONFTEST)
        chosen = [f"unit/{name}.py" for name in FILES]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:asyncio"]
        command += ["--junitxml", str(there / "results.xml"), "-k", expression or "test", *chosen]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(there), str(ROOT))), "PORT": "8093"}
        subprocess.run(command, cwd=there, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        results = []
        for case in ElementTree.parse(there / "results.xml").iter("testcase"):
            failure = next((c.get("message") or c.tag for c in case if c.tag in ("failure", "error")), "")
            skipped = "skipped" if case.find("skipped") is not None else ""
            results.append((case.get("classname", "").rpartition(".")[2], case.get("name", ""), failure or skipped))
        return results


def why(file: str, test: str, failure: str) -> str:
    """The reason why a test that fails so does not apply; "" where there is none."""
    name = f"{file}::{test}"
    return next((why for whole, says, why in WHY if re.fullmatch(whole, name, re.S) and re.search(says, failure)), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama", type=Path, help="llama.cpp's sources")
    parser.add_argument("-k", default="", metavar="EXPR", help="only tests that match, as pytest has it")
    args = parser.parse_args()
    results = run(args.llama, args.k)
    unexplained = 0
    for file in sorted({r[0] for r in results}):
        of = [(name, failure) for f, name, failure in results if f == file]
        print(f"{file}: {sum(not failure for _, failure in of)} of {len(of)} pass")
        reasons: Counter[str] = Counter()
        for name, failure in of:
            if failure == "skipped":
                reasons["skipped by the suite itself (slow, or a known problem of theirs)"] += 1
            elif failure:
                reason = why(file, name, failure)
                unexplained += not reason
                reasons[reason or f"FAILS: {name}: {' '.join(failure.split())[:200]}"] += 1
        for reason, n in reasons.most_common():
            print(f"    {n:3}  {reason}")
    passed = sum(not failure for _, _, failure in results)
    print(f"{passed} of {len(results)} pass; {unexplained} fail without a known reason")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
