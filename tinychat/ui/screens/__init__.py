"""Full-size dialogs over the chat: each is one file, testable alone in a tiny host app, and imported when it is first
opened, so that the start does not wait for it."""

import importlib
import pkgutil


def import_all() -> None:
    """Imports them before they are wanted, for use while nothing else is to be done."""
    for module in pkgutil.iter_modules(__path__, __name__ + "."):
        importlib.import_module(module.name)
