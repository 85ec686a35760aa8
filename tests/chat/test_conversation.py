"""Conversations as values: every change a user can make, what is sent, and the written forms."""

import json
from dataclasses import replace

import pytest

from tinychat.chat.conversation import Attachment, Conversation, Turn, footer_text, to_markdown
from tinychat.chat.parameters import PARAMETERS, Parameters, get_parameter, set_parameter, shown
from tinychat.chat.request import request_for
from tinychat.engine.sampling_defaults import sampling_defaults
from tinychat.errors import TinychatError
from tinychat.models.registry import sampling_of


def talk(*texts: str, **kw) -> Conversation:
    """Turns by role in alternation, the user first."""
    roles = ("user", "assistant")
    return Conversation(tuple(Turn(roles[i % 2], t, stop_reason="eos" * (i % 2)) for i, t in enumerate(texts)), **kw)


def contents(c: Conversation) -> list[str]:
    return [m["content"] for m in c.messages()]


def test_messages_carry_system_and_thinking():
    turns = (Turn("user", "a"), Turn("assistant", "b", thinking="hm"), Turn("user", "c"))
    c = Conversation(turns, parameters=Parameters(system="be kind"))
    assert c.messages() == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
    ]
    assert all("reasoning_content" not in m for m in c.drop_thinking().messages())
    assert Conversation((Turn("user", "a"),), parameters=Parameters(system="  ")).messages() == [
        {"role": "user", "content": "a"}
    ]


def test_attached_files_follow_the_text_in_fences_they_cannot_close():
    turn = Turn("user", "look", files=(Attachment("a.md", "```\nx\n```\n"), Attachment("b.txt", "y")))
    assert turn.content == "look\n\na.md:\n````\n```\nx\n```\n````\n\nb.txt:\n```\ny\n```"
    assert Conversation((turn,)).messages()[0]["content"] == turn.content and Turn("user", "a").content == "a"


def test_dropped_thinking_still_continues_its_own_answer():
    c = Conversation((Turn("user", "a"), Turn("assistant", "b", thinking="hm"))).drop_thinking()
    assert c.messages()[-1]["reasoning_content"] == "hm"


def test_regenerate_drops_the_answer_and_keeps_a_written_start():
    assert contents(talk("a", "b", "c", "d").regenerate()) == ["a", "b", "c"]
    assert contents(talk("a", "b", "c").regenerate()) == ["a", "b", "c"]
    c = talk("a").prefill("Sure, ")
    grown = c.with_last(Turn("assistant", "Sure, here", prefix=6))
    assert contents(grown.regenerate()) == ["a", "Sure, "]
    with pytest.raises(TinychatError):
        Conversation().regenerate()


def test_edit_forgets_what_came_after():
    c = talk("a", "b", "c", "d")
    assert contents(c.edit(2, "C")) == ["a", "b", "C"]
    assert contents(c.edit(0, "A")) == ["A"]
    assert contents(c) == ["a", "b", "c", "d"]
    for bad in (1, 9, -1):
        with pytest.raises(TinychatError):
            c.edit(bad, "x")


def test_edit_before_the_first_sent_turn_sends_it_again():
    c = replace(talk("a", "b", "c", "d", "e"), first=4)
    assert contents(c) == ["e"]
    assert contents(c.edit(2, "C")) == ["C"]
    assert contents(c.edit(0, "A")) == ["A"]


def test_fork_is_another_conversation():
    c = talk("a", "b", "c", "d")
    f = c.fork(1)
    assert f.id != c.id and contents(f) == ["a", "b"] and f.name == "a (fork)"
    assert contents(c.fork()) == contents(c)
    with pytest.raises(TinychatError):
        Conversation().fork()


def test_what_is_left_out_of_the_prompt_stays_in_the_transcript():
    c = replace(talk("a", "b", "c", "d", "e"), first=2)
    assert contents(c) == ["c", "d", "e"] and len(c.turns) == 5


def test_continue_needs_an_answer_last():
    assert talk("a", "b").can_continue() and not talk("a").can_continue() and not Conversation().can_continue()
    c = Conversation((Turn("user", "a"), Turn("assistant", "", thinking="hm", thinking_open=True)))
    assert not c.close_thinking().turns[-1].thinking_open


def test_title():
    assert Conversation().title == ""
    assert talk("two\n  lines").title == "two lines"
    assert len(talk("x" * 500).title) == 60
    assert talk("a").rename(" my \n talk ").title == "my talk"


