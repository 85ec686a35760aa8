"""What an empty conversation shows: what to do first."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from tinychat.errors import printable

TIPS = (
    ("enter", "sends; shift+enter or ctrl+j: new line"),
    ("/", "lists the commands"),
    ("esc", "stops an answer; what is written stays"),
    ("ctrl+r", "regenerates the answer; ctrl+up selects messages"),
    ("ctrl+p", "all commands; f1 is the help"),
)


class Welcome(Static):
    """One invitation and five keys; with no model, the way to one."""

    _shown: tuple[str, bool] | None = None

    def show(self, model: str, loading: bool, attaches: bool) -> None:
        """`attaches`: @ reads a file."""
        if (model, loading) == self._shown:
            return
        self._shown = model, loading
        if loading:
            first = f"Loading {model} … you can already type; it is sent when the model is ready."
        elif model:
            first = f"Ask {model} something."
        else:
            first = "Choose a model with /model (or F2). It is downloaded once and then runs on this computer, offline."
        tips = [(key, f"{text}, @ attaches a text file" if key == "/" and attaches else text) for key, text in TIPS]
        width = max(len(key) for key, _ in tips)
        lines = [Content(printable(first, newlines=False)).stylize("bold"), Content("")]
        lines += [
            Content.assemble((key.rjust(width), "$accent"), "  ", (text, "$foreground 60%")) for key, text in tips
        ]
        self.update(Content("\n").join(lines))
