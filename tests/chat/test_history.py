"""Conversations on disk: what comes back, what a kill leaves, what several processes do to one file."""

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.terminal import started
from tinychat.chat.conversation import Attachment, Conversation, Turn
from tinychat.chat.history import ChangedElsewhere, History
from tinychat.chat.parameters import Parameters, set_parameter
from tinychat.errors import TinychatError


@pytest.fixture
def file(tmp_path):
    return tmp_path / "data" / "history.db"


def talk(*texts, **kw):
    return Conversation(tuple(Turn(("user", "assistant")[i % 2], t) for i, t in enumerate(texts)), **kw)


def test_a_conversation_comes_back_as_it_was(file):
    h = History(file)
    turn = Turn(
        "assistant",
        "b",
        "hm",
        thinking_open=True,
        stop_reason="stopped",
        stats={"decode_tok_s": 3.5},
        files=(Attachment("x.py", "x = 1"),),
        prefix=1,
    )
    c = Conversation((Turn("user", "a"), turn), "m", set_parameter(Parameters(system="s"), "top_k", "7"), "n")
    c = replace(c, first=1, send_thinking=False)
    h.save(c)
    h.close()
    assert History(file).load(c.id) == c


def test_only_what_changed_is_written_and_it_is_enough(file):
    h = History(file)
    c = talk("a", "b", "c")
    for step in (
        c,
        c.add(Turn("assistant", "x")),
        c.add(Turn("assistant", "x y")),
        c.edit(2, "C"),
        c.cut(1),
        replace(c, first=2),
    ):
        h.save(step)
        assert History(file).load(c.id).turns == step.turns
    h.save(c.add(Turn("assistant", "d")))
    before = h._db.total_changes
    h.save(c.add(Turn("assistant", "d e")))
    assert h._db.total_changes - before <= 3  # head, the old last turn out, the new one in


def test_a_growing_answer_in_a_long_conversation_stays_cheap(file):
    h = History(file)
    c = Conversation(tuple(Turn("user", f"turn {i}") for i in range(10_000)))
    h.save(c)
    before = h._db.total_changes
    for i in range(10):
        c = c.with_last(Turn("assistant", "word " * i))
        h.save(c)
    assert h._db.total_changes - before <= 3 * 10  # rows: of 10,000 turns only the last is written again
    assert h.load(c.id).turns[-1].text == "word " * 9


def test_what_has_no_turns_is_not_kept(file):
    h = History(file)
    h.save(Conversation(name="empty"))
    assert h.find() == []


def test_list_is_by_latest_change(file):
    h = History(file)
    a, b = talk("first question", "yes", model="m"), talk("second\nquestion")
    h.save(a)
    h.save(b)
    assert [(s.title, s.turns, s.model) for s in h.find()] == [("second question", 1, ""), ("first question", 2, "m")]
    h.save(a.add(Turn("user", "more")))
    assert [s.id for s in h.find()] == [a.id, b.id] and h.find()[0].created == a.created
    assert [s.id for s in h.find(limit=1)] == [a.id]


def test_search_in_turns_and_names(file):
    h = History(file)
    a = talk("Wie spät ist es in ÄGYPTEN?", "Der latente Rang", "x" * 200 + " MLA needle " + "y" * 200)
    b = talk("注意力机制 100%", 'quo\'te "double" _under')
    h.save(a)
    h.save(b)
    h.rename(b.id, "Große Notizen")
    for words, ids in [
        ("ägypten", [a.id]),
        ("LATENTE rang", [a.id]),
        ("rang needle", []),
        ("机制", [b.id]),
        ("100%", [b.id]),
        ("_under", [b.id]),
        ("'te \"dou", [b.id]),
        ("GROSSE", [b.id]),
        ("nothing", []),
        (" ", [b.id, a.id]),
    ]:
        assert [s.id for s in h.find(words)] == ids, words
    snippet = h.find("needle")[0].snippet
    assert "MLA needle yyy" in snippet and snippet.startswith("…") and len(snippet) < 120
    assert h.find("große")[0].snippet == ""
    c = talk("ß" * 100 + "İ The Needle" + "ß" * 100)  # letters that fold to two
    h.save(c)
    snippet = next(s.snippet for s in h.find("needle") if s.id == c.id)
    assert snippet == "…" + "ß" * 24 + "İ The Needle" + "ß" * 54


