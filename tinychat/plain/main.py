"""Starts the plain chat."""

from __future__ import annotations

from tinychat.chat import settings
from tinychat.chat.choosing import here, remember
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import Conversation
from tinychat.chat.start import Start
from tinychat.errors import TinychatError
from tinychat.models import cache
from tinychat.models.registry import resolve
from tinychat.plain.chat import PlainChat
from tinychat.plain.printer import Printer
from tinychat.plain.reading import LineReader
from tinychat.tools.permission import Permissions


def main(begun: Start) -> int:
    """Runs the plain chat; where `begun` has no model, /model chooses what answers."""
    own, history, mcp, printer = begun.own, begun.history, begun.mcp, Printer()
    for problem in begun.problems:
        printer.note(problem, error=True)
    controller = Controller(
        begun.open_backend,
        begun.conversation or Conversation(parameters=own.parameters),
        save=history.save if history else None,
        permissions=Permissions.of_user(),
        stop_repetition=own.stop_repetition,
    )

    def load(name: str) -> str:
        if not name.strip():
            names = [entry.name for entry in cache.entries() if not entry.partial]
            return "\n".join(names) or "no model is here; `tinychat cache pull NAME` downloads one"
        if (found := here(name.strip(), settings.load())) is None:
            name = resolve(name.strip(), own.models).name
            raise TinychatError(f"{name} is not on this computer; `tinychat cache pull {name}` downloads it")
        controller.load(found.name, found.path, **{**found.options, **begun.load_options})
        remember(found, settings.update)
        return ""

    reader = LineReader(history.prompts() if history else ())
    chat = PlainChat(controller, reader, load, history, mcp, printer)
    if begun.tools is not None:
        chat.use_folder(begun.tools)
    mcp.start()
    if begun.model is not None:
        controller.load(begun.model.name, begun.model.path, **begun.model.options)
    else:
        printer.note("no model is loaded; /model lists those that are here, /model NAME loads one")
    try:
        chat.run()
    finally:
        mcp.close()
        if history is not None:
            history.close()
    return 0
