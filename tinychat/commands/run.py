"""`tinychat run`: one answer to one prompt."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tinychat import process
from tinychat.chat import servers
from tinychat.chat.calling import ROUNDS, Written, result_of, stuck
from tinychat.chat.conversation import KEPT_STATS, Attachment, Call, Conversation, Turn
from tinychat.chat.parameters import Parameters
from tinychat.chat.request import request_for
from tinychat.chat.schema import read_schema
from tinychat.commands.loading import obtain, prompt_text, settings_of_user, stdin_text
from tinychat.console import Bar, say, say_notes, show_json
from tinychat.errors import TinychatError, printable
from tinychat.files import expand
from tinychat.models.registry import Model, resolve, sampling_of
from tinychat.tools.permission import Permissions
from tinychat.tools.protocol import CallContext, CallRefused, PermissionAnswer, Question
from tinychat.tools.toolbox import Toolbox
from tinychat.units import speed

if TYPE_CHECKING:
    from tinychat.backend.protocol import Backend, DoesNotFit, Finished, Request
    from tinychat.engine.speculation import Speculate
    from tinychat.tools.mcp import McpServers, McpStatus
    from tinychat.tools.protocol import Tool


def run(
    text: str | None,
    prompt: str,
    *,
    server: str | None,
    server_model: str | None,
    key_file: str | None,
    raw: bool,
    think: bool | None,
    files: Sequence[str],
    as_json: bool,
    device: str | None,
    threads: int | None,
    speculate: Speculate,
    tools: str | None,
    mcp_file: str | None,
    schema: str | None,
    conversation: str | None,
    **given: str | float | None,
) -> None:
    """Writes the answer to stdout, and before it the answers that call tools; thinking goes to stderr if stderr is a
    terminal.

    `given`: parameters of the chat (temperature, system, ...); those of the conversation replace those that are None,
    else the settings. `conversation` names one of the history to continue, or to begin; it keeps the question, the
    answers and what was `given`. With `as_json` nothing is painted while the answer is generated, so `painting_s` is 0.
    """
    if raw and (tools is not None or mcp_file is not None):
        raise TinychatError("tools need the chat template; --tools and --mcp cannot be used with --raw")
    if schema is not None and (raw or tools is not None or mcp_file is not None):
        other = "--raw" if raw else "--tools and --mcp: such an answer calls none"
        raise TinychatError(f"--schema cannot be used with {other}")
    form: Mapping[str, Any] | None = None if schema is None else read_schema(expand(schema))
    mcp = None if mcp_file is None else _mcp_servers(expand(mcp_file))
    toolbox, permissions = _toolbox(tools, mcp), Permissions.of_user()
    question = replace(_question(prompt, files), raw=raw)
    own = settings_of_user()
    kept, talk = None, Conversation(parameters=own.parameters)
    if conversation is not None:
        from tinychat.commands.kept import KeptConversation

        kept = KeptConversation(conversation, own.parameters)
        talk = kept.conversation
    chosen = _parameters(talk.parameters, given)
    talk = replace(talk, parameters=replace(chosen, schema=form or chosen.schema)).settled().add(question)
    form = talk.parameters.schema
    seed = secrets.randbits(32) if chosen.seed is None else chosen.seed
    backend: Backend
    defaults: Mapping[str, float]
    if server is not None:
        from tinychat.backend.remote import RemoteBackend

        at = servers.chosen(own.servers, server, server_model, key_file)
        backend = RemoteBackend.open(at.url, at.model, at.key)
        name, defaults = backend.info.name, backend.info.sampling
    else:
        assert text is not None, "cli refuses it"
        model = resolve(text, own.models)
        options = {"device": device, "threads": threads or own.threads, "speculate": speculate}
        backend, name = _local(model, talk, options), model.name
        defaults = backend.info.sampling or sampling_of(model.name)
    talk = replace(talk, model=name)
    if toolbox is not None and not backend.info.can.tools:
        raise TinychatError("what answers here cannot call tools; leave out --tools and --mcp")
    shown, called = _Printer(quiet=as_json), list[dict[str, object]]()
    with closing(backend), closing(mcp) if mcp else nullcontext():
        for status in _started(mcp) if mcp else ():
            say(f"the MCP server {status.config.name} cannot be used: {status.why or 'it is not ready'}")
        say_notes(backend.info.notes)
        tools_offered = toolbox.definitions if toolbox is not None else ()
        choice: Literal["auto", "none"] = "auto"
        for round in range(1, ROUNDS + 2):
            drop: Literal["oldest", "refuse"] = "oldest" if chosen.drop_oldest else "refuse"
            request = request_for(
                talk, seed=seed, overflow=drop, tools=tools_offered, tool_choice=choice, defaults=defaults
            )
            said = _Said()
            try:
                _answer(backend, replace(request, thinking=think), shown, said)
            finally:
                talk = talk.add(said.turn(seed))
                if kept is not None:
                    kept.save(talk)
            if toolbox is None or not said.calls or round > ROUNDS:
                break
            talk = _call(toolbox, permissions, talk, round, called, as_json)
            if line := stuck(talk):
                say(line)
            choice = "none" if line else "auto"
    assert said.finished is not None, "or it has raised"
    finished = said.finished
    stats = finished.stats
    if as_json:
        show_json(
            {
                "model": name,
                "text": said.text["answer"],
                "thinking": said.text["thinking"],
                "token_ids": said.ids,
                "calls": called,
                "stop_reason": finished.reason,
                "seed": seed,
                "device": backend.info.device,
                "threads": backend.info.threads,
                **stats.as_dict(),
                "painting_s": 0.0,
            }
        )
    elif sys.stderr.isatty():
        first = f"first token after {stats.ttft_s:.2f} s"
        say(f"{stats.generated_tokens} tokens · {speed(stats.decode_tok_s)} tok/s · {first}")
    if finished.reason == "context":
        say(f"the context of {backend.info.max_context:,} tokens is full; `--context N` loads the model with more")
    if form is not None and finished.reason != "eos":
        raise TinychatError(f"the answer ended ({finished.reason}) before its JSON did")


@dataclass
class _Said:
    """An answer, as far as it came, and the tool calls at its end."""

    finished: Finished | None = None
    text: dict[str, str] = field(default_factory=lambda: {"answer": "", "thinking": ""})
    ids: list[int] = field(default_factory=list)
    calls: tuple[Call, ...] = ()

    def turn(self, seed: int) -> Turn:
        kept = {k: getattr(self.finished.stats, k) for k in KEPT_STATS} if self.finished else {}
        return Turn(
            "assistant",
            self.text["answer"],
            self.text["thinking"],
            stop_reason=self.finished.reason if self.finished else "stopped",
            stats={**kept, "generated_tokens": len(self.ids), "seed": seed},
            calls=self.calls,
        )


def _answer(backend: Backend, request: Request, shown: _Printer, said: _Said) -> None:
    """Shows one answer while it is generated, and puts it into `said`. Raises TinychatError."""
    from tinychat.backend.protocol import DoesNotFit, Failed, Finished, Piece, Prompted, ToolCall

    written = Written()
    try:
        for event in backend.answer(request):
            match event:
                case Prompted():
                    say_notes(filter(None, (event.note,)))
                case Piece():
                    said.text[event.kind] += event.text
                    said.ids += [t.id for t in event.tokens]
                    shown.add(event.text, event.kind)
                case ToolCall():
                    written.take(event)
                case DoesNotFit():
                    raise TinychatError(_too_long(event))
                case Failed():
                    raise TinychatError(event.message)
                case Finished():
                    said.finished = event
    finally:
        request.cancel.set()
        shown.end()
    if said.finished is not None and said.finished.reason in ("eos", "tool_calls"):
        said.calls = written.made(said.finished.reason)
    if written.note:
        say(f"a call could not be read: {written.note}")


def _toolbox(folder: str | None, mcp: McpServers | None) -> Toolbox | None:
    """The tools of `folder` and of MCP servers; naming a folder on the command line allows reading it."""
    own: Sequence[Tool] = ()
    if folder is not None:
        from tinychat.tools.builtin import tools_of
        from tinychat.tools.folder import Folder

        own = tools_of(Folder(expand(folder)))
    elif mcp is None or not mcp.status:
        return None
    return Toolbox(own, more=lambda: mcp.tools if mcp else ())


def _mcp_servers(file: Path) -> McpServers:
    """The servers that `file` lists, not started."""
    from tinychat.tools.mcp import McpServers
    from tinychat.tools.mcp_config import read_servers

    if not file.is_file():
        raise TinychatError(f"{printable(str(file), newlines=False)}: there is no such file")
    return McpServers(read_servers(file))


def _started(mcp: McpServers) -> list[McpStatus]:
    """Starts them and waits; those that are not ready."""
    mcp.start()
    mcp.wait()
    return [status for status in mcp.status if status.config.on and status.stage != "ready"]


def _call(
    toolbox: Toolbox,
    permissions: Permissions,
    talk: Conversation,
    round: int,
    called: list[dict[str, object]],
    quiet: bool,
) -> Conversation:
    """Runs the calls of the last answer one after the other. Returns the conversation with their results."""
    for call in talk.pending:
        began = time.monotonic()
        context = CallContext(partial(_ask, permissions), threading.Event())
        result = result_of(call, talk.repeats(call), toolbox, context)
        spent = time.monotonic() - began
        made = {"round": round, "name": call.name, "arguments": call.arguments}
        called.append({**made, "result": result.text, "state": result.state, "seconds": spent})
        if not quiet:
            say(f"▸ {call.name} {call.arguments[:200]} · {result.state} · {spent:.2f} s")
        stats = {"seconds": spent}
        talk = talk.add(Turn("tool", result.text, call_id=call.id, stop_reason=result.state, stats=stats))
    return talk


def _ask(permissions: Permissions, question: Question) -> None:
    """Asks the user on the terminal. Raises CallRefused when the user refuses or there is no terminal."""
    if question.kind == "read" or permissions.allows(question, "run"):
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CallRefused("this needs the user's word, and there is no terminal to ask on")
    say(question.title)
    print(f"\n{printable(question.detail)}\n", file=sys.stderr)
    say("y: yes, once · c: and all like it in this run · a: always for exactly this · anything else: no")
    answers: dict[str, PermissionAnswer] = {"y": "once", "c": "conversation", "a": "always"}
    answer = answers.get(sys.stdin.readline().strip().lower(), "no")
    if answer == "no":
        raise CallRefused("the user refused this")
    permissions.remember(question, answer, "run")


def _local(model: Model, talk: Conversation, options: dict[str, Any]) -> Backend:
    """The model on this machine, with a context that the conversation fits."""
    p, text = talk.parameters, "\n".join(turn.content for turn in talk.sent)
    context = p.context or _needed_context(model, text, p.max_tokens)
    path = obtain(model)
    with Bar() as bar, process.starting():
        bar.stage("loading the engine", 0.0)
        from tinychat.backend.factory import open_backend

        return open_backend(path, max_context=context, preset=model.preset, progress=bar.stage, **options)


def _question(prompt: str, files: Sequence[str]) -> Turn:
    """The prompt with its attachments: `files`, and the text of stdin where stdin is a pipe or a file."""
    from tinychat.chat.attach import read

    attached = [read(expand(name), name) for name in files]
    if prompt != "-" and _stdin_has_text() and (text := stdin_text()).strip():
        attached.append(Attachment("stdin", text))
    return Turn("user", prompt_text(prompt), files=tuple(attached))


def _stdin_has_text() -> bool:
    """Whether stdin is a pipe or a file: not a terminal, not /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # stdin is closed, or is an object without a descriptor
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _parameters(own: Parameters, given: dict[str, str | float | None]) -> Parameters:
    """`own`, replaced by those in `given` that are not None."""
    values = {k: v for k, v in given.items() if v is not None}
    mine = {k: values.pop(k) for k in [*values] if k in ("seed", "max_tokens", "context", "system")}
    said = own.chosen | values.keys()
    return replace(own, sampling=replace(own.sampling, **values), chosen=said, **mine)  # type: ignore[arg-type]