def test_json_round_trip():
    files = (Attachment("x.py", "x = 1"),)
    turn = Turn(
        "assistant", "b", "t", thinking_open=True, stop_reason="stopped", stats={"decode_tok_s": 3.5}, files=files
    )
    parameters = set_parameter(Parameters(system="s"), "top_k", "7")
    c = Conversation((Turn("user", "a"), turn), model="m", parameters=parameters, first=1)
    assert Conversation.from_dict(json.loads(json.dumps(c.as_dict()))) == c


BAD = [
    {},
    {"turns": [{"role": "root", "text": "x"}]},
    {"turns": 3},
    {"turns": [], "format": 99},
    {"turns": [{"role": "user"}]},
]


@pytest.mark.parametrize("bad", BAD)
def test_json_that_is_no_conversation(bad):
    with pytest.raises(TinychatError):
        Conversation.from_dict(bad)


def test_markdown():
    turns = (Turn("user", "why?"), Turn("assistant", "so:\n```py\nx = 1", thinking="hm", stop_reason="stopped"))
    c = Conversation(turns, model="m", parameters=Parameters(system="sys"))
    assert to_markdown(c) == (
        "# why?\n\nModel: `m`\n\n## System\n\nsys\n\n## You\n\nwhy?\n\n## "
        "m\n\n<details><summary>Thinking</summary>\n\nhm\n\n"
        "</details>\n\nso:\n```py\nx = 1\n```\n\n*(stopped)*\n"
    )


def test_set_parameter():
    p = Parameters()
    for name, text, value in [
        ("temperature", "0,5", 0.5),
        ("top_k", "7", 7),
        ("seed", "42", 42),
        ("seed", "random", None),
        ("max_tokens", "off", None),
        ("context", "8192", 8192),
        ("min_p", "0", 0.0),
    ]:
        assert get_parameter(set_parameter(p, name, text), name) == value
    both = set_parameter(set_parameter(p, "top_p", "0.5"), "min_p", "0.1")
    assert (both.sampling.top_p, both.sampling.min_p, both.sampling.top_k) == (0.5, 0.1, p.sampling.top_k)


REFUSED = [
    ("heat", "1"),
    ("temperature", "hot"),
    ("temperature", "nan"),
    ("temperature", "-1"),
    ("top_k", "2.5"),
    ("seed", "-1"),
    ("top_p", "1.1"),
    ("context", "1"),
    ("temperature", "off"),
    ("top_k", ""),
]


@pytest.mark.parametrize("name,text", REFUSED)
def test_set_parameter_refuses(name, text):
    with pytest.raises(TinychatError) as e:
        set_parameter(Parameters(), name, text)
    assert "\n" not in str(e.value)
    assert all(s.help for s in PARAMETERS.values())


def test_every_version_stays_and_comes_back_with_what_followed_it():
    c = talk("a", "b", "c", "d")
    edited = c.edit(0, "A").add(Turn("assistant", "B"))
    assert [t.text for t in edited.turns] == ["A", "B"] and [t.text for t in edited.versions(0)] == ["a", "A"]
    again = edited.regenerate().add(Turn("assistant", "B2"))
    assert [t.text for t in again.versions(1)] == ["B", "B2"] and again.switch(1, 1) is again
    back = again.switch(0, -1)
    assert [t.text for t in back.turns] == ["a", "b", "c", "d"]
    assert [t.text for t in back.switch(0, 1).turns] == ["A", "B2"], "the version that was shown last"
    assert [t.text for t in back.switch(0, 1).switch(1, -1).turns] == ["A", "B"]
    for value in (edited, again, back):
        assert {t.text for t in (*value.turns, *value.others)} >= {"a", "b", "c", "d", "A", "B"}
        assert len({t.id for t in (*value.turns, *value.others)}) == len(value.turns) + len(value.others)
    read = Conversation.from_dict(json.loads(json.dumps(again.as_dict())))
    assert [t.text for t in read.switch(0, -1).turns] == ["a", "b", "c", "d"]
    text = to_markdown(again)
    assert all(f"\n{word}\n" in text for word in ("a", "b", "c", "d", "A", "B", "B2")) and text.count("<details>") == 2


def test_an_edit_without_a_change_is_another_answer():
    c = talk("a", "b").edit(0, "a").add(Turn("assistant", "B"))
    assert [t.text for t in c.versions(0)] == ["a"] and [t.text for t in c.versions(1)] == ["b", "B"]


def test_format_1_has_no_versions_and_gets_ids():
    old = {"format": 1, "turns": [{"role": "user", "text": "a"}, {"role": "assistant", "text": "b"}]}
    c = Conversation.from_dict(old)
    assert [(t.id, t.parent) for t in c.turns] == [(1, 0), (2, 1)] and c.others == ()
    assert c.fork().title == "a (fork)" and c.fork().fork().fork().title == "a (fork 3)"


