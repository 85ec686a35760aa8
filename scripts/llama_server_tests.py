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

# Why a test does not apply: the first pattern that its name matches. Everything else must pass.
WHY: tuple[tuple[str, str], ...] = (
    (r"test_load_split_model|vision|embedding|local_media_file", "another model: split, with vision, for embeddings"),
    (r"test_no_ui|static_assets", "there is no web page"),
    (r"test_server_slots|slots_idle|parallel_slots|completion_unified", "there are no slots: one request at a time"),
    (r"aliases_and_tags|multiple_addresses", "a server has one name and one address"),
    (r"test_server_props", "model_path is the file's name only, and the cache names files by hash"),
    (r"test_chat_completion\[|chat_completion_stream\[|cached_tokens", "counts tokens of stories260K's tokenizer"),
    (r"test_chat_template|prefill|verbose_debug", "__verbose is not offered; /apply-template shows the prompt"),
    (r"test_apply_chat_template|test_template|thinking_history", "another chat template: the model's own is used"),
    (r"multiple_choices", "n > 1 is refused: one request at a time"),
    (r"grammar", "grammars are not offered; response_format has JSON schemas"),
    (r"return_progress", "counts batches of 64 tokens; progress comes in chunks of 256"),
    (r"with_image|vision_format", "images are refused with 400, not 500"),
    (r"empty_messages", "a conversation without messages is refused with 400, as Anthropic does"),
    (r"with_reasoning_model", "another model: one that thinks"),
    (r"responses_stream_with_llama_telemetry", "at its token limit a response ends as incomplete, as OpenAI has it"),
    (r"cors|proxy", "a browser's page is refused unless its origin is named"),
    (r"test_metrics", "/metrics has names of its own"),
    (r"/test_completion.py|ctx_shift|ignore_eos|/test_security", "/completion is not offered"),
    (r"test_tool_call", "needs constrained decoding, tools and other models"),
    (r"tokenize_with_bos", "SmolLM2 has no BOS"),
    (r"invalid_chat_completion_req\[messages7", "two messages of the assistant in a row are a conversation"),
)


class Started:
    """Our server for one of their ServerProcess objects, on its port."""

    def __init__(self, theirs: object) -> None:
        from tests.support.serving import serving_app
        from tinychat.backend.local import LocalBackend
        from tinychat.kernels.sampling import Sampling
        from tinychat.models import cache
        from tinychat.models.registry import resolve
        from tinychat.server.answer import House
        from tinychat.server.app import create_app
        from tinychat.server.security import Policy

        context = (theirs.n_ctx or 4096) // (theirs.n_slots or 1)  # type: ignore[attr-defined]
        path = cache.pull(resolve("smollm2:135m"))
        self.backend = LocalBackend.open(path, max_context=min(context, 8192), device="cpu")
        most = theirs.n_predict if (theirs.n_predict or 0) > 0 else None  # type: ignore[attr-defined]
        house = House(
            theirs.model_alias or "smollm2",  # type: ignore[attr-defined]
            self.backend,
            self.backend,
            Sampling(theirs.temperature),  # type: ignore[attr-defined]
            theirs.seed,  # type: ignore[attr-defined]
            most,
        )
        self._serving = serving_app(
            create_app(house, Policy(theirs.api_key), 16),  # type: ignore[attr-defined]
            theirs.server_port,  # type: ignore[attr-defined]
        )
        self._serving.__enter__()

    def stop(self) -> None:
        self._serving.__exit__(None, None, None)
        self.backend.close()


def run(llama: Path, expression: str) -> list[tuple[str, str, str]]:
    """(file, test, passed, failed or skipped) of every test; their own output goes to the terminal."""
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
            bad = [c.tag for c in case if c.tag in ("failure", "error")]
            status = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
            results.append((case.get("classname", "").rpartition(".")[2], case.get("name", ""), status))
        return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama", type=Path, help="llama.cpp's sources")
    parser.add_argument("-k", default="", metavar="EXPR", help="only tests that match, as pytest has it")
    args = parser.parse_args()
    results = run(args.llama, args.k)
    unexplained = 0
    for file in sorted({r[0] for r in results}):
        of = [(name, status) for f, name, status in results if f == file]
        print(f"{file}: {len([1 for _, s in of if s == 'passed'])} of {len(of)} pass")
        reasons: Counter[str] = Counter()
        for name, status in of:
            if status == "skipped":
                reasons["skipped by the suite itself (slow, or a known problem of theirs)"] += 1
            elif status == "failed":
                reason = next((why for pattern, why in WHY if re.search(pattern, f"/{file}.py::{name}")), "")
                unexplained += not reason
                reasons[reason or f"FAILS: {name}"] += 1
        for reason, n in reasons.most_common():
            print(f"    {n:3}  {reason}")
    passed = [1 for r in results if r[2] == "passed"]
    print(f"{len(passed)} of {len(results)} pass; {unexplained} fail without a known reason")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
