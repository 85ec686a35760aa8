"""What the commands do: each is a few lines on the controller, or opens a screen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from textual.message import Message

from tinychat.backend.instruments import Instrumented
from tinychat.chat.commands import COMMANDS, TextCommand, switched
from tinychat.chat.conversation import KEPT_STATS, footer_text, to_markdown
from tinychat.chat.find import find as find_text
from tinychat.chat.find import version_with
from tinychat.chat.parameters import Parameters
from tinychat.chat.settings import Settings
from tinychat.errors import TinychatError, printable
from tinychat.tools.mcp_config import switch
from tinychat.ui import external
from tinychat.ui.chat import models
from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.chat.prompt import PROMPT_KEYS
from tinychat.ui.chat.view import ChatView
from tinychat.ui.panel.figures import share_of_limit, size
from tinychat.ui.screens.sheet import in_daemon
from tinychat.units import speed


class SettingsEdited(Message):
    """The user has changed the settings file."""

    def __init__(self, own: Settings) -> None:
        super().__init__()
        self.own = own


def said(command: TextCommand) -> Callable[[ChatView, str], Awaitable[None]]:
    """`command` in the transcript."""

    async def run(chat: ChatView, text: str) -> None:
        if line := command.run(chat, text):
            await chat.say(line)

    return run


# the conversation


async def edit(chat: ChatView, text: str) -> None:
    if text.strip().lower() == "answer":
        if (last := chat.controller.conversation.last_answer) is None:
            raise TinychatError("there is no answer to edit yet")
        chat.begin_edit(last)
        return
    mine = [i for i, t in enumerate(chat.controller.conversation.turns) if t.role == "user"]
    number = _number(text, len(mine), "edit", "your messages") if text.strip() else len(mine)
    if not mine:
        raise TinychatError("there is no message of yours to edit yet")
    chat.begin_edit(mine[number - 1])


async def delete(chat: ChatView, text: str) -> None:
    line = COMMANDS["delete"].run(chat, text)
    chat.end_edit()
    await chat.apply()
    await chat.say(line)


async def editor(chat: ChatView, text: str) -> None:
    chat.keep_draft()  # the editor may be closed with its terminal
    prompt = chat.box.prompt
    prompt.put(external.edit(chat.app, prompt.text))
    prompt.focus()


async def fork(chat: ChatView, text: str) -> None:
    turns = len(chat.controller.conversation.turns)
    index = _number(text, turns, "fork", "the turns") - 1 if text.strip() else None
    draft = chat.box.prompt.draft
    chat.controller.fork(index)
    await chat.apply()
    chat.box.prompt.put(draft)
    await chat.say("this is a copy; the original is in /conversations")


async def find(chat: ChatView, text: str) -> None:
    await chat.find(text)


def _number(text: str, last: int, command: str, what: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= last:
        raise TinychatError(f"/{command} N: {what} are numbered from 1 to {last}")
    return int(text)


# parameters


async def set_value(chat: ChatView, text: str) -> None:
    await (said(COMMANDS["set"])(chat, text) if text.strip() else parameters_form(chat))


async def mcp(chat: ChatView, text: str) -> None:
    from tinychat.ui.screens.mcp import McpScreen

    chat.app.push_screen(McpScreen(chat.mcp, chat.mcp_file, partial(switch, chat.mcp_file)))


# getting things out


async def copy(chat: ChatView, text: str) -> None:
    c = chat.controller.conversation
    what, _, number = text.strip().lower().partition(" ")
    if what == "all":
        chat.copy(to_markdown(c), "the conversation")
        return
    if c.last_answer is None:
        raise TinychatError("there is no answer to copy yet")
    answer = c.turns[c.last_answer].text
    what = what or ("code" if MarkdownView(answer).code_blocks else "answer")
    if what == "answer":
        chat.copy(c.turns[c.last_answer].text, "the answer")
    elif what == "code":
        chat.copy_code(c.last_answer, number)
    else:
        raise TinychatError("/copy answer, /copy code [N] or /copy all")


async def import_chats(chat: ChatView, text: str) -> None:
    line = await in_daemon(partial(COMMANDS["import"].run, chat, text))
    chat.list_conversations()
    await chat.say(line)


async def stats(chat: ChatView, text: str) -> None:
    s, c = chat.controller.stats, chat.controller.conversation
    if s is None:
        raise TinychatError("no model is loaded")
    lines = [footer_text(c.turns[c.last_answer]) if c.last_answer is not None else "no answer yet"]
    answer = c.turns[c.last_answer].stats if c.last_answer is not None else {}
    lately = s.ttft_s == answer.get("ttft_s", 0.0)
    if not lately:  # the engine has done something else since: a benchmark, or another conversation's answer
        s = replace(s.of_model(), **{k: v for k, v in answer.items() if k in KEPT_STATS})
    if s.prefill_tok_s:
        lines.append(f"prompt {s.prompt_tokens:,} · prefill {speed(s.prefill_tok_s)} tok/s")
    if s.ttft_s:
        then = f" · {1e3 * s.token_s:,.2f} ms per output token" if s.token_s else ""
        lines.append(f"first token after {1e3 * s.ttft_s:,.1f} ms{then}")
    if s.drafted_tokens or s.forced_tokens:
        made = [f"{s.decode_steps:,} steps", f"{s.accepted_tokens:,} accepted of {s.drafted_tokens:,} drafts"]
        if s.mtp_drafted_tokens:
            made[-1] += f" (mtp {s.mtp_accepted_tokens:,} of {s.mtp_drafted_tokens:,})"
        made += [f"{s.forced_tokens:,} forced by the grammar"] * bool(s.forced_tokens)
        lines.append(f"{s.generated_tokens:,} tokens: {' + '.join(made)} · {s.speculation_gain:.2f}× single steps")
    spent = [*s.parts(), ("painting", chat.meter.seconds * lately)]
    each = [f"{what} {1e3 * took:,.1f} ms" for what, took in spent if took]
    for i in range(0, len(each), 3):  # one line would not fit
        lines.append(("      " if i else "time: ") + " · ".join(each[i : i + 3]))
    if s.kernels_per_token:
        parts = [f"{s.kernels_per_token:,} kernel{'s' * (s.kernels_per_token != 1)} per token"]
        parts += [f"in {s.jit_batches:,} batch{'es' * (s.jit_batches != 1)}"] * bool(s.jit_batches)
        lines.append(" ".join(parts) + (f", {s.jit_state}" if s.jit_state else ""))
    if s.gb_s:
        share = f" · {share_of_limit(s)} of {s.limit_gb_s:.1f} GB/s" if s.limit_gb_s else ""
        lines.append(f"{size(s.bytes_per_token)} read per token · {s.gb_s:.1f} GB/s{share}")
    lines.append(f"weights {size(s.weight_bytes)} · KV cache {size(s.kv_bytes)} · process {size(s.rss_bytes)}")
    disk = [f"{s.restored_rows:,} tokens of it read back in {1e3 * s.restore_s:,.1f} ms"] * bool(s.restored_rows)
    disk += [f"{s.saved_rows:,} ({size(s.saved_bytes)}) saved in {1e3 * s.save_s:,.1f} ms"] * bool(s.saved_rows)
    lines += ["KV cache on the disk: " + " · ".join(disk)] * bool(disk)
    lines.append(f"painted {speed(chat.meter.average)} tok/s" if lately and chat.meter.average else "")
    await chat.say("\n  ".join(filter(None, lines)))


# screens


async def model(chat: ChatView, text: str) -> None:
    if text.strip():
        await models.load_named(chat, text)
    else:
        models.choose_model(chat)


async def parameters_form(chat: ChatView) -> None:
    from tinychat.ui.screens.parameters import ParametersScreen

    def done(changed: Parameters | None) -> None:
        if changed is not None:
            chat.controller.set_parameters(changed)

    c = chat.controller
    chat.app.push_screen(ParametersScreen(c.conversation.parameters, c.sampling_defaults), done)


async def conversations(chat: ChatView, text: str) -> None:
    if chat.history is None:
        raise TinychatError("conversations are not being saved")
    from tinychat.ui.screens.conversations import ConversationsScreen

    async def show(id: str, search: str) -> None:
        """Opens conversation `id` at what was searched for, if it is in a turn and not in the name."""
        await models.reopen(chat, id)
        shown = chat.controller.conversation
        if search.strip() and (find_text(shown, search) or version_with(shown, search)):
            await chat.find(search)

    def done(id: str | None) -> None:
        if id:
            chat.run_worker(show(id, screen.search))

    c, history = chat.controller, chat.history

    def rename(id: str, name: str) -> None:
        history.rename(id, name)
        if id == c.conversation.id:
            c.rename(name)

    def delete(id: str) -> None:
        if id == c.conversation.id:
            c.new()
        history.delete(id)
        c.forget(id)

    screen = ConversationsScreen(history, c.conversation.id, rename, delete)
    chat.app.push_screen(screen, done)


async def inspect(chat: ChatView, text: str) -> None:
    from tinychat.ui.screens.inspector import InspectorScreen

    trace, instruments = chat.controller.trace, chat.controller.instruments
    if instruments is None and chat.controller.ready:
        raise TinychatError("only the prompt of a model that runs on this computer can be inspected")
    if instruments is None or not trace.prompt_ids:
        raise TinychatError("there is no prompt to inspect yet; ask something first")
    chosen = list(trace.tokens)
    ids = (*trace.prompt_ids, *(t.id for t in chosen))
    texts = await in_daemon(partial(instruments.token_texts, ids))
    chat.app.push_screen(InspectorScreen(texts, [t.logprob for t in chosen], [t.source for t in chosen]))


async def bench(chat: ChatView, text: str) -> None:
    instruments, tokens = _to_measure(chat, "/bench", text, 64)
    from tinychat.ui.screens.bench import BenchScreen

    chat.app.push_screen(BenchScreen(instruments, tokens, name=chat.controller.conversation.model))


async def profile(chat: ChatView, text: str) -> None:
    instruments, tokens = _to_measure(chat, "/profile", text, 10)
    from tinychat.ui.screens.profile import ProfileScreen

    chat.app.push_screen(ProfileScreen(instruments, tokens, name=chat.controller.conversation.model))


def _to_measure(chat: ChatView, command: str, text: str, default: int) -> tuple[Instrumented, int]:
    """What a command measures, and its N. Raises TinychatError where nothing can be measured now."""
    if text.strip() and (not text.strip().isdecimal() or not 2 <= int(text) <= 100_000):
        raise TinychatError(f"{command} N: N is a number of tokens from 2")
    if not chat.controller.ready:
        raise TinychatError("no model is loaded; choose one with /model")
    if chat.controller.busy:
        raise TinychatError("an answer is being written; stop it with esc, then measure")
    if (instruments := chat.controller.instruments) is None:
        raise TinychatError("only a model that runs on this computer can be measured")
    return instruments, int(text) if text.strip() else default


async def settings_file(chat: ChatView, text: str) -> None:
    from tinychat.ui.screens.settings import SettingsScreen

    def done(own: Settings | None) -> None:
        if own is not None:
            chat.app.post_message(SettingsEdited(own))

    chat.app.push_screen(SettingsScreen(), done)


async def help_screen(chat: ChatView, text: str) -> None:
    from tinychat.ui.screens.help import HelpScreen

    keys = [entry for entry in PROMPT_KEYS if entry[0] != "@" or chat.attaches]
    chat.app.push_screen(HelpScreen(chat.command_entries(), prompt=keys))


async def panel(chat: ChatView, text: str) -> None:
    chat.next_panel()


async def experts(chat: ChatView, text: str) -> None:
    on = switched(text, chat.experts, "experts")
    chat.show_experts(on)
    info = chat.controller.info
    if on and info is not None and not info.experts:
        await chat.say("this model has no experts; the strip appears with one that does")


async def theme(chat: ChatView, text: str) -> None:
    names = chat.app.available_themes
    if not text:
        chat.app.action_change_theme()
    elif found := [name for name in (text.lower(), f"tinychat-{text.lower()}") if name in names]:
        chat.app.theme = found[0]
    else:
        raise TinychatError(f"there is no theme {printable(text)!r}; /theme alone lists them")


async def leave(chat: ChatView, text: str) -> None:
    chat.app.exit()