def _too_long(event: DoesNotFit) -> str:
    u = event.usage
    return (
        f"the prompt has {u.prompt:,} tokens and an answer needs {event.reserve:,}, the context holds {u.limit:,}; "
        "shorten it or load the model with a larger one (--context N)"
    )


class _Printer:
    """Writes an answer while it is generated, without control characters; thinking is dimmed, on stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.wrote, self.thought = quiet, False, False
        self.clean = printable if sys.stdout.isatty() else lambda text: text

    def add(self, text: str, kind: str) -> None:
        if self.quiet or not text:
            return
        if kind == "thinking":
            if sys.stderr.isatty():
                self.thought = True
                print(f"\x1b[2m{printable(text)}\x1b[0m", end="", file=sys.stderr, flush=True)
            return
        if self.thought:
            print(file=sys.stderr)
            self.thought = False
        self.wrote = True
        print(self.clean(text), end="", flush=True)

    def end(self) -> None:
        if self.wrote:
            print(flush=True)
            self.wrote = False


def _needed_context(model: Model, prompt: str, max_tokens: int | None) -> int | None:
    """Tokens of context for a long `prompt` and its answer; None when the engine's default is enough."""
    if len(prompt.encode()) + (max_tokens or 0) < 3000:
        return None
    from tinychat.engine.config import ModelConfig
    from tinychat.engine.engine import DEFAULT_CONTEXT
    from tinychat.engine.gguf import GGUF
    from tinychat.engine.tokenizer import Tokenizer

    gguf = GGUF.open(obtain(model))
    needed = len(Tokenizer(gguf.metadata).encode(prompt)) + 256 + (max_tokens or 1024)
    return min(needed, ModelConfig.from_gguf(gguf).context) if needed > DEFAULT_CONTEXT else None
