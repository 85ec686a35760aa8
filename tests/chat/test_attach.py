"""@file in a message: what is found, what is attached; names that no file can have are never an exception."""

import subprocess

import pytest

from tinychat.chat import attach
from tinychat.chat import file_finder as finder
from tinychat.chat.attach import attachments
from tinychat.chat.file_finder import Finder, complete
from tinychat.errors import TinychatError
from tinychat.models.registry import resolve
from tinychat.ui.chat.screen import file_choice


@pytest.mark.parametrize(
    "name", ["~nosuchuser", "x" * 256, "y" * 5000, "a/" * 3000 + "b", "a\0b", "a\0/b", "@", "~", "\ud800"]
)
def test_a_word_that_is_no_file_is_left_alone(name, tmp_path):
    if name != "~":
        assert attachments(f"mail me @{name} now", tmp_path) == ()
    assert isinstance(complete(name, tmp_path), list)


@pytest.mark.parametrize("name", ["~nosuchuser/x", "./" + "x" * 256 + "/y", "./" + "a/" * 3000 + "b", "./a\0/b", "~"])
def test_a_path_that_cannot_be_read_is_one_line(name, tmp_path):
    with pytest.raises(TinychatError) as e:
        attachments(f"see @{name}", tmp_path)
    assert "\n" not in str(e.value)
    assert complete(f"{name}/", tmp_path) == [] or name == "~"


@pytest.mark.parametrize("name", ["~nosuchuser/x.gguf", "http://[::1/x.gguf"])
def test_a_model_that_cannot_be_named_so(name):
    with pytest.raises(TinychatError):
        resolve(name)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("README.md", "src/chat/screen.py", "src/chat/scanner.py", "src/my notes/a.txt", "src/logo.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}")
    for name in (".git/HEAD", "node_modules/x/index.js", ".env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("noise")
    (tmp_path / "src/data").write_bytes(b"\0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_letters_of_a_path_find_it(tree, monkeypatch):
    found = Finder()
    assert found.find("src") == ["src/"], "before the first look, the folder itself"
    assert found.due() and not found.due()
    found.take(found.look())
    everything = found.find("")
    assert everything[0] == "README.md" and "src/chat/screen.py" in everything
    assert not {n for n in everything if "noise" in n or "node" in n or n.startswith(".") or n.endswith("png")}
    assert found.find("scr")[0] == "src/chat/screen.py" and found.find("scrn") == ["src/chat/screen.py"]
    assert found.find("chscr") == ["src/chat/screen.py", "src/chat/scanner.py"], "starts of words, then mere letters"
    assert found.find("src/")[:3] == ["src/", "src/chat/", "src/my notes/"], "the folder, then what is in it"
    assert found.find(".e") == [".env"] and found.find("node_modules/x/")[1:] == ["node_modules/x/index.js"]
    assert found.find(str(tree) + "/RE") == [f"{tree}/README.md"]
    found.take(["a" * 200 + "/"])
    assert found.find("a" * 30 + "b") == [], "tries no more than each letter of a name once"
    monkeypatch.setattr(finder, "NAMES", 3)
    assert len(list(finder.walk(tree))) == 3, "a huge tree is not walked to its end"


def test_what_git_ignores_is_left_out(tree):
    """Of a repository, with what is not committed yet; and no program that its configuration names is run."""

    def git(*argv):
        subprocess.run(["git", *argv], cwd=tree, check=True, capture_output=True)

    (tree / ".git" / "HEAD").unlink()
    git("init")
    git("add", "README.md")
    git("config", "core.fsmonitor", f"touch {tree}/run-by-git")
    (tree / ".gitignore").write_text("scanner.py\n/out/\n")
    (tree / "out").mkdir()
    (tree / "out" / "made.txt").write_text("made")
    names = list(finder.walk(tree))
    assert names[:2] == ["README.md", "node_modules/"], "nothing but .gitignore says what is noise here"
    assert "src/chat/screen.py" in names and "src/my notes/" in names
    assert not [n for n in names if "scanner" in n or n.startswith((".", "out/")) or n.endswith("png")]
    (tree / "README.md").unlink()
    assert next(finder.walk(tree)) == "node_modules/", "a deleted file is in the index, and nowhere else"
    assert list(finder.walk(tree / "src"))[:3] == ["data", "chat/", "my notes/"]
    assert list(finder.walk(tree / "out")) == ["made.txt"], "inside an ignored folder git says nothing"
    assert not (tree / "run-by-git").exists()


def test_a_folder_attaches_its_text_files(tree, monkeypatch):
    notes = []
    files = attachments('read @src/ and @"src/my notes/"', notes=notes)
    assert [f.name for f in files] == ["src/chat/scanner.py", "src/chat/screen.py", "src/my notes/a.txt"]
    assert files[0].text == "this is src/chat/scanner.py" and not notes
    monkeypatch.setattr(attach, "MAX_FILES", 2)
    assert len(attachments("@src/", notes=notes)) == 2
    assert notes == ["src/: 2 files attached, 1 left out (at most 2 files and 262.1 kB together)"]
    monkeypatch.setattr(attach, "MAX_BYTES", 10)
    for text, why in [("@src/", "no text file"), ("@src", "@src/ attaches"), ("@/", "too much"), ("@~/", "too much")]:
        with pytest.raises(TinychatError) as e:
            attachments(text)
        assert why in str(e.value)
    assert file_choice("src/my notes/", "src/m").insert == '@"src/my notes/'
    assert file_choice("src/my notes/", "src/my notes/").insert == '@"src/my notes/" '
