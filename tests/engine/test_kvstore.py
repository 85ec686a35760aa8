"""KV caches on disk: the right rows or none, and no more work than there are new rows."""

import os
import stat
import struct
import subprocess
import sys
import threading
import time

import pytest

from tests.support.terminal import started
from tinychat.engine.kvstore import _HEADER, BLOCK, HALF_LIFE, KVStore

ROW = 100  # bytes of a token's rows
FILE = _HEADER.size + BLOCK * (4 + ROW)  # bytes of a whole block


def row(token, at):
    return struct.pack("<II", token, at) * (ROW // 8) + bytes(ROW % 8)


class Cache:
    """The rows of tokens, as an executor has them; counts what is read."""

    def __init__(self, tokens):
        self.tokens, self.reads = list(tokens), []

    def read(self, first, rows):
        self.reads.append((first, rows))
        return b"".join(row(t, first + i) for i, t in enumerate(self.tokens[first : first + rows]))


@pytest.fixture
def store(tmp_path):
    return KVStore(1_000_000, tmp_path / "kv")


def put(store, tokens, model="m", layout="cpu-1", **options):
    """What was read of the cache to save it, and the cost."""
    cache = Cache(tokens)
    cost = store.save(model, layout, cache.tokens, cache.read, **options)
    assert cost.rows == sum(rows for _, rows in cache.reads) or not cost.whole
    return cache.reads, cost


def got(store, ids, model="m", layout="cpu-1", **options):
    """How many tokens of `ids` come back; their rows are the right ones."""
    saved = store.best(model, layout, list(ids), **options)
    if saved is None:
        return 0
    usable = 0
    for block, rows in store.read(saved):
        assert rows == Cache([*[0] * block.first, *block.tokens]).read(block.first, len(block.tokens))
        usable = block.first + len(block.tokens)
        assert list(block.tokens[: saved.usable - block.first]) == list(ids)[block.first : min(usable, saved.usable)]
    return min(usable, saved.usable)


def files(store):
    return sorted(store.folder.iterdir())


def test_the_longest_beginning_comes_back(store):
    a, b = list(range(300)), [*range(150), *range(1000, 1100)]
    put(store, a)
    put(store, b)
    assert got(store, [*a, 7, 8]) == 300 and got(store, [*b[:200], 5]) == 200
    assert got(store, a[:100]) == 100 and got(store, a[: 2 * BLOCK]) == 2 * BLOCK  # a part of what is saved is enough
    assert got(store, [9, *a]) == 0 and got(store, []) == 0
    assert got(store, a[:10]) == 0  # not worth a read
    assert got(store, a, most=200) == 192 and got(store, a, most=50) == 0  # a smaller context takes whole blocks


def test_only_what_is_new_is_read_and_written(store):
    tokens = list(range(10 * BLOCK))
    assert len(put(store, tokens)[0]) == 10
    reads, cost = put(store, [*tokens, *range(5000, 5100)])
    assert reads == [(640, 64), (704, 36)] and cost.whole and cost.nbytes == 100 * ROW
    assert put(store, [*tokens, *range(5000, 5100)])[0] == []
    before = set(files(store))
    reads, _ = put(store, [*tokens, *range(5000, 5120)])  # the end has grown: it replaces the shorter one
    assert reads == [(704, 56)] and len(files(store)) == len(before)
    assert put(store, [*tokens, 1, 2, 3])[0] == []  # three tokens are not worth a file


def test_two_conversations_share_their_beginning_and_both_stay(store):
    system, a, b = list(range(200)), list(range(1000, 1300)), list(range(2000, 2300))
    put(store, [*system, *a], tag="a")
    reads, _ = put(store, [*system, *b], tag="b")
    assert reads[0] == (192, 64)  # of the shared beginning only the block in which they part
    for _ in range(3):
        assert got(store, [*system, *a]) == 500 == got(store, [*system, *b])


def test_another_model_or_layout_gets_nothing(store):
    put(store, range(100))
    assert got(store, range(100), model="n") == 0 == got(store, range(100), layout="cpu-2")
    assert got(store, range(100)) == 100


def test_forgetting_a_conversation_deletes_its_tokens_at_once(store):
    put(store, range(100), tag="mine")
    put(store, range(1000, 1100), tag="other")
    (store.folder / f"tmp-{files(store)[0].stem[-16:]}-x").write_bytes(b"")  # of a process that was killed
    ids = struct.pack("<4i", 70, 71, 72, 73)
    assert any(ids in p.read_bytes() for p in files(store))
    assert store.forget("mine") > 100 * ROW
    assert not any(ids in p.read_bytes() for p in files(store))
    assert got(store, range(100)) == 0 and got(store, range(1000, 1100)) == 100
    assert store.usage()[0] == 2 and store.clear() > 0 and store.usage() == (0, 0) and files(store) == []


def test_what_is_written_is_private(store):
    old = os.umask(0)
    try:
        put(store, range(100))
    finally:
        os.umask(old)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in files(store)} == {0o600}


