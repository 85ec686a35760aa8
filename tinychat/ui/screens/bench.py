"""A benchmark of the loaded model: its progress, its result, and how earlier ones compare."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import DataTable, ProgressBar, Static

from tinychat.backend.instruments import Instrumented, JobDone, JobEvent, JobProgress
from tinychat.backend.protocol import Failed
from tinychat.backend.stream import EventStream
from tinychat.errors import TinychatError, printable
from tinychat.measure import bench, log, tables
from tinychat.measure.results import ModelResult
from tinychat.ui.screens.sheet import Sheet

if TYPE_CHECKING:
    from tinychat.backend.instruments import OnProgress

COLUMNS = (
    "date",
    "decode tok/s",
    "change",
    "prefill tok/s",
    "TTFT s",
    "GB/s",
    "limit",
    "prompt+gen",
    "device",
    "version",
)
WORDS = ("date", "device", "version")  # to the left; numbers to the right


class BenchScreen(Sheet[None]):
    """Runs one benchmark when it opens."""

    TITLE = "Benchmark"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "stop"),
        Binding("escape", "close", "close"),
        Binding("r", "again", "again"),
        Binding("c", "copy", "copy as a Markdown row"),
        Binding("t", "copy_table", "copy the table"),
    ]
    DEFAULT_CSS = """
    BenchScreen .state { height: 1; }
    BenchScreen ProgressBar { width: 1fr; height: 1; margin-bottom: 1; }
    BenchScreen ProgressBar Bar { width: 1fr; }
    BenchScreen ProgressBar Bar > .bar--bar, BenchScreen ProgressBar Bar > .bar--complete {
        color: $primary; background: $foreground 20%;
    }
    BenchScreen .result { height: auto; margin-bottom: 1; }
    BenchScreen.-low ProgressBar, BenchScreen.-low .result { margin: 0; }
    BenchScreen DataTable { height: 1fr; background: transparent; scrollbar-size-horizontal: 1; }
    BenchScreen DataTable > .datatable--header { background: transparent; color: $foreground 60%; text-style: none; }
    BenchScreen DataTable > .datatable--cursor, BenchScreen DataTable:focus > .datatable--cursor {
        background: $primary 30%; color: $foreground; text-style: none;
    }
    """

    def __init__(
        self, backend: Instrumented, n_gen: int = 64, n_prompt: int = 128, repeats: int = 3, name: str = ""
    ) -> None:
        super().__init__()
        self._backend, self._model = backend, name
        self._n_gen, self._n_prompt, self._repeats = n_gen, n_prompt, repeats
        self._events: EventStream[JobEvent] | None = None  # of what runs
        self._cancel = threading.Event()
        self._result: ModelResult | None = None
        self._earlier: list[ModelResult] = []

    def body(self) -> ComposeResult:
        yield Static(classes="state")
        yield ProgressBar(total=1.0, show_eta=False)
        yield Static(classes="result")
        yield DataTable[Text](cursor_type="row", zebra_stripes=False)

    def on_mount(self) -> None:
        i = self._backend.info
        self.set_title("Benchmark", " · ".join([self._model or i.name, i.quant, i.device]))
        self._earlier = log.history(i.fingerprint)
        for column in COLUMNS:
            self.query_one(DataTable).add_column(Text(column, justify="left" if column in WORDS else "right"))
        self._tabulate()
        self.query_one(DataTable).focus()
        self.set_interval(0.2, self._tick)
        self.action_again()

    @property
    def running(self) -> bool:
        """Whether it measures now."""
        return self._events is not None

    def action_again(self) -> None:
        if self.running:
            return
        n_prompt, n_gen, repeats, name = self._n_prompt, self._n_gen, self._repeats, self._model

        def measure(model: Any, report: OnProgress, cancel: threading.Event) -> ModelResult:
            return bench.run(model, n_prompt, n_gen, repeats, report, cancel, name=name)

        self._cancel = threading.Event()
        self._events = self._backend.run_job(measure, self._cancel)
        self._state("starting", 0.0)
        self.refresh_bindings()

    def _tick(self) -> None:
        progress = None
        for event in self._events.poll() if self._events else ():
            match event:
                case JobProgress():
                    progress = event
                case JobDone():
                    self._result = event.result
                    self._earlier.append(event.result)
                    try:
                        log.save(event.result)
                        self._ended("measured and saved", 1.0)
                    except TinychatError as e:
                        self._ended(str(e), 1.0, failed=True)
                    self._tabulate()
                case Failed():
                    self._ended(event.message, 0.0, failed=True)
        if progress and self.running:  # the newest only: a tiny model reports hundreds in a tick
            self._state(progress.text, progress.fraction)

    def _ended(self, text: str, fraction: float, failed: bool = False) -> None:
        self._events = None
        self._state(text, fraction, failed)
        self.refresh_bindings()

    def _state(self, text: str, fraction: float, failed: bool = False) -> None:
        state = self.query_one(".state", Static)
        state.update(Content.styled(printable(text, newlines=False), "$text-error" if failed else ""))
        self.query_one(ProgressBar).update(progress=fraction)

    def _tabulate(self) -> None:
        table, latest = self.query_one(DataTable), self._earlier[-1] if self._earlier else None
        table.clear()
        for r in reversed(self._earlier):
            cells = dict(zip(tables.COLUMNS, tables.row(r))) | {"change": compared(r, latest)}
            style = "bold" if r is self._result else ""
            table.add_row(*(Text(cells[c], style, justify="left" if c in WORDS else "right") for c in COLUMNS))
        self.query_one(".result", Static).update(summary(self._result, self._earlier) if self._result else Content())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("again", "close", "stop"):
            return self.running == (action == "stop")
        return bool(self._earlier) if action == "copy_table" else action != "copy" or self._result is not None

    def action_copy(self) -> None:
        if self._result:
            self.app.copy_to_clipboard(tables.markdown_row(self._result))
            self.notify("copied: one row of a Markdown table")

    def action_copy_table(self) -> None:
        self.app.copy_to_clipboard(tables.markdown_table(self._earlier))
        self.notify(f"copied: a Markdown table of {len(self._earlier)}")

    def action_stop(self) -> None:
        """Ends what runs; what was measured before is kept."""
        self._cancel.set()
        self._state("stopping", 0.0)


def compared(r: ModelResult, latest: ModelResult | None) -> str:
    """How fast `r` decoded against `latest`: '−4%'; '·' where the two did not measure the same."""
    if (
        latest is None
        or r is latest
        or not latest.decode_tok_s
        or (r.n_prompt, r.n_gen) != (latest.n_prompt, latest.n_gen)
    ):
        return "·"
    return f"{r.decode_tok_s / latest.decode_tok_s - 1:+z.0%}".replace("-", "−")


def summary(r: ModelResult, all_runs: list[ModelResult]) -> Content:
    """The figures that count, and a sentence about the run before."""
    limit = f" · {r.limit_share:.0%} of this machine's {r.limit_gb_s:,.1f}" if r.limit_gb_s else ""
    spread = f" ±{r.spread:.0%}" * (len(r.decode_runs) > 1)
    lines = [
        Content.styled(f"{r.decode_tok_s:,.1f} tok/s", "bold $primary")
        + Content(f" decode{spread}   ")
        + Content.styled(f"{r.prefill_tok_s:,.0f} tok/s", "bold")
        + Content(" prefill   ")
        + Content.styled(f"{r.ttft_s:.2f} s", "bold")
        + Content(" to the first token"),
        Content(
            f"{r.gb_s:,.1f} GB/s{limit} · {r.kernels_per_token} kernel{'s' * (r.kernels_per_token != 1)} per token"
        ),
    ]
    before = next((e for e in reversed(all_runs[:-1]) if (e.n_prompt, e.n_gen) == (r.n_prompt, r.n_gen)), None)
    if before and before.decode_tok_s:
        change = r.decode_tok_s / before.decode_tok_s - 1
        word = "faster" if change > 0 else "slower"
        same = abs(change) <= max(r.spread, before.spread)
        text = "within the spread of" if same else f"{abs(change):.0%} {word} than"
        lines.append(
            Content(f"{text} the run of {before.date[:16].replace('T', ' ')} ({before.decode_tok_s:,.1f} tok/s)")
        )
    return Content("\n").join(lines)