def branched() -> Conversation:
    """Two questions; the first has the answers b and B, and B is followed by C, D."""
    c = talk("a", "b", "c", "d")
    c = c.regenerate(1).add(Turn("assistant", "B", stop_reason="eos"))
    return c.add(Turn("user", "C")).add(Turn("assistant", "D", stop_reason="eos"))


def sound(c: Conversation) -> None:
    """Every turn has a parent of the right role, and no id is there twice."""
    every = {t.id: t for t in (*c.turns, *c.others)}
    assert len(every) == len(c.turns) + len(c.others) and 0 not in every
    for turn in every.values():
        above = every[turn.parent].role if turn.parent else None
        assert (
            above
            in {"user": (None, "assistant"), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}[turn.role]
        )
    assert [t.parent for t in c.turns] == [0, *(t.id for t in c.turns[:-1])]


def test_an_edited_answer_is_a_version_that_is_sent():
    c = talk("a", "b", "c", "d")
    edited = c.edit_answer(1, "better")
    assert contents(edited) == ["a", "better"] and edited.turns[1].edited and edited.turns[1].complete
    assert (
        len(edited.versions(1)) == 2 and edited.switch(1, -1).turns == c.turns and "*(edited)*" in to_markdown(edited)
    )
    assert c.edit_answer(1, "b") is c and Conversation.from_dict(edited.as_dict()) == edited
    for index, text in ((0, "x"), (1, "  ")):
        with pytest.raises(TinychatError):
            c.edit_answer(index, text)


@pytest.mark.parametrize(
    "index,shown,also",
    [
        (0, ["C", "D"], "c"),  # a question: its answers go, what followed either of them stays, as versions
        (1, ["a", "b", "C", "D"], "c"),  # a version of an answer: what followed it follows the other one
        (2, ["a", "B"], "c"),
        (3, ["a", "B"], "c"),  # an answer without another version goes with its question
    ],
)
def test_a_deleted_turn_takes_nothing_else_along_and_comes_back(index, shown, also):
    c = replace(branched(), first=2)
    less, removed = c.remove(index)
    sound(less)
    assert contents(replace(less, first=0)) == shown and also in {t.text for t in (*less.turns, *less.others)}
    assert len(less.turns) + len(less.others) + len(removed.turns) == len(c.turns) + len(c.others)
    more = less.add(Turn("user", "more"))
    again = more.put_back(removed)
    sound(again)
    assert again.turns[:4] == c.turns and "more" in {t.text for t in (*again.turns, *again.others)}
    places = [{t.id: (t.parent, t.text) for t in (*each.turns, *each.others)} for each in (c, again)]
    assert places[0].items() <= places[1].items()


def test_a_deleted_turn_that_is_not_sent_leaves_the_rest_unsent():
    c = replace(talk("a", "b", "c", "d", "e", "f"), first=4)
    less, _ = c.remove(0)
    assert [t.text for t in less.sent] == ["e", "f"] and [t.text for t in c.remove(4)[0].sent] == []
    with pytest.raises(TinychatError, match="all of the conversation"):
        talk("a", "b").remove(1)


def test_the_models_own_sampling_is_used_where_the_user_has_set_nothing():
    model = sampling_defaults(
        {
            "general.sampling.temp": 0.6000000238418579,
            "general.sampling.top_k": 20,
            "general.sampling.top_p": float("nan"),
            "general.sampling.min_p": 7,
            "general.sampling.penalty_repeat": "1.1",
        }
    )
    assert model == {"temperature": 0.6, "top_k": 20}
    p = set_parameter(Parameters(), "top_k", "40")  # tinychat's own value, but said by the user
    for same in (p, Parameters.from_dict(json.loads(json.dumps(p.as_dict())))):
        assert (same.sampling_of(model).temperature, same.sampling_of(model).top_k) == (0.6, 40)
    assert shown(p, "temperature", model) == "0.6, the model's default" and shown(p, "top_k", model) == "40"
    assert set_parameter(p, "top_k", "default").sampling_of(model).top_k == 20
    request = request_for(talk("a"), defaults=model)
    assert (request.sampling.temperature, request.sampling.min_p) == (0.6, 0.05)
    assert sampling_of("qwen3:8b")["top_k"] == 20 and not sampling_of("smollm2:135m") and not sampling_of("qwen3:1")


def test_an_answer_without_words_says_so():
    empty = Turn("assistant", "", stop_reason="eos")
    assert footer_text(empty) == "the model wrote nothing"
    assert not footer_text(replace(empty, text="x")) and not footer_text(replace(empty, stop_reason=""))