def test_the_latest_of_a_title_among_many_with_its_words(file):
    h = History(file)
    for c in (
        talk("my talk", id="first"),
        talk("x", name="My Talk", id="named"),
        talk("my talk of cats"),
        talk("x", "my talk"),
    ):
        h.save(c)
    assert h.titled("my talk") == "named" and h.titled("talk") == h.titled("") == ""
    h.rename("named", "another")
    assert h.titled("MY TALK") == "first"


def test_rename_survives_the_saves_that_follow(file):
    h = History(file)
    c = talk("a")
    h.save(c)
    h.rename(c.id, " my \n talk ")
    h.save(c.add(Turn("assistant", "b")))
    assert h.find()[0].title == "my talk" and h.load(c.id).name == "my talk"
    h.save(c.rename("mine"))
    h.save(c.rename("mine").add(Turn("assistant", "b")))
    assert h.load(c.id).name == "mine"
    h.rename(c.id, "")
    assert h.find()[0].title == "a"


def test_delete(file):
    h = History(file)
    a, b = talk("a"), talk("b")
    h.save(a)
    h.save(b)
    h.delete(a.id)
    assert [s.id for s in h.find()] == [b.id]
    assert h._db.execute("SELECT count(*) FROM turns").fetchone() == (1,)
    with pytest.raises(TinychatError):
        h.load(a.id)
    h.save(a.add(Turn("assistant", "still open in the app")))
    assert len(h.load(a.id).turns) == 2


def test_text_that_no_utf8_can_carry(file):
    h = History(file)
    h.save(talk("a\ud800b", name="\udcff"))
    h.add_prompt("\ud800")
    assert h.find("\ud800")[0].title == "\ufffd" and h.prompts() == ["\ufffd"]


def test_prompts(file):
    h = History(file)
    for text in ("a", "b\nc", "  ", "a"):
        h.add_prompt(text)
    assert History(file).prompts() == ["b\nc", "a"]
    for i in range(1100):
        h.add_prompt(str(i))
    assert len(h.prompts()) == 1000 and h.prompts()[-1] == "1099"


WRITER = """
import sys
from pathlib import Path
from tinychat.chat.history import ChangedElsewhere, History
from tinychat.chat.conversation import Attachment, Conversation, Turn
h, c = History(Path(sys.argv[1])), Conversation((Turn("user", "q"), Turn("assistant", "")), id=sys.argv[2])
for i in range(1, 100_000):
    c = c.with_last(Turn("assistant", "w " * i))
    h.save(c)
    print(i, flush=True)
"""


def test_kill_9_loses_nothing_that_was_saved(file):
    for n in range(3):
        with started([sys.executable, "-c", WRITER, str(file), f"c{n}"], stdout=subprocess.PIPE) as p:
            for _ in range(20 + 17 * n):
                said = int(p.stdout.readline())
            os.kill(p.pid, signal.SIGKILL)
        h = History(file)
        assert not h.problem
        words = len(h.load(f"c{n}").turns[1].text.split())
        assert words >= said
        assert h._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        h.close()
    assert len(History(file).find()) == 3


MANY = """
import sys
from pathlib import Path
from tinychat.chat.history import ChangedElsewhere, History
from tinychat.chat.conversation import Attachment, Conversation, Turn
from tinychat.chat.saving import patiently
h = History(Path(sys.argv[1]))
for i in range(50):
    patiently(lambda: h.save(Conversation((Turn("user", f"{sys.argv[2]} {i}"),))))
    patiently(lambda: h.add_prompt(f"{sys.argv[2]} {i}"))
"""


def test_several_processes_at_once_on_a_new_file(file):
    jobs = [subprocess.Popen([sys.executable, "-c", MANY, str(file), str(n)], stderr=subprocess.PIPE) for n in range(3)]
    assert [(p.communicate()[1], p.returncode) for p in jobs] == [(b"", 0)] * 3
    h = History(file)
    assert len(h.find()) == 150 and len(h.prompts()) == 150


