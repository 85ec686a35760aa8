"""Full-size dialogs over the chat: each is one file, testable alone in a tiny host app, and imported when it is first
opened, so that the start does not wait for it."""

import importlib
import pkgutil
from pathlib import Path

# The app reads them at its start: when a screen that opens brings a file of its own, Textual parses every rule again
# and styles every widget again, 60 ms of CPU time.
STYLES = sorted(Path(__path__[0]).glob("*.tcss"))


def import_all() -> None:
    """Imports them before they are wanted, for use while nothing else is to be done."""
    for module in pkgutil.iter_modules(__path__, __name__ + "."):
        importlib.import_module(module.name)
