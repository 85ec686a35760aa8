"""The commands that need no screen: what they do to the controller, and the line that they say."""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tinychat.chat import importing, settings
from tinychat.chat.choosing import here
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import to_markdown
from tinychat.chat.history import History
from tinychat.chat.parameters import PARAMETERS, set_parameter, shown
from tinychat.chat.schema import read_schema
from tinychat.errors import TinychatError, printable
from tinychat.files import expand


class Commanded(Protocol):
    """What the commands work on: the app's chat screen, or the plain chat."""

    @property
    def controller(self) -> Controller: ...
    @property
    def history(self) -> History | None: ...
    def use_folder(self, folder: Path | None) -> None:
        """Offers the built-in tools of `folder`. Raises TinychatError."""
        ...


@dataclass(frozen=True)
class TextCommand:
    """`/name arguments`. `run` gets the text behind the name and returns what to say, "" for nothing; it raises
    TinychatError. `values` are what may stand behind the name, with their meaning."""

    name: str
    arguments: str
    help: str
    run: Callable[[Commanded, str], str]
    values: tuple[tuple[str, str], ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.arguments}".strip()


class Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...


N = TypeVar("N", bound=Named)


def find(name: str, commands: Sequence[N]) -> N:
    """The command `name` (or alias, or the only one it begins). Raises TinychatError that names the nearest."""
    name = name.lower()
    for command in commands:
        if name in (command.name, *command.aliases):
            return command
    begun = [c for c in commands if name and c.name.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    names = [c.name for c in begun] or difflib.get_close_matches(name, [c.name for c in commands]) or ["help"]
    near = ", ".join(f"/{name}" for name in names)
    raise TinychatError(
        f"there is no command /{printable(name)}; did you mean {near}? (// sends a text that begins with /)"
    )


def switched(text: str, now: bool, what: str) -> bool:
    """on, off, or the other one for nothing. Raises TinychatError."""
    if text.strip().lower() not in ("", "on", "off"):
        raise TinychatError(f"usage: /{what} on|off")
    return {"on": True, "off": False}.get(text.strip().lower(), not now)


# the conversation


def _new(session: Commanded, text: str) -> str:
    session.controller.new()
    return ""


def _rename(session: Commanded, text: str) -> str:
    if not text.strip():
        raise TinychatError("usage: /rename NAME")
    session.controller.rename(text)
    return ""


def _project(session: Commanded, text: str) -> str:
    c, name = session.controller, text.strip()
    if name:
        c.move("" if name.lower() == "off" else name)
    now = c.conversation.project
    if not (name or now):
        raise TinychatError("usage: /project NAME|off puts this conversation into a project")
    return f"this conversation is in the project {now}" if now else "this conversation is in no project"


def _delete(session: Commanded, text: str) -> str:
    turns = len(session.controller.conversation.turns)
    if not turns:
        raise TinychatError("there is nothing to delete yet")
    if text.strip() and not (text.strip().isdecimal() and 1 <= int(text) <= turns):
        raise TinychatError(f"/delete N: the turns are numbered from 1 to {turns}")
    what = session.controller.delete(int(text) - 1 if text.strip() else turns - 1)
    return f"deleted {what}; /undo brings it back"


def _replay(session: Commanded, text: str) -> str:
    c, name = session.controller, text.strip()
    if not name:
        raise TinychatError("usage: /replay MODEL asks another model the questions of this conversation")
    if (model := here(name, settings.load())) is None:
        raise TinychatError(f"{printable(name)} is not on this computer; /model {printable(name)} gets it")
    c.replay(model)
    return f"{printable(model.name)} is asked the questions of this conversation; esc ends that"


def _regenerate(session: Commanded, text: str) -> str:
    session.controller.regenerate()
    return ""


def _undo(session: Commanded, text: str) -> str:
    session.controller.undo()
    return ""


def _version(session: Commanded, text: str) -> str:
    c, numbers = session.controller.conversation, text.split()
    forks = {turn.parent for turn in c.others}
    several = [i for i, turn in enumerate(c.turns) if turn.parent in forks]
    if not several:
        raise TinychatError("there is one version of everything; an edit or a new answer makes another")
    if not numbers:
        return "\n".join(f"turn {i + 1}: {c.version(i)}" for i in several)
    which = int(numbers[1]) - 1 if len(numbers) > 1 and numbers[1].isdecimal() else several[-1]
    versions = c.versions(which) if which in several else ()
    if len(numbers) > 2 or not numbers[0].isdecimal() or not 1 <= int(numbers[0]) <= len(versions):
        raise TinychatError("/version N TURN shows version N of a turn; /version alone lists those with several")
    session.controller.show(versions[int(numbers[0]) - 1].id)
    return ""


def _skip(session: Commanded, text: str) -> str:
    session.controller.skip_thinking()
    return ""


def _compact(session: Commanded, text: str) -> str:
    if text.strip() and not (text.strip().isdecimal() and int(text)):
        raise TinychatError("/compact N: N is how many of your last messages stay as they are")
    session.controller.compact(int(text) if text.strip() else 1)
    return ""


def _continue(session: Commanded, text: str) -> str:
    session.controller.go_on()
    return ""


def _start(session: Commanded, text: str) -> str:
    if not text.strip():
        raise TinychatError("usage: /start TEXT begins the answer with TEXT")
    session.controller.prefill(text)
    return ""


# parameters


def _use(session: Commanded, **changes: Any) -> None:
    session.controller.set_parameters(replace(session.controller.conversation.parameters, **changes))


def _think(session: Commanded, text: str) -> str:
    on = switched(text, session.controller.conversation.parameters.thinking, "think")
    _use(session, thinking=on)
    return f"thinking is {'on' if on else 'off'}, if the model supports it"


def _system(session: Commanded, text: str) -> str:
    now, given = session.controller.conversation.parameters.system, text.strip()
    if not given:
        return f"the system prompt is: {now}" if now else "there is no system prompt; /system TEXT sets one"
    off = given.lower() == "off"
    _use(session, system="" if off else given)
    return "the system prompt is removed" if off else "the system prompt is set, from the next message on"


def _set(session: Commanded, text: str) -> str:
    name, _, value = text.strip().partition(" ")
    c = session.controller
    p, defaults = c.conversation.parameters, c.sampling_defaults
    if not name:
        return ", ".join(f"{name} {shown(p, name, defaults)}" for name in PARAMETERS)
    changed = set_parameter(p, name, value) if value.strip() or name not in PARAMETERS else p
    if changed is not p:
        c.set_parameters(changed)
    meaning = "" if value.strip() else f": {PARAMETERS[name].help}"
    return f"{name} is {shown(changed, name, defaults)}{meaning}"


def _raw(session: Commanded, text: str) -> str:
    c = session.controller
    c.raw = switched(text, c.raw, "raw")
    if c.raw:
        return "raw: what you write is the whole prompt, special tokens and all; nothing is added or taken away"
    return "raw is off: messages go through the chat template"


def _schema(session: Commanded, text: str) -> str:
    c, name = session.controller, text.strip()
    now = c.conversation.parameters.schema
    if name == "off":
        _use(session, schema=None)
        return "answers are free again"
    if name:
        _use(session, schema=read_schema(expand(name)))
        called = "; no tools are called" * bool(c.toolbox.names)
        return "answers follow this JSON schema from the next message on" + called
    if now is None:
        raise TinychatError("/schema FILE holds answers to the JSON schema in a file")
    return f"answers follow this JSON schema: {json.dumps(now, ensure_ascii=False)}; /schema off ends it"


def _tools(session: Commanded, text: str) -> str:
    c, name = session.controller, text.strip()
    if name == "off":
        session.use_folder(None)
        return "the tools of the folder are off"
    if name:
        session.use_folder(expand(name))
    if not c.toolbox.names:
        raise TinychatError("/tools DIR lets the model work in a folder; it asks before it reads, changes or runs")
    if c.info is not None and not c.info.can.tools:
        raise TinychatError("what answers now cannot call tools")
    return f"tools{' work' * bool(name)}: {', '.join(c.toolbox.names)}; /tools off takes them away"


# files


def _save(session: Commanded, text: str) -> str:
    kind, _, name = text.strip().partition(" ")
    c = session.controller.conversation
    if kind not in ("md", "json", ""):
        kind, name = ("json" if kind.endswith(".json") else "md"), text.strip()
    kind = kind or "md"
    if not c.turns:
        raise TinychatError("there is nothing to save yet")
    path = expand(name.strip()) if name.strip() else _free(c.title, kind)
    data = to_markdown(c) if kind == "md" else json.dumps(c.as_dict(), indent=1, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", errors="replace") as f:
            try:
                f.write(data)
                f.flush()
            except OSError:
                path.unlink()
                raise
    except FileExistsError:
        raise TinychatError(f"{printable(str(path))} exists; nothing was written, choose another name") from None
    except (OSError, ValueError) as e:  # ValueError: a name that no file can have
        why = (e.strerror if isinstance(e, OSError) else None) or str(e)
        raise TinychatError(f"{printable(str(path))}: {why.lower()}; nothing was saved") from None
    return f"saved as {printable(str(path.absolute()), newlines=False)}"


def _import(session: Commanded, text: str) -> str:
    if session.history is None:
        raise TinychatError("conversations are not being saved")
    if not text.strip():
        raise TinychatError("usage: /import FILE takes over conversations of ChatGPT or of llama.cpp's web page")
    return f"{importing.take(session.history, expand(text.strip()))}; /conversations lists them"


def _free(title: str, kind: str) -> Path:
    """A file name in the working folder that is not taken."""
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40] or "conversation"
    stem = f"{slug}-{time.strftime('%Y%m%d')}"
    names = [f"{stem}.{kind}", *(f"{stem}-{n}.{kind}" for n in range(2, 1000))]
    return next(p for p in map(Path, names) if not p.exists())


ON_OFF = (("on", ""), ("off", ""))
COMMANDS: dict[str, TextCommand] = {
    c.name: c
    for c in (
        TextCommand("new", "", "new conversation; this one is kept", _new, aliases=("clear",)),
        TextCommand("rename", "NAME", "name this conversation", _rename),
        TextCommand("project", "NAME|off", "put this conversation into a project", _project),
        TextCommand("regenerate", "", "a new answer; the old one stays as a version", _regenerate),
        TextCommand("replay", "MODEL", "ask another model the same questions; both stay, as versions", _replay),
        TextCommand("delete", "[N]", "delete the last question and answer (or turn N); /undo brings it back", _delete),
        TextCommand("undo", "", "undo the last edit, new answer, switch, summary or delete", _undo),
        TextCommand(
            "version",
            "[N [TURN]]",
            "show version N of the last turn with several (or of turn TURN); alone: list them",
            _version,
        ),
        TextCommand("skip", "", "stop thinking, go to the answer", _skip),
        TextCommand("compact", "[N]", "summarise all but your last message (or the last N)", _compact),
        TextCommand("continue", "", "continue the last answer", _continue),
        TextCommand("start", "TEXT", "begin the answer with TEXT", _start),
        TextCommand("think", "on|off", "let reasoning models think first", _think, ON_OFF),
        TextCommand("system", "TEXT|off", "the system prompt", _system, (("off", "none"),)),
        TextCommand(
            "set",
            "NAME VALUE",
            "set a parameter; alone: all of them",
            _set,
            tuple((name, spec.help) for name, spec in PARAMETERS.items()),
        ),
        TextCommand(
            "schema",
            "FILE|off",
            "hold answers to the JSON schema in a file",
            _schema,
            (("off", "free answers"),),
        ),
        TextCommand(
            "tools",
            "DIR|off",
            "let the model read a folder and, when you allow it, change it",
            _tools,
            (("off", "no tools"),),
        ),
        TextCommand("raw", "on|off", "prompts without the chat template, plain output", _raw, ON_OFF),
        TextCommand(
            "save",
            "md|json [FILE]",
            "save the conversation to a file",
            _save,
            (("md", "Markdown"), ("json", "all details, for programs")),
            ("export",),
        ),
        TextCommand("import", "FILE", "take over conversations of ChatGPT or llama.cpp's web page", _import),
    )
}
