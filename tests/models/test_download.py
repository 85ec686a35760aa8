"""Downloads against a real HTTP server that misbehaves: the right file, or one clear line and nothing damaged."""

import email.utils
import errno
import gzip
import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import File, Server, make_gguf
from tinychat.engine.gguf import GGUF
from tinychat.errors import TinychatError
from tinychat.models import cache, download
from tinychat.models.download import DownloadStopped, remote_header
from tinychat.models.registry import Model


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BACKOFF", 0.01)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as s:
        yield s


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_gguf(tmp_path_factory.mktemp("good") / "a.gguf", seed=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_gguf(tmp_path_factory.mktemp("other") / "b.gguf", seed=2)


def model(url: str, sha256: str | None = None) -> Model:
    return Model("test:1b", (url,), sha256=sha256)


def leave_partial(server: Server, good: bytes, size: int, **file: object) -> None:
    """Lets a download of /m get as far as `size` bytes."""
    server.files["/m"] = File(good, block=size, **file)  # type: ignore[arg-type]
    stop = threading.Event()
    server.files["/m"].pace = lambda sent: stop.set() if sent else None
    with pytest.raises(DownloadStopped):
        cache.pull(model(server.url("/m")), stop=stop)
    server.files["/m"].pace = lambda sent: None
    server.requests.clear()


def partial_size() -> int:
    (part,) = [e for e in cache.entries() if e.partial]
    return part.size


def leftovers() -> list[str]:
    return sorted(p.name for p in cache.downloads_dir().glob("*"))


def test_a_whole_file_with_progress_and_notes(server: Server, good: bytes) -> None:
    server.files["/m"] = File(good)
    seen: list[tuple[int, int | None, float, str]] = []
    path = cache.pull(model(server.url("/m")), lambda *args: seen.append(args))
    assert path.read_bytes() == good
    assert path.name == hashlib.md5(server.url("/m").encode()).hexdigest()
    assert ("downloading", len(good), len(good)) in [(s[3], s[0], s[1]) for s in seen]
    notes = json.loads(path.with_name(path.name + ".json").read_text())
    assert notes["sha256"] == hashlib.sha256(good).hexdigest() and notes["size"] == len(good)
    assert leftovers() == [path.name, path.name + ".json"]
    assert cache.pull(model(server.url("/m"))) == path and len(server.requests) == 1  # the second time needs no network


def test_resumes_where_it_stopped(server: Server, good: bytes) -> None:
    leave_partial(server, good, 100_000)
    have = partial_size()
    assert 0 < have < len(good)
    assert cache.pull(model(server.url("/m"))).read_bytes() == good
    assert server.ranges == [f"bytes={have}-"] and server.requests[0].headers["if-range"] == '"v1"'


def test_resumes_with_a_date_when_there_is_no_etag(server: Server, good: bytes) -> None:
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    leave_partial(server, good, 100_000, etag=None, modified=date)
    assert cache.pull(model(server.url("/m"))).read_bytes() == good
    assert server.requests[0].headers["if-range"] == date


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_never_mixes_files_that_the_server_cannot_identify(
    server: Server, good: bytes, other: bytes, etag: str | None
) -> None:
    leave_partial(server, other, 100_000, etag=etag)
    server.files["/m"] = File(good, etag=etag)
    assert cache.pull(model(server.url("/m"))).read_bytes() == good
    assert server.ranges == [None]


def test_a_known_hash_needs_no_etag_to_resume(server: Server, good: bytes) -> None:
    leave_partial(server, good, 100_000, etag=None)
    known = model(server.url("/m"), hashlib.sha256(good).hexdigest())
    assert cache.pull(known).read_bytes() == good
    assert server.ranges[0] is not None


def test_a_known_hash_catches_a_mix_and_fetches_again(server: Server, good: bytes, other: bytes) -> None:
    leave_partial(server, other, 100_000)
    server.files["/m"] = File(good)
    known = model(server.url("/m"), hashlib.sha256(good).hexdigest())
    assert cache.pull(known).read_bytes() == good
    assert server.ranges == [server.ranges[0], None] and server.ranges[0]


@pytest.mark.parametrize("if_range", [True, False])
def test_the_file_changed_meanwhile(server: Server, good: bytes, other: bytes, if_range: bool) -> None:
    leave_partial(server, other, 100_000)
    server.files["/m"] = File(good, etag='"v2"', if_range=if_range)
    assert cache.pull(model(server.url("/m"))).read_bytes() == good


def test_the_file_shrank_meanwhile(server: Server, good: bytes, tmp_path: Path) -> None:
    small = make_gguf(tmp_path / "small.gguf", size=50_000)
    leave_partial(server, good, 100_000)
    server.files["/m"] = File(small, etag='"v2"', if_range=False)  # answers 416
    assert cache.pull(model(server.url("/m"))).read_bytes() == small


def test_a_server_without_range(server: Server, good: bytes) -> None:
    leave_partial(server, good, 100_000)
    server.files["/m"].ranges = False
    assert cache.pull(model(server.url("/m"))).read_bytes() == good


def test_a_range_answered_with_another_range(server: Server, good: bytes) -> None:
    leave_partial(server, good, 100_000)
    server.files["/m"].shift = 7
    assert cache.pull(model(server.url("/m"))).read_bytes() == good


def test_killed_between_the_last_byte_and_the_name(server: Server, good: bytes) -> None:
    server.files["/m"] = File(good)
    path = cache.pull(model(server.url("/m")))
    path.rename(path.with_name(path.name + ".part"))
    server.files.clear()
    assert cache.pull(model(server.url("/m"))).read_bytes() == good  # needs no network


def test_dropped_connections(server: Server, good: bytes) -> None:
    server.files["/m"] = File(good, drop=[50_000, 0, 100_000, 1])
    assert cache.pull(model(server.url("/m"))).read_bytes() == good
    assert len(server.requests) == 5


def test_dropped_connections_of_a_server_without_range_end_some_time(server: Server, good: bytes) -> None:
    server.files["/m"] = File(good, drop=[50_000] * 99, ranges=False)
    with pytest.raises(TinychatError, match=r"broke before the end .* times in a row; pull again later"):
        cache.pull(model(server.url("/m")))
    assert len(server.requests) <= download.RETRIES + 1


def test_a_content_length_that_is_too_long(server: Server, good: bytes) -> None:
    server.files["/m"] = File(good, lie=1000)
    assert cache.pull(model(server.url("/m"))).read_bytes() == good  # the Range request told the truth


def test_a_content_length_that_is_too_short(server: Server, good: bytes) -> None:
    server.files["/m"] = File(good, lie=-1000)
    with pytest.raises(TinychatError, match="truncated"):
        cache.pull(model(server.url("/m")))
    assert leftovers() == []


def test_no_content_length(server: Server, good: bytes) -> None:
    server.files["/m"] = File(good, no_length=True)
    assert cache.pull(model(server.url("/m"))).read_bytes() == good
    server.files["/n"] = File(good[:-100], no_length=True)
    with pytest.raises(TinychatError, match="truncated"):
        cache.pull(model(server.url("/n")))


def test_waits_as_long_as_the_server_asks(server: Server, good: bytes) -> None:
    due = int(time.time()) + 2
    date = email.utils.formatdate(due, usegmt=True)
    server.files["/m"] = File(good, first=[(429, {"Retry-After": "0"}), (503, {}), (503, {"Retry-After": date})])
    assert cache.pull(model(server.url("/m"))).read_bytes() == good
    assert time.time() >= due


def test_does_not_wait_for_hours(server: Server) -> None:
    server.files["/m"] = File(always=(429, {"Retry-After": "7200"}))
    with pytest.raises(TinychatError, match=r"429 .*come back in 120 minutes"):
        cache.pull(model(server.url("/m")))


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_server_that_stays_broken(server: Server, status: int) -> None:
    server.files["/m"] = File(always=(status, {}))
    with pytest.raises(TinychatError, match=f"/m: the server answers {status}.*6 times in a row"):
        cache.pull(model(server.url("/m")))
    assert leftovers() == []


@pytest.mark.parametrize(
    ("status", "line"), [(403, "refuses access"), (404, "not found"), (416, "answers 416"), (418, "418")]
)
def test_refusals_are_not_repeated(server: Server, status: int, line: str) -> None:
    server.files["/m"] = File(always=(status, {}))
    with pytest.raises(TinychatError, match=line):
        cache.pull(model(server.url("/m")))
    assert len(server.requests) == 1 and leftovers() == []


def test_redirects_and_a_loop(server: Server, good: bytes) -> None:
    server.files |= {
        "/m": File(always=(302, {"Location": "/n"})),
        "/n": File(good),
        "/l": File(always=(302, {"Location": "/l"})),
    }
    assert cache.pull(model(server.url("/m"))).read_bytes() == good
    with pytest.raises(TinychatError, match="redirects"):
        cache.pull(model(server.url("/l")))
    server.files["/f"] = File(always=(302, {"Location": "file:///etc/passwd"}))
    with pytest.raises(TinychatError, match=r"/f: .*protocol"):
        cache.pull(model(server.url("/f")))


@pytest.mark.parametrize("body", [b"<!DOCTYPE html><p>log in first", b"GG", b""])
def test_what_is_no_gguf_is_refused_at_once(server: Server, body: bytes) -> None:
    server.files["/m"] = File(body)
    with pytest.raises(TinychatError, match=r"not a GGUF|empty"):
        cache.pull(model(server.url("/m")))
    assert leftovers() == []


def test_a_long_page_is_not_downloaded_to_the_end(server: Server) -> None:
    sent: list[int] = []
    server.files["/m"] = File(b"<!DOCTYPE html>" * 1_000_000, pace=sent.append)
    with pytest.raises(TinychatError, match=r"/m: not a GGUF file \(it begins with b'<!DO'\)"):
        cache.pull(model(server.url("/m")))
    assert max(sent) < 5_000_000 and leftovers() == []


def test_an_encoded_body_is_refused(server: Server, good: bytes) -> None:
    server.files["/m"] = File(gzip.compress(good), headers={"Content-Encoding": "gzip"})
    with pytest.raises(TinychatError, match="gzip-encoded"):
        cache.pull(model(server.url("/m")))


def test_a_wrong_hash_is_refused_and_nothing_kept(server: Server, good: bytes) -> None:
    server.files["/m"] = File(good)
    with pytest.raises(TinychatError, match=r"/m: damaged or not the expected file"):
        cache.pull(model(server.url("/m"), "0" * 64))
    assert leftovers() == []


def test_the_next_source_helps_out(server: Server, good: bytes) -> None:
    server.files["/n"] = File(good)
    two = Model("test:2b", (server.url("/gone"), server.url("/n")))
    assert cache.pull(two).read_bytes() == good
    assert cache.path_of(two) == cache.downloads_dir() / cache.key_of(server.url("/n"))


def test_no_network() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with pytest.raises(TinychatError, match=r"cannot connect .*; check the network"):
        cache.pull(model(f"http://127.0.0.1:{port}/m"))
    assert leftovers() == []


def test_a_server_that_goes_silent(server: Server, good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 1.0)
    again = threading.Event()

    def pace(sent: int) -> None:  # silent until it is asked a second time
        if sent > 100_000 and len(server.requests) == 1:
            again.wait(3)

    server.files["/m"] = File(good, pace=pace)
    assert cache.pull(model(server.url("/m"))).read_bytes() == good
    again.set()
    assert len(server.requests) >= 2


def test_stopping_while_it_waits_to_try_again(server: Server) -> None:
    due = time.time() + 60
    server.files["/m"] = File(always=(503, {"Retry-After": "60"}))
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(DownloadStopped):
        cache.pull(model(server.url("/m")), stop=stop)
    assert time.time() < due


def test_one_part_of_a_split_model_is_refused(server: Server) -> None:
    with pytest.raises(TinychatError, match="part 2 of 3"):
        cache.pull(model(server.url("/x-00002-of-00003.gguf")))
    assert server.requests == []


# The hub


@pytest.fixture
def hub(server: Server, good: bytes, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A stand-in for the hub: it states hash and size, and redirects to a storage on another host."""
    linked = {"X-Linked-ETag": f'"{hashlib.sha256(good).hexdigest()}"', "Location": server.url("/storage", "localhost")}
    server.files |= {
        "/a/b/resolve/main/m.gguf": File(always=(302, linked)),
        "/storage": File(good, etag='"of the storage"'),
    }
    monkeypatch.setenv("HF_ENDPOINT", server.url("/"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return server


HUB_FILE = "https://huggingface.co/a/b/resolve/main/m.gguf"


def test_a_mirror_serves_and_the_cache_goes_by_the_hubs_url(hub: Server, good: bytes) -> None:
    path = cache.pull(model(HUB_FILE))
    assert path.read_bytes() == good and path.name == hashlib.md5(HUB_FILE.encode()).hexdigest()


def test_the_token_goes_to_the_hub_and_nowhere_else(hub: Server, good: bytes) -> None:
    cache.pull(model(HUB_FILE))
    hub.files["/m"] = File(good)
    cache.pull(model(hub.url("/m")))
    asked, redirected, elsewhere = hub.requests
    assert asked.headers["authorization"] == "Bearer hf_secret"
    assert "authorization" not in redirected.headers and "authorization" not in elsewhere.headers


def test_the_hash_that_the_hub_states_is_checked(hub: Server, other: bytes) -> None:
    hub.files["/storage"].data = other
    with pytest.raises(TinychatError, match="damaged or not the expected"):
        cache.pull(model(HUB_FILE))
    assert leftovers() == []


def test_a_file_replaced_on_the_hub_is_not_downloaded(hub: Server) -> None:
    with pytest.raises(TinychatError, match="publisher has replaced"):
        cache.pull(model(HUB_FILE, "0" * 64))
    assert leftovers() == []


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_file_names_the_way_out(hub: Server, status: int) -> None:
    hub.files["/a/b/resolve/main/m.gguf"] = File(always=(status, {}))
    with pytest.raises(TinychatError, match=f"{status}.*licence.*HF_TOKEN") as e:
        cache.pull(model(HUB_FILE))
    assert "hf_secret" not in str(e.value)


def test_a_proxy_is_used(server: Server, good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/m"] = File(good)
    monkeypatch.setenv("HTTP_PROXY", server.url(""))
    assert cache.pull(model("http://models.invalid/m")).read_bytes() == good
    assert server.requests[0].path == "http://models.invalid/m"


def test_passwords_and_signatures_stay_out_of_messages(server: Server) -> None:
    with pytest.raises(TinychatError) as e:
        cache.pull(model(f"http://me:secret@127.0.0.1:{server.server_port}/x?signature=secret"))
    assert "secret" not in str(e.value) and "/x" in str(e.value)


# The header alone


@pytest.mark.parametrize("ranges", [True, False])
def test_a_remote_header_is_read_without_the_rest(server: Server, tmp_path: Path, ranges: bool) -> None:
    data = make_gguf(tmp_path / "big.gguf", size=20_000_000)
    sent: list[int] = []
    server.files["/m"] = File(data, ranges=ranges, pace=sent.append)
    with remote_header(server.url("/m")) as path:
        header = GGUF.open(path)
        assert header.tensors["blk.0.noise"].shape == (20_000_000,)
        assert header.metadata["tokenizer.ggml.tokens"][-1] == "word199"
        assert header.nbytes == len(data)
    assert max(sent) < 10_000_000 and not path.exists()


def test_a_long_remote_header(server: Server, tmp_path: Path) -> None:
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"a rather long token number {i}" for i in range(60_000)])
    writer.add_tensor("t", np.zeros(3_000_000, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    server.files["/m"] = File((tmp_path / "x.gguf").read_bytes())
    with remote_header(server.url("/m")) as path:
        assert GGUF.open(path).metadata["tokenizer.ggml.tokens"][-1].endswith("59999")
    assert len(server.requests) == 2


@pytest.mark.parametrize("body", [b"<!DOCTYPE html>" * 100, b"GGUF" + bytes(100)])
def test_a_remote_header_that_is_none(server: Server, body: bytes) -> None:
    server.files["/m"] = File(body)
    with pytest.raises(TinychatError, match="/m: "), remote_header(server.url("/m")):
        pass


# The disk


def test_too_little_space_is_said_before(server: Server, good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/m"] = File(good)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(TinychatError, match=r"30\d\.\d kB needed, 1\.0 kB free"):
        cache.pull(model(server.url("/m")))
    assert leftovers() == []


def test_a_disk_that_fills_up(server: Server, good: bytes, tmp_path: Path) -> None:
    """A file size limit fails writes half-way as a full disk does (and with EFBIG, which is treated the same)."""
    server.files["/m"] = File(good)
    script = f"""
import resource, sys
from tinychat.models import cache
from tinychat.errors import TinychatError
from tinychat.models.registry import Model
resource.setrlimit(resource.RLIMIT_FSIZE, (123_456, 123_456))
try: cache.pull(Model("test", ({server.url("/m")!r},)))
except TinychatError as e: print(e)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.startswith("no space left in") and said.count("\n") == 1
    assert partial_size() == 123_456
    server.requests.clear()
    assert cache.pull(model(server.url("/m"))).read_bytes() == good  # there is space again
    assert server.ranges == ["bytes=123456-"]


def test_a_full_device_says_the_same(tmp_path: Path) -> None:
    with pytest.raises(TinychatError, match="no space left"), download.disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_cannot_be_written(server: Server, good: bytes) -> None:
    server.files["/m"] = File(good)
    cache.downloads_dir().parent.mkdir(parents=True)
    cache.downloads_dir().write_text("a file where the folder should be")
    with pytest.raises(TinychatError, match="file exists"):
        cache.pull(model(server.url("/m")))
