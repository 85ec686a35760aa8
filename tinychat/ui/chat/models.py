"""Which model and which conversation the chat is on: choosing, loading, reopening."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tinychat.chat import servers, settings
from tinychat.chat.choosing import here
from tinychat.errors import TinychatError
from tinychat.files import expand
from tinychat.models import cache
from tinychat.models.registry import Model, resolve
from tinychat.ui.chat.view import ChatView
from tinychat.ui.screens.sheet import in_daemon

if TYPE_CHECKING:
    from tinychat.ui.screens.picker import PickedModel


def choose_model(chat: ChatView, text: str = "") -> None:
    """Opens the picker, with `text` in its field, and loads what is picked."""
    from tinychat.ui.screens.picker import PickerScreen  # not before it is wanted: it would make the start slower

    def picked(model: PickedModel | None) -> None:
        if model is not None and not (chat.controller.ready and chat.controller.loaded == model.path):
            load(chat, model)

    stats, p = chat.controller.stats, chat.controller.conversation.parameters
    freed = stats.weight_bytes + stats.kv_bytes if stats else 0
    choice = chat.controller.choice
    loaded = Model(choice.name, path=choice.path) if choice is not None and "server" not in choice.options else None
    chat.app.push_screen(PickerScreen(p.context or 4096, freed, chat.downloads, text, loaded), picked)


def first_model(chat: ChatView) -> None:
    """Without a model: the picker where some are on this computer, three suggestions where there is none."""
    from tinychat.ui.screens.first_run import FirstRun
    from tinychat.ui.screens.picker import PickedModel

    def picked(model: PickedModel | str | None) -> None:
        if isinstance(model, PickedModel):
            load(chat, model)
        elif model == "all":
            choose_model(chat)

    if any(m.path for m in settings.load().models) or cache.entries():
        choose_model(chat)
    else:
        chat.app.push_screen(FirstRun(chat.downloads), picked)


def load(chat: ChatView, model: PickedModel) -> None:
    if model.server is not None:
        chat.controller.load(model.name, model.path, server=model.server)
    else:
        chat.controller.load(model.name, model.path, preset=model.preset, threads=settings.load().threads)
    chat.paint_panel()


async def load_named(chat: ChatView, text: str) -> None:
    """Loads the model that `text` names, if it is on this computer or a saved server; else the picker opens. Raises
    TinychatError."""
    from tinychat.ui.screens.picker_rows import is_place

    text, own = text.strip(), settings.load()
    if os.path.isdir(expand(text)) or (servers.is_address(text) and servers.find(own.servers, text) is None):
        choose_model(chat, text)
    elif (found := here(text, own)) is not None:
        chat.controller.load(found.name, found.path, **found.options)
        chat.paint_panel()
    else:
        choose_model(chat, text if is_place(text) else resolve(text, own.models).name)


async def reopen(chat: ChatView, id: str) -> None:
    """Shows a saved conversation; its model is loaded when another one runs and it is on this computer."""
    assert chat.history is not None
    try:
        shown = None
        while chat.controller.conversation is not shown:  # again where the chat went on while the disk was read
            # What runs is stored before the same conversation is read, as another program may have left it.
            chat.controller.interrupt()
            if waiting := chat.controller.take_back_queue():
                chat.give_back(waiting)
            shown = chat.controller.conversation
            conversation = await in_daemon(partial(chat.history.load, id))
        present = chat.controller.conversation.model
        if not conversation.model:  # it was imported
            conversation = replace(conversation, model=present)
        chat.controller.open(conversation)
        await chat.apply()
        if conversation.model and conversation.model != present:
            await load_named(chat, conversation.model)
    except TinychatError as e:
        await chat.say(str(e), error=True)
