"""Measures every variant in every quant type on every executor against the float64 forward.

    python -m scripts.exactness_table                   all but CUDA: 30 minutes (reference compiles)
    python -m scripts.exactness_table --devices cpu     3 minutes
    python -m scripts.exactness_table --devices cuda --variants deepseek2_glm llama --quants Q4_0 Q4_K_M

Rows go to docs/exactness.csv, in place of older ones of the same device, variant and quant; the tables in
docs/exactness.md are written from all of them.
"""

import argparse
import csv
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from tests.support import tiny
from tests.support.blocks import MODEL_QUANTS
from tests.support.exactness import divergence, relative
from tests.support.forward64 import forward
from tinychat.engine import Engine

DOCS = Path(__file__).parent.parent / "docs"
DEVICES = ("reference", "cpu", "cuda")
IDS = np.random.default_rng(0).integers(0, 290, 24).tolist()
BEGIN, END = "<!-- tables: python -m scripts.exactness_table -->", "<!-- end of tables -->"


@dataclass(frozen=True)
class Row:
    """Of one model's logits: relative L2 over all tokens and of the median token, largest KL in nats, share of equal
    argmax."""

    device: str
    variant: str
    quant: str
    l2: float
    median_l2: float
    max_kl: float
    argmax: float


def measure(device: str, variant: str, quant: str, folder: Path) -> Row:
    path = tiny.write(folder / "m.gguf", variant, quant)
    want = forward(path, IDS)
    engine = Engine.load(path, max_context=32, device=device)
    got = engine.logits(IDS).astype(np.float64)
    engine.close()
    return Row(
        device,
        variant,
        quant,
        float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        float(np.median(relative(got, want))),
        float(divergence(got, want).max()),
        float((got.argmax(1) == want.argmax(1)).mean()),
    )


def load(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with open(path, newline="") as f:
        return [
            Row(r["device"], r["variant"], r["quant"], *(float(r[k.name]) for k in fields(Row)[3:]))
            for r in csv.DictReader(f)
        ]


def save(path: Path, rows: Iterable[Row]) -> None:
    place = {name: i for names in (DEVICES, tiny.NAMES, MODEL_QUANTS) for i, name in enumerate(names)}
    with open(path, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(k.name for k in fields(Row))
        for r in sorted(rows, key=lambda r: (place[r.device], place[r.variant], place[r.quant])):
            out.writerow([v if isinstance(v, str) else f"{v:.3g}" for v in asdict(r).values()])


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown."""
    for device in DEVICES:
        mine = [r for r in rows if r.device == device]
        if not mine:
            continue
        yield f"### {device}: {len(mine)} models\n"
        yield from _worst("quant", MODEL_QUANTS, mine)
        yield from _worst("variant", tiny.NAMES, mine)
        quants = [q for q in MODEL_QUANTS if any(r.quant == q for r in mine)]
        yield "Relative L2 over all tokens:\n"
        yield f"| variant | {' | '.join(quants)} |"
        yield "|---|" + "---|" * len(quants)
        cell = {(r.variant, r.quant): f"{r.l2:.0e}".replace("e-0", "e-") for r in mine}
        for v in tiny.NAMES:
            if any(r.variant == v for r in mine):
                yield f"| {v} | {' | '.join(cell.get((v, q), '') for q in quants)} |"
        yield ""


def _worst(by: str, names: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {by} | relative L2, median model | worst | max KL, median model | worst | argmax agrees |"
    yield "|---|---|---|---|---|---|"
    pick: Callable[[Row], str] = (lambda r: r.quant) if by == "quant" else (lambda r: r.variant)
    for name in names:
        if of := [r for r in rows if pick(r) == name]:
            l2, kl = [r.l2 for r in of], [r.max_kl for r in of]
            yield (
                f"| {name} | {np.median(l2):.1e} | {max(l2):.1e} | {np.median(kl):.0e} | {max(kl):.0e} | "
                f"{np.mean([r.argmax for r in of]):.2%} |"
            )
    yield ""


def render(page: Path, rows: Sequence[Row]) -> None:
    """Writes the tables between the markers of `page`."""
    body = "\n".join([BEGIN, "", *tables(rows), END])
    text = page.read_text()
    page.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: body, text, flags=re.S))


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m scripts.exactness_table", description=__doc__.splitlines()[0])
    p.add_argument("--devices", nargs="+", choices=DEVICES, default=DEVICES[:2])
    p.add_argument("--variants", nargs="+", choices=tiny.NAMES, default=tiny.NAMES)
    p.add_argument("--quants", nargs="+", choices=MODEL_QUANTS, default=MODEL_QUANTS)
    a = p.parse_args()
    todo = [(d, v, q) for d in a.devices for v in a.variants for q in a.quants]
    rows = {(r.device, r.variant, r.quant): r for r in load(DOCS / "exactness.csv")}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for i, (device, variant, quant) in enumerate(todo):
            left = (time.perf_counter() - started) / max(i, 1) * (len(todo) - i)
            if sys.stderr.isatty():
                print(
                    f"\r\x1b[K{i + 1}/{len(todo)} {device} {variant} {quant}, {left:.0f} s left",
                    end="",
                    file=sys.stderr,
                )
            rows[device, variant, quant] = measure(device, variant, quant, Path(folder))
    save(DOCS / "exactness.csv", rows.values())
    render(DOCS / "exactness.md", list(rows.values()))


if __name__ == "__main__":
    main()
