"""Red flags: faults of a decode step, in words, each with the figure that shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from tinychat.kernels.profile import StepProfile
from tinychat.measure.profile.report import REST, SAMPLING, STALLS, Flag, OpTime, Profile

KINDS = (
    "slow memory",
    "one thread",
    "launch-bound",
    "barrier-bound",
    "serial",
    "too few tasks",
    "byte-wise loads",
    "serial reduction",
    "sampling",
    "cold caches",
    "disturbed",
    "above the limit",
)

SHOWN = 3  # flags of a kind that are shown
WORKGROUPS = 256  # a kernel with fewer does not fill a GPU
SLOW = 0.10  # share of the memory limit below which an op is slow
NOTABLE = 0.05  # share of the token's time below which an op gets no flag
BYTES = re.compile(r"\bunsigned char val\d+ = |\buchar val\d+ = ")
REDUCTION = re.compile(r"\bfor \(int R[Ii]dx\d")
TOGETHER = re.compile(r"__shared__|threadgroup|__local|barrier\(|__syncthreads")


def find(r: Profile, p: StepProfile) -> list[Flag]:
    """The red flags of a report, the most general ones first; of each kind at most the SHOWN worst rows."""
    rows = [flag for row in r.rows for flag in _row(row, r)]
    rows.sort(key=lambda flag: KINDS.index(flag.kind))  # stable: the slowest rows come first
    found = list[Flag]()
    for kind, same in groupby([*_whole(r, p), *rows, *_sources(r, p), *_cold(r, p)], lambda flag: flag.kind):
        flags = list(same)
        found += flags[:SHOWN]
        if len(flags) > SHOWN:
            found.append(Flag(kind, f"and {len(flags) - SHOWN} more"))
    return found


def _whole(r: Profile, p: StepProfile) -> Iterator[Flag]:
    if (slow := float(np.percentile(p.plain, 75))) > 1.5 * r.fastest_s:
        yield Flag(
            "disturbed",
            f"a quarter of the tokens took over {slow * 1e3:.2f} ms, the fastest {r.fastest_s * 1e3:.2f} ms: "
            "other programs use this machine; measure again when it is quiet",
        )
    if r.threads == 1 and r.cores > 1:
        yield Flag(
            "one thread",
            f"one thread works, of {r.cores} that could (`threads` in the settings; plain tinygrad has one)",
        )
    if (stalls := r.categories.get(STALLS, 0.0) / r.token_s) > 0.15:
        yield Flag(
            "disturbed", f"{stalls:.0%} of a token are stalls that hit another op each time: other programs take cores"
        )
    if _alone(r):
        yield Flag(
            "disturbed", "one thread did nearly all of every op: others had no core, or came too late for ops so small"
        )
    waiting = sum(row.waited for row in r.rows) / max(sum(row.seconds for row in r.rows), 1e-12)
    if waiting > 0.25 and not _alone(r):
        behind = max(r.rows, key=lambda row: row.waited)
        why = (
            "whose work is larger"
            if r.uneven > waiting / 2
            else "though their work is even: barriers are slow, or other programs take cores away"
        )
        yield Flag(
            "barrier-bound",
            f"{waiting:.0%} of the step is waiting for threads, most of it behind {_what(behind)}, {why}",
        )
    outside = r.categories.get(REST, 0.0) if r.how == "in the batch" else r.overhead_s * r.kernels
    if outside > 0.30 * r.token_s:
        yield Flag(
            "launch-bound",
            f"{outside / r.token_s:.0%} of a token passes outside of its {r.kernels} kernels, "
            f"{outside / r.kernels * 1e6:.0f} µs for each (derived)",
        )
    if (share := r.categories.get(SAMPLING, 0.0) / r.token_s) > 0.10:
        yield Flag("sampling", f"choosing the token takes {share:.0%} of its time")
    if r.clocks > 0.10:
        yield Flag(
            "disturbed",
            f"measuring adds {r.clocks:.0%} to a token: its ops are too short to be timed one by one, or "
            "the machine is busy",
        )
    if r.limit_share > 1.02:
        yield Flag(
            "above the limit",
            f"{r.gb_s:.1f} GB/s is more than the measured limit of {r.limit_gb_s:.1f}: weights stay in "
            "the caches, or the limit was measured on a busy machine (`tinychat limit` measures it again)",
        )


def _alone(r: Profile) -> bool:
    """Whether one thread ran all ops because the others had no core; then no op is at fault."""
    serial = [row for row in r.rows if row.busiest > 0.9]
    return r.threads > 1 and len(serial) > 2 and sum(row.share for row in serial) > 0.8


def _what(row: OpTime) -> str:
    return f"{row.name} {row.shape} {row.quant}".rstrip()


def _row(row: OpTime, r: Profile) -> Iterator[Flag]:
    if row.share < NOTABLE:
        return
    takes = f"{_what(row)} takes {row.share:.0%} of the token"
    if row.nbytes and r.limit_gb_s and row.limit_share < SLOW:
        now, best = row.seconds / row.calls * 1e6, row.nbytes / row.calls / r.limit_gb_s / 1e3
        yield Flag(
            "slow memory",
            f"{takes} and reads {row.gb_s:.2f} GB/s, {row.limit_share:.1%} of the limit "
            f"({now:.0f} µs a call; {best:.1f} µs at the limit)",
        )
    if r.threads > 1 and row.busiest > 0.9 and not _alone(r):
        yield Flag("serial", f"{takes} and one thread does {row.busiest:.0%} of its work")
    elif row.tasks and (
        row.tasks < 2 * r.threads or (r.how == "alone" and row.tasks < WORKGROUPS and row.limit_share < SLOW)
    ):
        yield Flag("too few tasks", f"{takes} and can be divided into {row.tasks} pieces only")


def _sources(r: Profile, p: StepProfile) -> Iterator[Flag]:
    sources = {k.name: k.source for k in p.kernels}
    rows = [(row, sources.get(row.name, "")) for row in r.rows if row.share >= NOTABLE]
    if loads := [row for row, source in rows if BYTES.search(source)]:
        yield Flag(
            "byte-wise loads",
            f"{', '.join(row.name for row in loads[:SHOWN])} read weights byte by byte; kernels that "
            f"do take {sum(row.share for row in loads):.0%} of the time of all",
        )
    for row, source in rows:
        if r.how == "alone" and REDUCTION.search(source) and not TOGETHER.search(source):
            yield Flag(
                "serial reduction", f"{row.name} takes {row.share:.0%}; one thread alone sums up each of its outputs"
            )


def _cold(r: Profile, p: StepProfile) -> Iterator[Flag]:
    for c in p.caches:
        if c.misses and c.seconds and c.seconds > 0.1:
            yield Flag("cold caches", f"{c.name}: {c.misses:,} missing, {c.seconds:.1f} s of the start went there")