def test_two_instances_on_one_conversation_never_overwrite_each_other(file):
    one, two = History(file), History(file)
    c = talk("a", "b")
    one.save(c)
    two.save(two.load(c.id).add(Turn("user", "other")))
    for _ in range(2):
        with pytest.raises(ChangedElsewhere):
            one.save(c.add(Turn("user", "mine")))
    assert [t.text for t in one.load(c.id).turns] == ["a", "b", "other"]
    one.save(one.load(c.id).add(Turn("assistant", "both")))
    with pytest.raises(ChangedElsewhere):
        two.save(c)
    two.delete(c.id)
    one.save(c)  # still open in the app
    assert len(two.load(c.id).turns) == 2


def test_a_damaged_file_is_moved_aside(file):
    file.parent.mkdir()
    file.write_bytes(b"this is no database" * 100)
    h = History(file)
    (aside,) = file.parent.glob("history.db.damaged-*")
    assert str(aside) in h.problem and "\n" not in h.problem and aside.read_bytes().startswith(b"this is no")
    h.save(talk("a"))
    assert len(History(file).find()) == 1


def test_damage_found_later_is_one_line_and_the_next_save_works(file):
    h = History(file)
    c = talk(*["text " * 2000] * 20)
    h.save(c)
    h.close()
    data = bytearray(file.read_bytes())
    for page in range(4096 * 3, len(data), 4096):
        data[page : page + 4096] = b"\xa5" * 4096
    file.write_bytes(data)
    h = History(file)
    if not h.problem:
        with pytest.raises(TinychatError) as e:
            h.load(c.id)
        assert "damaged" in str(e.value) and "\n" not in str(e.value)
    h.save(c)
    assert History(file).load(c.id).turns == c.turns


def test_a_record_that_is_no_conversation(file):
    h = History(file)
    c = talk("a")
    h.save(c)
    for data in ("{", json.dumps({"role": "root"})):
        h._db.execute("UPDATE turns SET data = ?", (data,))
        with pytest.raises(TinychatError):
            h.load(c.id)
    h.save(replace(c, turns=(Turn("user", "again"),)))
    assert h.load(c.id).turns[0].text == "again"


def test_a_newer_file_is_left_alone(file):
    History(file).close()
    db = sqlite3.connect(file)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(TinychatError, match="newer"):
        History(file)
    assert [p.name for p in file.parent.iterdir() if "damaged" in p.name] == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(TinychatError):
        History(tmp_path / "f" / "history.db")


def test_a_full_disk_or_locked_file_is_one_line(file, monkeypatch):
    monkeypatch.setattr("tinychat.chat.history._BUSY", 0.1)
    h = History(file)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(TinychatError, match="locked"):
        h.save(talk("a"))
    other.execute("COMMIT")
    h.save(talk("a"))
    assert len(h.find()) == 1


def test_what_is_written_is_private(tmp_path):
    file = tmp_path / "data" / "history.db"
    h = History(file)
    h.save(talk("a", "b"))
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in file.parent.iterdir()} == {0o600}
    h.close()
    file.chmod(0o644)  # as earlier versions left it
    History(file).close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_versions_are_saved_found_and_come_back(file):
    h = History(file)
    c = Conversation((Turn("user", "old question"), Turn("assistant", "old answer")))
    h.save(c)
    edited = c.edit(0, "new question").add(Turn("assistant", "new answer"))
    h.save(edited)
    h.save(edited.regenerate().add(Turn("assistant", "third")))
    h.close()
    h = History(file)
    read = h.load(c.id)
    assert [t.text for t in read.turns] == ["new question", "third"]
    assert [t.text for t in read.switch(0, -1).turns] == ["old question", "old answer"]
    (found,) = h.find("old answer")
    assert found.turns == 2 and "old answer" in found.snippet
    h.save(read.switch(0, -1))
    h.close()
    assert [t.text for t in History(file).load(c.id).versions(0)] == ["old question", "new question"]
