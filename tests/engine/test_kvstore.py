"""KV caches on disk: the right rows or none."""

import os
import subprocess
import sys
import time

import pytest

from tinychat.engine.kvstore import KVStore

ROW = 100  # bytes of a token's rows


def rows(tokens, salt=0):
    return bytes((t * 7 + salt) % 256 for t in tokens for _ in range(ROW))


@pytest.fixture
def store(tmp_path):
    return KVStore(1_000_000, tmp_path / "kv")


def put(store, tokens, model="m", layout="cpu-1", salt=0):
    return store.save(model, layout, tokens, rows(tokens, salt))


def got(store, ids, model="m", layout="cpu-1"):
    found = store.best(model, layout, ids)
    return found and (found.usable, store.read(found) == rows(found.tokens))


def test_the_longest_prefix_comes_back(store):
    a, b = list(range(50)), [*range(30), *range(100, 140)]
    assert put(store, a) and put(store, b)
    assert got(store, [*range(50), 7, 8]) == (50, True)
    assert got(store, [*range(30), 100, 101, 5]) == (32, True)
    assert got(store, list(range(20))) == (20, True)  # a part of what is saved is enough
    assert got(store, [9, *range(50)]) is None and got(store, []) is None
    assert got(store, list(range(10))) is None  # not worth a read


def test_a_long_file_is_not_read_for_a_few_tokens(store):
    put(store, [*range(20), *[5] * 2000])
    assert got(store, [*range(20), 6]) is None


def test_another_model_or_layout_gets_nothing(store):
    put(store, list(range(50)))
    assert got(store, list(range(50)), model="n") is None
    assert got(store, list(range(50)), layout="cpu-2") is None
    assert got(store, list(range(50))) == (50, True)


def test_a_longer_cache_replaces_its_beginnings(store):
    put(store, list(range(20)))
    put(store, list(range(40)))
    put(store, [*range(19), 99])
    assert len(list(store.folder.iterdir())) == 2
    put(store, list(range(40)), salt=1)
    assert len(list(store.folder.iterdir())) == 2 and store.read(store.best("m", "cpu-1", range(40))) == rows(
        range(40), 1
    )


def test_the_budget_holds_and_the_oldest_goes_first(store):
    store.budget = 12_000
    for n in range(3):
        assert put(store, [n] * 30)
        (file,) = [p for p in store.folder.iterdir() if store.best("m", "cpu-1", [n] * 30).path == p]
        os.utime(file, (1000 + n, 1000 + n))
    assert got(store, [0] * 30) == (30, True)  # used now: so the second one is the oldest
    assert put(store, [9] * 30)
    assert [bool(got(store, [n] * 30)) for n in (0, 1, 2, 9)] == [True, False, True, True]
    assert sum(p.stat().st_size for p in store.folder.iterdir()) <= store.budget
    assert not put(store, [5] * 200) and got(store, [9] * 30)  # does not fit at all: nothing is thrown out for it
    store.budget = 0
    assert not put(store, [4] * 30)


@pytest.mark.parametrize("where", ["magic", "token", "row", "end", "short", "long", "empty", "header"])
def test_damage_is_never_trusted(store, where):
    tokens = list(range(50))
    put(store, tokens)
    (file,) = store.folder.iterdir()
    data = bytearray(file.read_bytes())
    start = data.index(b"\n") + 1
    if where in ("magic", "token", "row", "end"):
        data[{"magic": 12, "token": start + 4 * 45, "row": start + 200 + 17, "end": len(data) - 1}[where]] ^= 1
    new = {"short": data[:-1], "long": data + b"x", "empty": b"", "header": b"[1]\n" + data[start:]}.get(where, data)
    file.write_bytes(new)
    found = store.best("m", "cpu-1", tokens)
    assert found is None or store.read(found) is None
    assert found is None or not file.exists()
    assert put(store, tokens) and got(store, tokens) == (50, True)


def test_a_file_that_vanishes(store):
    put(store, list(range(50)))
    found = store.best("m", "cpu-1", range(50))
    assert store.clear() > 50 * ROW
    assert store.read(found) is None and store.best("m", "cpu-1", range(50)) is None


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "f").write_text("")
    store = KVStore(1_000_000, tmp_path / "f" / "kv")
    assert not put(store, list(range(50))) and store.best("m", "cpu-1", range(50)) is None and store.clear() == 0


WRITER = """
import sys
from pathlib import Path
from tinychat.engine.kvstore import KVStore
store = KVStore(10**9, Path(sys.argv[1]))
for n in range(10_000):
    store.save("m", "cpu-1", [n] * 64, bytes([n % 256]) * 3_000_000)
    print(n, flush=True)
"""


def test_kill_9_leaves_whole_files_and_what_it_left_is_swept(store):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(store.folder)], stdout=subprocess.PIPE) as p:
        for _ in range(5):
            p.stdout.readline()
        p.kill()
    store.budget = 10**9
    for n in range(5):
        found = store.best("m", "cpu-1", [n] * 64)
        assert found and store.read(found) == bytes([n]) * 3_000_000
    left = store.folder / "a.kv.tmp-left"
    left.write_bytes(b"x")
    os.utime(left, (time.time() - 7200,) * 2)
    put(store, list(range(50)))
    assert not left.exists()