def test_the_budget_holds_and_the_coldest_goes_first(store):
    store.budget = 6 * FILE
    for n in range(3):
        put(store, [n] * (2 * BLOCK))
    for _ in range(2):
        assert got(store, [0] * 2 * BLOCK) == got(store, [2] * 2 * BLOCK) == 2 * BLOCK
    put(store, [9] * (2 * BLOCK))  # 1 was never read since
    assert [got(store, [n] * 2 * BLOCK) // BLOCK for n in (0, 1, 2, 9)] == [2, 0, 2, 2]
    assert sum(p.stat().st_size for p in files(store)) <= store.budget
    _, cost = put(store, [5] * (9 * BLOCK))  # does not fit at all: as much as does
    assert not cost.whole and cost.rows == 6 * BLOCK and got(store, [5] * 9 * BLOCK) == 6 * BLOCK
    store.budget = 0
    assert not put(store, [4] * 100)[1].whole


def test_hits_cool_with_time(store, monkeypatch):
    store.budget, real = 3 * FILE, time.time
    put(store, [1] * BLOCK)
    for _ in range(5):
        got(store, [1] * BLOCK)
    monkeypatch.setattr(time, "time", lambda: real() + 10 * HALF_LIFE)
    put(store, [2] * BLOCK)
    put(store, [3] * BLOCK)
    put(store, [4] * BLOCK)  # five hits ten half-lives ago weigh less than none just now
    assert [got(store, [n] * BLOCK) // BLOCK for n in (1, 2, 3, 4)] == [0, 1, 1, 1]
    monkeypatch.setattr(time, "time", real)  # a clock that was set back harms nothing
    put(store, [5] * BLOCK)
    assert store.usage()[0] == 3 and got(store, [5] * BLOCK) == BLOCK


def test_saving_ends_between_blocks_and_goes_on_later(store):
    tokens, stop = list(range(10 * BLOCK)), threading.Event()
    assert put(store, tokens, seconds=-1)[1].rows == 0
    stop.set()
    assert put(store, tokens, stop=stop)[1].rows == 0
    stop.clear()
    cache = Cache(tokens)

    def read(first, rows):
        if first == 3 * BLOCK:
            stop.set()
        return cache.read(first, rows)

    cost = store.save("m", "cpu-1", tokens, read, stop=stop)
    assert cost.rows == 4 * BLOCK and not cost.whole and got(store, tokens) == 4 * BLOCK
    assert put(store, tokens)[1].rows == 6 * BLOCK and got(store, tokens) == 640


@pytest.mark.parametrize("where", ["magic", "token", "row", "end", "short", "long", "empty", "text", "renamed"])
def test_damage_is_never_trusted(store, where):
    tokens = list(range(3 * BLOCK))
    put(store, tokens)
    path = store.best("m", "cpu-1", tokens).blocks[1].path
    data = bytearray(path.read_bytes())
    if where in ("magic", "token", "row", "end"):
        data[{"magic": 3, "token": _HEADER.size + 4, "row": _HEADER.size + 4 * BLOCK + 7, "end": -1}[where]] ^= 1
    new = {"short": data[:-1], "long": data + b"x", "empty": b"", "text": b"[1]\n" * 900}.get(where, data)
    if where == "renamed":  # the block of another place under this one's name
        new = store.best("m", "cpu-1", tokens).blocks[2].path.read_bytes()
    path.write_bytes(new)
    assert got(store, tokens) == BLOCK and not path.exists()
    assert put(store, tokens)[0] == [(BLOCK, BLOCK)] and got(store, tokens) == 3 * BLOCK


def test_a_foreign_file_goes_and_what_is_no_cache_stays_a_while(store):
    put(store, range(100))
    for name in ("0123.kv", "tmp-left"):
        (store.folder / name).write_bytes(b"x")
    os.utime(store.folder / "tmp-left", (time.time() - 7200,) * 2)
    (store.folder / "tmp-new").write_bytes(b"x")
    put(store, range(1000, 1100))
    assert {p.name for p in files(store) if p.suffix != ".kv"} == {"tmp-new"} and store.usage()[0] == 4


def test_a_file_that_vanishes(store):
    put(store, range(100))
    found = store.best("m", "cpu-1", range(100))
    store.clear()
    assert list(store.read(found)) == [] and store.best("m", "cpu-1", range(100)) is None


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "f").write_text("")
    store = KVStore(1_000_000, tmp_path / "f" / "kv")
    assert not put(store, range(100))[1].whole and store.best("m", "cpu-1", range(100)) is None and store.clear() == 0


FULL = """
import resource, signal, sys
from pathlib import Path
from tinychat.engine.kvstore import KVStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
store = KVStore(10**9, Path(sys.argv[1]))
cost = store.save("m", "cpu-1", list(range(128)), lambda first, rows: bytes(rows * (1000 if first == 0 else 10_000)))
print(cost.rows, cost.whole)
"""


def test_a_full_disk_keeps_what_was_whole(store):
    ran = subprocess.run([sys.executable, "-c", FULL, str(store.folder)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["64", "False"] and len(files(store)) == 1
    assert store.best("m", "cpu-1", range(128)).usable == 64


WRITER = """
import sys
from pathlib import Path
from tinychat.engine.kvstore import KVStore
store = KVStore(10**9, Path(sys.argv[1]))
for n in range(10_000):
    store.save("m", "cpu-1", [n] * 64, lambda first, rows: bytes([n % 256]) * 3_000_000)
    print(n, flush=True)
"""


def test_kill_9_leaves_whole_files(store):
    with started([sys.executable, "-c", WRITER, str(store.folder)], stdout=subprocess.PIPE) as p:
        for _ in range(5):
            p.stdout.readline()
        p.kill()
    for n in range(5):
        found = store.best("m", "cpu-1", [n] * 64)
        assert [rows for _, rows in store.read(found)] == [bytes([n]) * 3_000_000]
