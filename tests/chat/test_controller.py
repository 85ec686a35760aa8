"""The chat without a screen, on a scripted backend."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.scripted import INFO, Script, scripted
from tinychat.backend.protocol import Usage
from tinychat.chat.changes import Change, Ended, Grew, ModelChanged, Notice, Overflow, Reset, SentBack
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import Conversation, Turn, to_markdown
from tinychat.chat.parameters import Parameters, set_parameter
from tinychat.chat.saving import Saver
from tinychat.chat.state import Answering, Idle, ModelChoice, Stopping
from tinychat.chat.titles import ASKED, Titles, clean
from tinychat.errors import TinychatError


class Chat:
    """A controller with a loaded model and what it said so far."""

    def __init__(self, script: Script, load: bool = True, **kw) -> None:
        self.script = script
        self.saved: list[Conversation] = []
        self.controller = Controller(scripted(script), save=self.saved.append, **kw)
        self.changes: list[Change] = []
        if load:
            self.controller.load("m", Path("m.gguf"))
            self.until(lambda: self.controller.ready)

    def until(self, condition) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, self.changes
            self.changes += self.controller.poll()
            time.sleep(0.001)

    def settle(self) -> None:
        self.until(lambda: not self.controller.busy and not self.controller.queue)
        self.changes += self.controller.poll()

    def ask(self, text: str) -> Turn:
        self.controller.ask(Turn("user", text))
        self.settle()
        return self.turns[-1]

    def of(self, kind):
        return [c for c in self.changes if isinstance(c, kind)]

    @property
    def turns(self):
        return self.controller.conversation.turns


def test_an_answer_with_thinking():
    chat = Chat(Script(["<think>\nhm, let me see\n</think>\n\nFour."]))
    answer = chat.ask("2 + 2?")
    assert (answer.thinking, answer.text, answer.stop_reason) == ("hm, let me see", "Four.", "eos")
    assert (
        answer.thinking_tokens > 3
        and not answer.thinking_open
        and answer.stats["generated_tokens"] > answer.thinking_tokens
    )
    grown = chat.of(Grew)
    assert "".join(g.answer for g in grown) == "Four." and "".join(g.thinking for g in grown) == "hm, let me see"
    assert sum(g.tokens for g in grown) == answer.stats["generated_tokens"] == len(chat.controller.trace.tokens)
    assert [type(c) for c in chat.changes if not isinstance(c, Grew)] == [ModelChanged, Reset, Ended]
    assert chat.saved[-1] == chat.controller.conversation


def test_the_second_turn_reuses_the_first():
    chat = Chat(Script(["one", "two"]))
    chat.ask("a")
    second = chat.ask("b")
    assert second.stats["reused_tokens"] >= 4 and second.stats["prefilled_tokens"] <= 4
    assert chat.script.prompts[1] == "<|user|>a<|end|><|assistant|>one<|end|><|user|>b<|end|><|assistant|>"


def test_stop_keeps_the_partial_answer_and_continue_goes_on():
    chat = Chat(Script(["word " * 500, "the end."], rate=50))
    chat.controller.ask(Turn("user", "go"))
    chat.until(lambda: chat.turns and len(chat.turns[-1].text) > 20)
    chat.controller.stop()
    chat.settle()
    partial = chat.turns[-1]
    assert partial.stop_reason == "stopped" and 20 < len(partial.text) < 2500
    chat.controller.go_on()
    chat.settle()
    assert chat.turns[-1].text == partial.text + "the end." and chat.turns[-1].stop_reason == "eos"
    assert chat.turns[-1].stats["generated_tokens"] > partial.stats["generated_tokens"]
    assert chat.script.prompts[-1].endswith("<|assistant|>" + partial.text) and len(chat.turns) == 2


def test_a_stop_before_the_backend_has_begun_is_not_forgotten():
    chat = Chat(Script(["word " * 5000], rate=500))
    chat.controller.ask(Turn("user", "go"))
    chat.controller.stop()
    chat.settle()
    assert chat.turns[-1].stop_reason == "stopped" and len(chat.turns[-1].text) < 25_000


@pytest.mark.parametrize("stopped", [False, True])
def test_skip_to_the_answer(stopped):
    chat = Chat(Script(["<think>\n" + "hm " * 2000, "Short answer."], rate=100))
    with pytest.raises(TinychatError):
        chat.controller.skip_thinking()
    chat.controller.ask(Turn("user", "go"))
    chat.until(lambda: chat.turns and len(chat.turns[-1].thinking) > 20)
    if stopped:  # and thought better of
        chat.controller.stop()
        chat.settle()
    chat.controller.skip_thinking()
    chat.settle()
    answer = chat.turns[-1]
    assert answer.text == "Short answer." and answer.thinking.startswith("hm hm") and not answer.thinking_open
    assert chat.script.prompts[-1].endswith("</think>\n\n") and len(chat.of(Ended)) == 1 + stopped


def test_thinking_that_never_closes():
    chat = Chat(Script(["<think>\nforever"]))
    answer = chat.ask("go")
    assert (answer.thinking, answer.text, answer.thinking_open, answer.stop_reason) == ("forever", "", True, "eos")


def test_continue_inside_open_thinking_stays_in_it():
    chat = Chat(Script(["<think>\n" + "hm " * 2000, " so\n</think>\n\nYes."], rate=100))
    chat.controller.ask(Turn("user", "go"))
    chat.until(lambda: chat.turns and len(chat.turns[-1].thinking) > 20)
    chat.controller.stop()
    chat.settle()
    assert chat.turns[-1].thinking_open
    chat.controller.go_on()
    chat.settle()
    assert chat.turns[-1].text == "Yes." and chat.turns[-1].thinking.endswith("so") and not chat.turns[-1].thinking_open


def test_regenerate_edit_fork_and_prefill():
    chat = Chat(Script(["one", "two", "three", "four", "five"]))
    chat.ask("a")
    chat.controller.regenerate()
    assert chat.controller.running.typed is None  # where it fails, the question goes nowhere: it is still there
    chat.settle()
    assert [t.text for t in chat.turns] == ["a", "two"]
    chat.ask("b")
    chat.controller.edit(0, "A")
    chat.settle()
    assert [t.text for t in chat.turns] == ["A", "four"]
    before = chat.controller.conversation
    chat.controller.fork()
    assert chat.controller.conversation.id != before.id and [t.text for t in chat.turns] == ["A", "four"]
    chat.controller.prefill("Well, ")
    chat.settle()
    assert [t.text for t in chat.turns] == ["A", "Well, five"] and chat.turns[-1].prefix == 6
    assert {c.id for c in chat.saved} == {before.id, chat.controller.conversation.id}
    chat.controller.ask(Turn("user", "c"))
    assert chat.controller.busy
    chat.controller.fork()
    assert chat.turns[-2].text == "c" and chat.turns[-1].stop_reason == "stopped", "the copy has no endless answer"


def test_forks_are_written_in_order_and_before_newer_versions():
    asked = Turn("user", "a")
    first, second, go, written = Conversation().add(asked), Conversation().add(asked), threading.Event(), []

    def write(c: Conversation) -> None:
        assert c is not first or go.wait(120)
        written.append(c)

    saver = Saver(write, time.monotonic)
    saver.copy(first)
    saver.copy(second)
    newer = saver.save(first.add(Turn("assistant", "b")))
    assert not written
    go.set()
    saver.finish()
    assert written == [first, second, newer]


def test_a_replay_that_waits_for_its_model_ends_with_its_question():
    chat = Chat(Script(["one", "two"]))
    chat.ask("a")
    chat.controller.edit(0, "A")
    chat.settle()
    chat.controller.replay(ModelChoice("other", Path("other.gguf"), {}, None))
    chat.controller.undo()
    assert chat.controller.replaying is None
    chat.until(lambda: chat.controller.ready)
    chat.settle()
    assert [t.text for t in chat.turns] == ["a", "one"] and len(chat.script.prompts) == 2


def test_regenerate_draws_another_seed_unless_it_is_set():
    chat = Chat(Script(["x"]))
    chat.ask("a")
    chat.controller.regenerate()
    chat.settle()
    chat.controller.set_parameters(set_parameter(Parameters(), "seed", "7"))
    chat.controller.regenerate()
    chat.settle()
    seeds = [s.seed for s in chat.script.samplings]
    assert seeds[0] != seeds[1] and seeds[2] == 7 == chat.turns[-1].stats["seed"]


def test_messages_typed_meanwhile_wait_their_turn():
    chat = Chat(Script(["one", "two", "three"], load_s=0.05), load=False)
    chat.controller.ask(Turn("user", "early"))
    assert [c.error for c in chat.controller.poll() if isinstance(c, Notice)] == [True]
    chat.controller.load("m", Path("m.gguf"))
    chat.controller.ask(Turn("user", "while loading"))
    chat.settle()
    chat.controller.ask(Turn("user", "c"))
    chat.controller.ask(Turn("user", "d"))
    assert [t.text for t in chat.controller.queue] == ["d"]
    assert [t.text for t in chat.controller.take_back_queue()] == ["d"]
    chat.settle()
    assert [t.text for t in chat.turns] == ["early", "one", "while loading", "two", "c", "three"]


def test_a_failure_is_one_line_and_the_next_question_works():
    chat = Chat(Script(["one two three four five"], fail_after=2))
    answer = chat.ask("a")
    assert answer.stop_reason == "failed" and answer.text == "one two"
    assert [n.text for n in chat.of(Notice)] == ["the scripted engine failed as it was told to"]
    chat.script.fail_after = None
    assert chat.ask("b").stop_reason == "eos"


def test_a_model_that_does_not_load():
    chat = Chat(Script(fail_load="m.gguf: not a GGUF file"), load=False)
    chat.controller.load("m", Path("m.gguf"))
    chat.until(lambda: chat.of(Notice))
    assert not chat.controller.ready and chat.of(Notice)[0].error
    with pytest.raises(TinychatError):
        chat.controller.regenerate()


def small(limit: int, script: Script) -> Chat:
    return Chat(replace(script, info=replace(INFO, max_context=limit)))


def test_before_the_context_overflows_the_user_is_asked():
    chat = small(128, Script(["<think>\n" + "hm " * 20 + "\n</think>\n\n" + "word " * 15]))
    for i in range(9):
        chat.controller.ask(Turn("user", f"question {i}"))
        chat.settle()
        if chat.of(Overflow):
            break
    room = chat.of(Overflow)[0]
    asked = len(chat.turns)
    assert (
        room.usage.used + room.reserve > room.usage.limit == 128
        and "turns" in room.options
        and chat.turns[-1].role == "assistant"
    )
    chat.controller.resolve(room, "stop")
    assert [c.turn.text for c in chat.controller.poll() if isinstance(c, SentBack)] == [f"question {i}"]
    assert len(chat.turns) == asked
    chat.changes.clear()
    chat.controller.ask(Turn("user", f"question {i}"))
    chat.settle()
    (room,) = chat.of(Overflow)
    chat.controller.queue.append(Turn("user", "typed meanwhile"))
    for _ in range(3):
        chat.controller.poll()
    assert not chat.controller.busy, "it waits for the answer to the question"
    chat.controller.take_back_queue()
    chat.controller.resolve(room, "turns")
    chat.controller.resolve(room, "compact")  # too late: nothing happens to the answer that is being written
    chat.settle()
    assert len(chat.turns) == asked + 2 and chat.turns[-1].stop_reason and chat.controller.conversation.first > 0
    assert "question 0" not in chat.script.prompts[-1] and f"question {i}" in chat.script.prompts[-1]
    assert chat.controller.usage.limit == 128 >= chat.controller.usage.used


def test_dropping_thinking_makes_room():
    chat = small(140, Script(["<think>\n" + "hm " * 80 + "\n</think>\n\n" + "word " * 15]))
    chat.ask("a")
    chat.controller.ask(Turn("user", "b"))
    chat.settle()
    room = chat.of(Overflow)[0]
    assert room.options == ("context", "compact", "turns", "thinking", "stop") and room.usage.thinking > 60
    chat.controller.resolve(room, "thinking")
    chat.settle()
    assert "hm" not in chat.script.prompts[-1] and chat.turns[-1].text and chat.turns[1].thinking


def test_an_answer_that_fills_the_context_asks_too():
    chat = small(64, Script(["word " * 500, "on"]))
    chat.ask("a")
    assert chat.turns[-1].stop_reason == "context" and chat.of(Overflow)[0].options == ("context", "stop")


def test_a_message_too_long_for_the_context_comes_back():
    chat = small(64, Script(["x"]))
    chat.controller.ask(Turn("user", "word " * 100))
    chat.settle()
    room = chat.of(Overflow)[0]
    assert room.options == ("context", "stop") and room.typed and chat.turns == ()


def test_usage_by_kind():
    chat = Chat(Script(["<think>\nhm hm hm\n</think>\n\nyes yes"]))
    chat.controller.set_parameters(Parameters(system="be very kind"))
    chat.ask("a")
    chat.ask("b")
    usage = chat.controller.usage
    assert usage.system == 3 and usage.thinking >= 3 and usage.history > 4 and usage.answer > 4
    assert usage.used + usage.free == usage.limit == INFO.max_context


def test_raw_prompts_and_raw_output():
    chat = Chat(Script(["<think>a</think>b"]))
    chat.controller.raw = True
    answer = chat.ask("once <|user|>upon")
    assert chat.script.prompts == ["once <|user|>upon"] and answer.text == "<think>a</think>b" and answer.raw
    chat.controller.go_on()
    chat.settle()
    assert chat.script.prompts[1] == "once <|user|>upon<think>a</think>b"


def test_opening_another_conversation_stops_and_saves_the_running_answer():
    chat = Chat(Script(["word " * 2000, "next"], rate=100))
    chat.controller.ask(Turn("user", "go"))
    chat.until(lambda: chat.turns and len(chat.turns[-1].text) > 20)
    first = chat.controller.conversation.id
    chat.controller.new()
    chat.controller.ask(Turn("user", "b"))
    chat.settle()
    assert [t.text for t in chat.turns] == ["b", "next"]
    old = [c for c in chat.saved if c.id == first][-1]
    assert old.turns[-1].stop_reason == "stopped" and len(old.turns[-1].text) > 20


def test_another_context_length_loads_the_model_again():
    chat = Chat(Script(["x"]))
    chat.controller.set_parameters(set_parameter(Parameters(), "context", "512"))
    assert not chat.controller.ready
    chat.until(lambda: chat.controller.ready)
    assert chat.controller.info.max_context == 512 and chat.script.loads[-1]["max_context"] == 512


def test_saving_goes_on_at_most_once_a_second_while_it_streams():
    now = [0.0]
    tokens = threading.Semaphore(100)
    chat = Chat(
        Script(["word " * 60], hold=lambda step: step == "token" and tokens.acquire(timeout=120)), clock=lambda: now[0]
    )
    chat.controller.ask(Turn("user", "go"))
    chat.settle()
    assert len(chat.saved) == 2, "the question, and the end"
    while tokens.acquire(blocking=False):
        pass
    chat.controller.ask(Turn("user", "go"))
    for _ in range(5):
        n = len(chat.turns[-1].text)
        tokens.release(3)
        chat.until(lambda n=n: len(chat.turns[-1].text) > n)
        now[0] += 1.1
    tokens.release(100)
    chat.settle()
    assert 5 <= len(chat.saved) <= 10


def test_a_history_that_fails_is_said_once():
    def broken(conversation):
        raise TinychatError("the disk is full")

    controller = Controller(scripted(Script(["x"])), save=broken)
    controller.load("m", Path("m"))
    changes = []
    for text in ("a", "b"):
        controller.ask(Turn("user", text))
        deadline = time.monotonic() + 120
        while controller.queue or controller.busy or not controller.ready:
            assert time.monotonic() < deadline
            changes += controller.poll()
    assert [n.text for n in changes if isinstance(n, Notice)] == [
        "the disk is full; this conversation is not being saved"
    ]


def test_a_model_that_does_not_load_costs_neither_the_loaded_one_nor_what_was_typed():
    chat = Chat(Script(["one", "two"]))
    chat.ask("a")
    chat.script.fail_load = "other.gguf: not a GGUF file"
    chat.controller.load("other", Path("other.gguf"))
    chat.controller.ask(Turn("user", "for the other model"))
    assert chat.controller.info is None and chat.controller.conversation.model == "other"
    chat.until(lambda: chat.controller.ready)
    assert chat.controller.conversation.model == "m" and [c.turn.text for c in chat.of(SentBack)] == [
        "for the other model"
    ]
    assert chat.of(Notice)[-1].error and chat.ask("b").text == "two"


def test_a_context_that_is_not_possible_is_taken_back():
    chat = Chat(Script(["x"]))
    chat.script.fail_load = "a context of 10,000,000 tokens is not possible"
    chat.controller.set_parameters(set_parameter(Parameters(), "context", "10000000"))
    chat.until(lambda: chat.controller.ready)
    assert chat.controller.conversation.parameters.context is None and chat.ask("a").text == "x"


def test_a_model_chosen_while_another_is_loading_is_the_one_that_answers():
    chat = Chat(Script(["x"], load_s=0.1), load=False)
    chat.controller.load("first", Path("first.gguf"))
    chat.controller.load("second", Path("second.gguf"))
    chat.until(lambda: chat.controller.ready)
    assert chat.ask("a").text == "x" and chat.controller.conversation.model == "second"
    assert [load["path"] for load in chat.script.loads] == ["first.gguf", "second.gguf"]


def test_a_refused_message_leaves_the_conversation_and_the_history_as_they_were():
    chat = small(64, Script(["x"]))
    chat.ask("a")
    before, saved = chat.controller.conversation, len(chat.saved)
    chat.controller.ask(Turn("user", "word " * 100))
    assert len(chat.turns) == 4 and isinstance(chat.controller.state, Answering), "it is shown at once"
    chat.settle()
    assert chat.controller.conversation == before and len(chat.saved) == saved and chat.of(Overflow)
    assert chat.of(Reset)[-1] == Reset(2, before) and chat.controller.state == Idle()


def test_skipping_with_a_context_that_is_nearly_full_still_ends_the_answer():
    tokens = threading.Semaphore(207)
    chat = small(
        256,
        Script(
            ["<think>\n" + "hm " * 2000, "never"], hold=lambda step: step == "token" and tokens.acquire(timeout=120)
        ),
    )
    chat.controller.ask(Turn("user", "go"))
    chat.until(lambda: chat.controller.running and chat.controller.running.tokens > 205)
    chat.controller.skip_thinking()
    tokens.release(1000)
    assert isinstance(chat.controller.state, Stopping) and chat.controller.state.skip
    chat.settle()
    assert chat.of(Overflow) and [c.turn.stop_reason for c in chat.of(Ended)] == ["stopped"]
    assert chat.saved[-1] == chat.controller.conversation and chat.turns[-1].thinking.startswith("hm hm")


def test_what_an_abandoned_request_still_says_is_not_looked_at():
    chat = Chat(Script(["word " * 2000, "fresh"], rate=100))
    chat.controller.ask(Turn("user", "go"))
    chat.until(lambda: chat.turns and len(chat.turns[-1].text) > 20)
    cancel = chat.controller.running.cancel
    chat.controller.open(Conversation(model="m"))
    assert cancel.is_set() and chat.controller.state == Idle()
    assert chat.ask("b").text == "fresh" and len(chat.turns) == 2


def test_the_meter_is_counted_off_the_screens_thread():
    chat = Chat(Script(["<think>\nhm hm hm\n</think>\n\nyes yes"]))
    chat.ask("a")
    told, conversation = chat.controller.usage, chat.controller.conversation
    chat.controller.new()
    assert chat.controller.usage == Usage(limit=INFO.max_context)
    chat.controller.open(conversation)
    assert chat.controller.measuring
    chat.until(lambda: not chat.controller.measuring)
    usage = chat.controller.usage
    assert usage.thinking >= 3 and abs(usage.used - told.used) < 8 and usage.limit == INFO.max_context


def test_another_model_forgets_the_ids_of_the_last_prompt():
    """The inspector asks the tokenizer that is loaded now."""
    chat = Chat(Script(["one"]))
    chat.ask("a")
    assert chat.controller.trace.prompt_ids
    chat.controller.load("n", Path("n.gguf"))
    chat.until(lambda: chat.controller.ready)
    assert not chat.controller.trace.prompt_ids and not chat.controller.trace.tokens


def test_the_oldest_turns_become_a_summary_and_come_back():
    def answer(prompt: str) -> str:
        return "It was about 1, 2 and 3." if "Summarise our conversation" in prompt else f"answer {len(prompt)}"

    chat = Chat(Script(answer))
    for i in range(4):
        chat.ask(f"question {i}")
    before = chat.controller.conversation
    chat.controller.compact()
    with pytest.raises(TinychatError, match="stop it"):
        chat.controller.compact()
    chat.settle()
    after = chat.controller.conversation
    summary = after.turns[6]
    assert (summary.role, summary.text, after.summary, after.sent_from) == ("summary", "It was about 1, 2 and 3.", 6, 7)
    assert summary.stats["replaced_turns"] == 6 and summary.stats["replaced_tokens"] > 6 < len(summary.text)
    assert after.turns[:6] == before.turns[:6] and [t.text for t in after.turns[7:]] == [
        t.text for t in before.turns[6:]
    ]
    assert "summary of 6 earlier turns" in to_markdown(after) and Conversation.from_dict(after.as_dict()) == after
    chat.ask("and now?")
    prompt = chat.script.prompts[-1]
    assert "It was about 1, 2 and 3." in prompt and "question 3" in prompt and "question 2" not in prompt
    chat.controller.compact()  # a summary of the summary and what followed it
    chat.settle()
    assert chat.controller.conversation.summary == 9 and "It was about" in chat.script.prompts[-1]
    chat.controller.undo()
    chat.controller.undo()
    assert chat.controller.conversation.turns == before.turns
    chat.controller.compact()
    chat.controller.state.job.outcome.result(120)  # it is stopped when all of it is there, and not shown yet
    chat.controller.stop()
    chat.settle()
    assert chat.controller.conversation.turns == before.turns, "a summary that was stopped leaves no trace"


@pytest.mark.parametrize("room_for_all", [True, False])
def test_a_full_context_can_be_summarised(room_for_all):
    def answer(prompt: str) -> str:
        return "gist" if "Summarise our conversation" in prompt else "word " * 30

    chat = small(230 if room_for_all else 180, Script(answer))
    for i in range(9):
        chat.controller.ask(Turn("user", f"question {i}"))
        chat.settle()
        if chat.of(Overflow):
            break
    room, asked = chat.of(Overflow)[0], chat.turns
    assert "compact" in room.options
    chat.controller.resolve(room, "compact")
    chat.settle()
    c = chat.controller.conversation
    assert (
        c.turns[-2].text == f"question {i}"
        and c.turns[-1].text.startswith("word")
        and "gist" in c.turns[c.summary].text
    )
    assert "gist" in chat.script.prompts[-1] and "question 0" not in chat.script.prompts[-1]
    kept = [t.text for t in c.turns if t.role == "user"]
    assert kept == [f"question {n}" for n in range(i + 1)] and len(c.sent) >= 2
    chat.controller.undo()
    assert chat.turns == asked, "the question that followed the summary is a version now"


def test_an_answer_that_repeats_itself_is_stopped_once():
    tokens = threading.Semaphore(600)
    script = Script(["Yes. " + "I am sorry. " * 500], hold=lambda step: step == "token" and tokens.acquire(timeout=120))
    chat = Chat(script, stop_repetition=True)
    chat.controller.ask(Turn("user", "go"))
    chat.until(lambda: not isinstance(chat.controller.state, Answering))
    tokens.release(10_000)
    chat.settle()
    answer = chat.turns[-1]
    assert answer.stop_reason == "repeated" and 800 < len(answer.text) < 5_000
    assert any("repeated itself" in n.text for n in chat.of(Notice))
    chat.controller.go_on()
    chat.settle()
    assert chat.turns[-1].stop_reason == "eos", "who continues it wants it"


def test_the_model_gives_a_title_when_nothing_else_runs_and_the_cache_keeps_its_rows():
    asked = []

    def answer(prompt: str) -> str:
        asked.append(ASKED in prompt)
        return '**Title: "Sums of two"**' if asked[-1] else "Four."

    chat, now = Chat(Script(answer), titles=True), [0.0]
    chat.controller._titles = Titles(True, lambda: now[0])
    chat.ask("2 + 2?")
    chat.changes += chat.controller.poll()
    assert asked == [False] and chat.controller.conversation.title == "2 + 2?", "not before it is idle"
    before, now[0] = chat.controller.stats, 5.0
    chat.until(lambda: chat.controller.conversation.title == "Sums of two")
    assert chat.controller.stats == before and chat.saved[-1].model_title == "Sums of two" and len(chat.turns) == 2
    second = chat.ask("and 3 + 3?")
    assert second.stats["reused_tokens"] >= before.prompt_tokens, "the rows of the first answer are still there"
    chat.controller.rename("mine")
    assert chat.controller.conversation.title == "mine" and asked == [False, True, False]


def test_a_question_cancels_a_title():
    chat, now = Chat(Script(lambda p: "word " * 20 if ASKED in p else "Four.", rate=20), titles=True), [0.0]
    chat.controller._titles = Titles(True, lambda: now[0])
    chat.ask("2 + 2?")
    chat.controller.poll()
    now[0] = 5.0
    chat.until(lambda: ASKED in chat.script.prompts[-1])
    chat.ask("and 3 + 3?")
    assert chat.turns[-1].text == "Four." and chat.controller.conversation.title == "2 + 2?"


@pytest.mark.parametrize(
    "said,title",
    [
        ("Sums\n", "Sums"),
        ("“Größe der Erde.”", "Größe der Erde"),
        ("Title: a b", "a b"),
        ("Sure!\n\nSums", ""),
        ("x" * 61, ""),
        ("...", ""),
        ("", ""),
    ],
)
def test_what_counts_as_a_title(said, title):
    assert clean(said) == title
