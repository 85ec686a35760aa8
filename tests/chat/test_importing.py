"""Exports of other programs, as they are and as somebody hostile would write them."""

import io
import json
import zipfile

import pytest

from tests.chat.test_conversation import sound
from tinychat.chat.history import History
from tinychat.chat.importing import read, take
from tinychat.errors import TinychatError


def node(id, parent, role=None, *parts, kind="text", **more):
    message = role and {"author": {"role": role}, "content": {"content_type": kind, "parts": list(parts)}, **more}
    return {id: {"id": id, "parent": parent, "message": message, "children": []}}


GPT = {
    "conversation_id": "abc",
    "title": "Latent\nrows",
    "create_time": 1700000000.5,
    "update_time": 1700000100.0,
    "current_node": "a3",
    "mapping": node("r", None)
    | node("s", "r", "system", "")
    | node("q1", "s", "user", "What is MLA?", create_time=1700000001)
    | node("t1", "q1", "assistant", kind="thoughts")
    | node("a1", "t1", "assistant", "A cache.", metadata={"model_slug": "gpt-4o"})
    | node("b1", "q1", "assistant", "Another answer.")
    | node("q2", "a1", "user", {"content_type": "image_asset_pointer"}, "And this?", kind="multimodal_text")
    | node("c", "q2", "assistant", "search(1)", recipient="web")
    | node("o", "c", "tool", "result")
    | node("a2", "o", "assistant", "First part.")
    | node("a3", "a2", "assistant", "Second part.")
    | node("q3", "b1", "user", "stopped")
    | node("q4", "q3", "user", "again"),
}
GPT["mapping"]["t1"]["message"]["content"]["thoughts"] = [{"summary": "x", "content": "Hm."}]
LLAMA = {
    "conv": {"id": "conv-1", "name": "Rows", "lastModified": 1700000000000, "currNode": "3"},
    "messages": [
        {"id": "0", "type": "root", "role": "system", "content": "", "parent": None},
        {"id": "1", "role": "user", "content": "hi", "parent": "0", "timestamp": 1700000000000}
        | {"extra": [{"type": "textFile", "name": "a.txt", "content": "A"}, {"type": "imageFile", "base64Url": "x"}]},
        {"id": "2", "role": "assistant", "content": "one", "thinking": "hm", "parent": "1"},
        {"id": "3", "role": "assistant", "content": "<think>so</think>two", "parent": "1", "model": "qwen"},
    ],
}


def test_the_tree_of_chatgpt(tmp_path):
    file, history = tmp_path / "export.zip", History(tmp_path / "h.db")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("conversations.json", json.dumps([GPT, {"mapping": {}}, 7]))
        archive.writestr("user.json", "{")
    line = take(history, file)
    assert line.startswith("imported 1 conversation; not taken over: ") and "1 image" in line
    assert "1 call of a tool" in line and "1 result of a tool" in line and "1 empty conversation" in line
    (summary,) = history.find()
    assert (summary.title, summary.updated, summary.created) == ("Latent rows", 1700000100.0, 1700000000.5)
    c = history.load(summary.id)
    sound(c)
    assert [t.text for t in c.turns] == ["What is MLA?", "A cache.", "And this?", "First part.\n\nSecond part."]
    assert c.turns[1].thinking == "Hm." and c.turns[1].model == "gpt-4o" and not c.model
    other = c.switch(1, 1)
    assert [t.text for t in other.turns] == ["What is MLA?", "Another answer.", "stopped", "", "again"]
    assert take(history, file).startswith("imported 0 conversations; 1 were here already")


def test_the_tree_of_llama_cpp(tmp_path):
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(LLAMA))
    ((c, updated),) = read(file).conversations
    sound(c)
    assert (c.title, updated, c.turns[0].files[0].text) == ("Rows", 1700000000.0, "A")
    assert [(t.text, t.thinking) for t in c.versions(1)] == [("one", "hm"), ("two", "so")]
    assert c.turns[1].text == "two" and read(file).left_out == {"image": 1}
    linear = [{"role": r, "content": t, "id": i} for i, (r, t) in enumerate([("user", "a"), ("assistant", "b")])]
    file.write_text(json.dumps([{"conv": {}, "messages": linear}]))
    assert [t.text for t in read(file).conversations[0][0].turns] == ["a", "b"]


def damaged_zip() -> str:
    """Latin-1 of a zip whose compressed bytes are none."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("conversations.json", "[]" * 500)
    raw = bytearray(file.getvalue())
    start = 30 + len("conversations.json")  # behind the local header
    raw[start : start + 4] = b"\xff" * 4
    return raw.decode("latin-1")


LOOP = node("a", "b", "user", "x") | node("b", "a", "assistant", "y") | node("c", "c", "user", "z")
ODD = node("q", None, "user", "\ud800 \x1b[2J", create_time=1e400) | node("r", "q", "assistant", 5, {"text": []}, None)


@pytest.mark.parametrize(
    "text,trouble",
    [
        ("", "damaged"),
        ("[" * 100_000, "damaged"),
        ("\x00\xff", "damaged"),
        (damaged_zip(), "damaged"),
        ('{"mapping": [], "title": 3}', "no conversation"),
        ("[1, null, {}]", "no conversation"),
        (json.dumps({"mapping": LOOP}), "no conversation"),
        (json.dumps({"mapping": {"x": 1, "y": {"message": []}}}), "no conversation"),
        (json.dumps({"conv": {"id": {}}, "messages": [[], {"role": []}]}), "no conversation"),
        (json.dumps({"mapping": ODD, "create_time": "x", "current_node": {}}), ""),
    ],
)
def test_hostile_files_get_one_line(tmp_path, text, trouble):
    file = tmp_path / "x\x1b.json"
    file.write_text(text, encoding="latin-1")
    if not trouble:
        assert take(History(tmp_path / "h.db"), file).startswith("imported 1 conversation; ")
        return
    with pytest.raises(TinychatError, match=trouble) as e:
        read(file)
    assert "\n" not in str(e.value) and "\x1b" not in str(e.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TinychatError, match="no such file"):
        read(tmp_path / "none")
    with pytest.raises(TinychatError):
        read(tmp_path)
