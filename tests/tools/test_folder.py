"""Nothing leaves the folder: names, links, and what changes while it is being read."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tinychat.errors import TinychatError
from tinychat.tools.folder import Folder, Missing

SECRET = b"outside"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_bytes(SECRET)
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_bytes(b"alpha\n")
    (tmp_path / "in" / "sub" / "b.txt").write_bytes(b"beta\n")
    return Folder(tmp_path / "in")


@pytest.mark.parametrize("name", ["a.txt", "./a.txt", "sub/../a.txt", "sub//b.txt", "/{}/a.txt", "/{}/sub/./b.txt"])
def test_paths_inside(folder: Folder, name: str) -> None:
    name = name.format(str(folder.path)[1:])
    if ".." in name:
        with pytest.raises(TinychatError, match=r"'\.\.'"):
            folder.read(name)
    else:
        assert folder.read(name) in (b"alpha\n", b"beta\n")


@pytest.mark.parametrize(
    "name",
    ["../outside/secret.txt", "/etc/passwd", "sub/../../outside/secret.txt", "..", "/", "a\0b", "\ud800\udfff", ""],
)
def test_paths_outside_and_paths_that_are_none(folder: Folder, name: str) -> None:
    with pytest.raises(TinychatError):
        folder.read(name)
    with pytest.raises(TinychatError):
        folder.replace(name, b"x", None)
    assert (folder.path.parent / "outside" / "secret.txt").read_bytes() == SECRET
    assert sorted(os.listdir(folder.path)) == ["a.txt", "sub"]


@pytest.mark.parametrize(
    ("name", "target"), [("link.txt", "../outside/secret.txt"), ("dir", "../outside"), ("abs", "/"), ("self", "a.txt")]
)
def test_links_are_not_followed(folder: Folder, name: str, target: str) -> None:
    (folder.path / name).symlink_to(target)
    below = f"{name}/secret.txt" if name in ("dir", "abs") else name
    with pytest.raises(TinychatError, match="symbolic links are not followed"):
        folder.read(below)
    with pytest.raises(TinychatError, match="symbolic links are not followed"):
        folder.replace(below, b"x", None)
    assert (name, "link", 0) in folder.entries("")
    assert [path for path, _ in folder.walk() if path.startswith(f"{name}/")] == []
    assert (folder.path.parent / "outside" / "secret.txt").read_bytes() == SECRET


def test_what_is_no_regular_file_is_not_opened_for_ever(folder: Folder) -> None:
    os.mkfifo(folder.path / "pipe")
    with pytest.raises(TinychatError, match="no regular file"):
        folder.read("pipe")
    with pytest.raises(TinychatError, match="is a directory"):
        folder.read("sub")
    with pytest.raises(TinychatError, match="more than 3 bytes"):
        folder.read("a.txt", 3)
    with pytest.raises(Missing):
        folder.read("none.txt")


def _swap(path: Path, other: Path, stop: threading.Event, times: list[int]) -> None:
    """Replaces `path` by a link to `other`, and back, until `stop`."""
    aside, link = path.with_name("aside"), path.with_name("link")

    def put(what: Path) -> None:
        while what.is_symlink() or what.exists():
            try:
                what.rename(path)
            except OSError:  # a writer has made the directory that was gone for a moment
                shutil.rmtree(path, ignore_errors=True)

    link.symlink_to(other)
    while not stop.is_set():
        path.rename(aside)
        put(link)
        path.rename(link)
        put(aside)
        times.append(1)


def _race(path: Path, other: Path, step: Callable[[int], bytes | None]) -> set[bytes | None]:
    """What `step` gave while another thread swapped `path` for a link to `other` some hundred times, and until it gave
    something: how often it meets the directory is up to the scheduler."""
    stop, times, seen, tries = threading.Event(), list[int](), set[bytes | None](), 0
    thread = threading.Thread(target=_swap, args=(path, other, stop, times), daemon=True)
    thread.start()
    while tries < 1000 or (thread.is_alive() and tries < 1_000_000 and (len(times) < 200 or seen == {None})):
        tries += 1
        try:
            seen.add(step(tries))
        except TinychatError:
            seen.add(None)
    assert thread.is_alive()
    stop.set()
    thread.join()
    return seen


def test_a_directory_that_becomes_a_link_while_it_is_read(folder: Folder) -> None:
    (folder.path / "sub" / "secret.txt").write_bytes(b"inside")
    seen = _race(folder.path / "sub", folder.path.parent / "outside", lambda _: folder.read("sub/secret.txt"))
    assert b"inside" in seen and SECRET not in seen


def test_a_directory_that_becomes_a_link_while_it_is_written(folder: Folder) -> None:
    def write(n: int) -> bytes:
        folder.replace(f"sub/{n}.txt", b"x", None)
        return b"written"

    assert b"written" in _race(folder.path / "sub", folder.path.parent / "outside", write)
    assert os.listdir(folder.path.parent / "outside") == ["secret.txt"]


def test_a_folder_that_is_moved_stays_the_same_folder(folder: Folder) -> None:
    folder.path.rename(folder.path.parent / "moved")
    folder.path.symlink_to(folder.path.parent / "outside")
    assert folder.read("a.txt") == b"alpha\n"
    with pytest.raises(TinychatError):
        folder.read("secret.txt")


def test_writing_is_whole_keeps_the_mode_and_notices_a_change(folder: Folder) -> None:
    script = folder.path / "a.txt"
    script.chmod(0o750)
    folder.replace("a.txt", b"new", b"alpha\n")
    assert script.read_bytes() == b"new" and script.stat().st_mode & 0o777 == 0o750
    with pytest.raises(TinychatError, match="changed since"):
        folder.replace("a.txt", b"newer", b"alpha\n")
    with pytest.raises(TinychatError, match="changed since"):
        folder.replace("a.txt", b"newer", None)
    folder.replace("x/y/z.txt", b"deep", None)
    assert (folder.path / "x/y/z.txt").read_bytes() == b"deep"
    assert sorted(path for path, kind in folder.walk() if kind == "file") == ["a.txt", "sub/b.txt", "x/y/z.txt"]


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    for name in ("f", "none"):
        with pytest.raises(TinychatError):
            Folder(tmp_path / name)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_is_no_path(name: str) -> None:
    with pytest.raises(TinychatError, match="can be no path"):
        Folder(Path(name))
