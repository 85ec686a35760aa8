"""Terminal output of the commands: answers and tables on stdout, remarks and progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from tinychat.errors import SLOW, printable


def say(text: str) -> None:
    """One remark on stderr."""
    print(printable(text, newlines=False), file=sys.stderr, flush=True)


def say_notes(notes: Iterable[str]) -> None:
    """Prints an engine's notes on stderr; in a terminal those about a slow device are red."""
    for note in notes:
        text = Text(printable(note, newlines=False), "red" if note.startswith(SLOW) else "")
        Console(stderr=True, highlight=False, soft_wrap=True).print(text)


def show_json(data: dict[str, Any]) -> None:
    """Prints the command's one JSON object on stdout, in ASCII, so that every terminal and encoding can show it."""
    print(json.dumps(data, indent=2))


def show(table: RenderableType) -> None:
    """Prints a table or report on stdout; in a pipe its width is not limited."""
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 250)
    with console.capture() as text:  # rich would turn a closed pipe into its own exit
        console.print(table)
    print("\n".join(map(str.rstrip, text.get().splitlines())))


def grid(
    rows: Sequence[tuple[str, ...]], head: tuple[str, ...] = (), right: tuple[int, ...] = (), gap: int = 2
) -> Table:
    """A plain table of untrusted texts; the columns `right` are set to the right and never folded."""
    lines = Table(box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
    table = lines if head else Table.grid(padding=(0, gap))
    for i in range(max(map(len, [*rows, head]))):
        number = i in right
        table.add_column(
            head[i] if head else "", justify="right" if number else "left", overflow="fold", no_wrap=number
        )
    for row in rows:
        table.add_row(*(Text(printable(cell, newlines=False)) for cell in row))
    return table


def grids(rows: Iterable[tuple[str, tuple[str, ...]]], head: tuple[str, ...], right: tuple[int, ...]) -> RenderableType:
    """(title, row) pairs as a table under each title, which says what is true of all of its rows."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for title, row in rows:
        groups.setdefault(title, []).append(row)
    parts: list[RenderableType] = []
    for title, same in groups.items():
        parts += [Text(printable(title, newlines=False), style="dim"), grid(same, head, right, gap=1)]
    return Group(*parts)


class Bar:
    """Progress of a long job on stderr: a bar in a terminal, nothing in a pipe. `with Bar() as bar: pull(...,
    bar.download)`."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
        )
        console = Console(stderr=True, highlight=False)
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("", total=None, detail="")
        self.told = ""  # the line printed instead of a bar, where there is no terminal

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def download(self, done: int, total: int | None, speed: float, stage: str) -> None:
        """Shows a progress report of `cache.pull`: `done` and `total` in bytes, `speed` in bytes per second."""
        detail = f"{decimal(done)} of {decimal(total)}" if total else decimal(done)
        if speed:
            detail += f" · {decimal(int(speed))}/s"
            if total and total > done:
                detail += f" · {timedelta(seconds=int((total - done) / speed))} left"
        self.progress.update(self.task, description=printable(stage), completed=done, total=total, detail=detail)

    def stage(self, text: str, fraction: float) -> None:
        """Shows a progress report of `Engine.load` or a measurement. Without a terminal it prints one line, once, when
        the work waits for a lock."""
        if self.progress.disable and text.startswith("waiting") and text != self.told:
            self.told = text
            say(text)
        self.progress.update(self.task, description=printable(text), completed=fraction, total=1.0, detail="")
