"""Health, properties, models, tokens, templates, figures."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.support.serving import serving
from tinychat.backend.local import LocalBackend
from tinychat.engine import kvstore
from tinychat.engine.kvstore import LEAST
from tinychat.engine.tokenizer import Tokenizer
from tinychat.server.answer import ServedModel


def test_health_and_models(url: str, smollm2: LocalBackend) -> None:
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert model["id"] == "smollm2:135m" and model["meta"]["n_ctx"] == 2048
    assert httpx.get(f"{url}/v1/models/smollm2:135m").json() == model
    missing = httpx.get(f"{url}/v1/models/gpt-4")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"


def test_properties_tell_no_path(url: str, smollm2: LocalBackend) -> None:
    props = httpx.get(f"{url}/props")
    assert props.json()["default_generation_settings"]["n_ctx"] == 2048
    assert props.json()["tinychat"]["can"]["thinking"] is False
    assert smollm2.info.path is not None and str(smollm2.info.path.parent) not in props.text


def test_tokens(url: str, smollm2: LocalBackend) -> None:
    assert smollm2.info.path is not None
    tokenizer = Tokenizer.from_gguf(smollm2.info.path)
    text = "<|im_start|>Where's the 媽 🤗?"
    post = httpx.post(f"{url}/tokenize", json={"content": text, "parse_special": False})
    ids = post.json()["tokens"]
    assert ids == tokenizer.encode(text)
    assert httpx.post(f"{url}/tokenize", json={"content": text}).json()["tokens"] == tokenizer.encode(
        text, special=True
    )
    assert httpx.post(f"{url}/detokenize", json={"tokens": ids}).json() == {"content": text}
    pieces = httpx.post(f"{url}/tokenize", json={"content": text, "with_pieces": True, "parse_special": False}).json()
    data = [p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces["tokens"]]
    assert b"".join(data).decode() == text
    wrong = httpx.post(f"{url}/detokenize", json={"tokens": [10**6]})
    assert wrong.status_code == 400 and "vocabulary" in wrong.json()["error"]["message"]


def test_a_template_is_applied(url: str) -> None:
    body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    prompt = httpx.post(f"{url}/apply-template", json=body).json()["prompt"]
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_figures(url: str) -> None:
    def figure(name: str) -> float:
        found = re.search(rf"^tinychat_{name} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
        assert found
        return float(found[1])

    names = ("requests_total", "generated_tokens_total", "prompt_tokens_total")
    before = [figure(name) for name in names]
    usage = httpx.post(
        f"{url}/v1/completions", json={"model": "m", "prompt": "One two three", "max_tokens": 5}, timeout=120
    ).json()["usage"]
    after = [figure(name) for name in names]
    assert [b - a for a, b in zip(before, after)] == [1, usage["completion_tokens"], usage["prompt_tokens"]]
    refused = 'tinychat_refused_total{kind="invalid"}'
    httpx.post(f"{url}/v1/completions", json={})
    assert refused in httpx.get(f"{url}/metrics").text


def test_errors_of_paths_and_methods(url: str) -> None:
    for answer, status in (
        (httpx.get(f"{url}/nothing"), 404),
        (httpx.get(f"{url}/v1/chat/completions"), 405),
        (httpx.post(f"{url}/health", json={}), 405),
        (httpx.get(f"{url}/v1/../../etc/passwd"), 404),
    ):
        assert answer.status_code == status and answer.json()["error"]["message"]


def test_conversations_that_take_turns_are_not_read_again(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an answer leaves in the KV cache is kept: A, B, A prefills of the second A only what is never saved."""
    monkeypatch.setattr(kvstore, "user_cache_dir", lambda *args, **kwargs: str(tmp_path))
    monkeypatch.setattr("tinychat.backend.local.SWITCH_SAVE_S", 120.0)  # a busy machine saves no less
    backend = LocalBackend.open(smollm2_path, max_context=512, device="cpu", store_bytes=1 << 27)
    with serving(ServedModel("m", backend, backend)) as url:

        def cached(word: str) -> tuple[int, int]:
            body = {"model": "m", "prompt": f"{word} " * 20, "max_tokens": 2, "temperature": 0}
            usage = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

        first, other, again = cached("plum"), cached("pear"), cached("plum")
    backend.close()
    assert first[0] < 3 and other[0] < 3
    assert again[0] >= again[1] - LEAST  # an end shorter than LEAST is not saved
