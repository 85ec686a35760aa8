"""Figures of one request, updated while it runs, and the memory of this process and machine."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

OVERHEAD = 300 << 20  # bytes: Python, tokenizer, buffers; what a loaded model needs beside weights and cache


@dataclass
class Stats:
    """Figures of the last (or running) request and of the loaded model. Times in seconds, sizes in bytes, speeds per
    second.

    `limit_gb_s` is this machine's measured read bandwidth (0 = not measured yet), `limit_share` = gb_s / limit_gb_s.
    """

    phase: str = "idle"  # idle, prefill, decode
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, already in the KV cache
    restored_rows: int = 0  # of those, read back from the disk
    prefilled_tokens: int = 0
    generated_tokens: int = 0  # decode_steps + accepted_tokens + forced_tokens
    decode_steps: int = 0  # each gives a token of its own
    drafted_tokens: int = 0  # verified in those steps
    accepted_tokens: int = 0  # of the drafted ones
    mtp_drafted_tokens: int = 0  # of the drafted ones, by the model's own block; the others by the text
    mtp_accepted_tokens: int = 0
    forced_tokens: int = 0  # by a grammar, not chosen
    speculation_gain: float = 0.0  # the time that single steps would have taken, by decode's; 0: nothing was drafted
    # times in order; sampling_s is part of decode_s
    wait_s: float = 0.0  # waiting for other work of the engine: another request, the saving of a KV cache
    template_s: float = 0.0  # of the prompt that was rendered last
    tokenise_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0  # from the end of the prefill to the first token
    decode_s: float = 0.0  # from the first token to the last
    sampling_s: float = 0.0  # choosing ids, where the executor tells
    detokenise_s: float = 0.0
    ttft_s: float = 0.0  # from the request to the first token, all of the above but decode
    token_s: float = 0.0  # per token behind the first
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    last_tok_s: float = 0.0  # over the last half second
    load_s: float = 0.0
    kernels_per_token: int = 0
    jit_batches: int = 0
    jit_state: str = ""  # of the decode step that runs, or would run next: compiling, replaying
    bytes_per_token: int = 0
    gb_s: float = 0.0
    limit_gb_s: float = 0.0
    limit_share: float = 0.0
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    restore_s: float = 0.0  # looking for a saved KV cache and reading it, part of ttft_s
    save_s: float = 0.0  # the last saving of the KV cache: seconds, rows, bytes
    saved_rows: int = 0
    saved_bytes: int = 0
    rss_bytes: int = 0
    context_used: int = 0
    context_max: int = 0

    def as_dict(self) -> dict[str, float | int | str]:
        """All figures, the keys of DESIGN's JSON among them."""
        return asdict(self)

    def of_model(self) -> Stats:
        """The figures of the loaded model alone, none of a request."""
        names = ("load_s", "kernels_per_token", "jit_batches", "jit_state", "limit_gb_s", "kv_bytes_per_token")
        sizes = ("weight_bytes", "kv_bytes", "rss_bytes", "context_max")
        return Stats(**{name: getattr(self, name) for name in (*names, *sizes)})

    def parts(self) -> list[tuple[str, float]]:
        """The times of the last request in order, without overlap: (what, seconds). Painting is not among them: it runs
        on another thread, while tokens are decoded."""
        decode = max(0.0, self.decode_s - self.sampling_s - self.detokenise_s)
        return [
            ("waiting", self.wait_s),
            ("template", self.template_s),
            ("tokenise", self.tokenise_s),
            ("prefill", self.prefill_s),
            ("first token", self.first_token_s),
            ("decode", decode),
            ("sampling", self.sampling_s),
            ("detokenise", self.detokenise_s),
        ]


def rss_bytes() -> int:
    """Resident memory of this process, bytes (0 where the system does not tell)."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes, and the peak


def available_memory(root: Path = Path("/")) -> int:
    """Memory that can be used without swapping, bytes (0 where the system does not tell).

    Linux: MemAvailable, or what the limits of our control group and its parents leave, if that is less.
    """
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        free = [int(fields["MemAvailable"].split()[0]) * 1024]
    except (OSError, KeyError, ValueError):
        return _physical_memory() if sys.platform == "darwin" else 0
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):  # version 2, version 1
                top = root / "sys/fs/cgroup" / controllers
                folder = top / group.lstrip("/")
                free += [
                    left for f in (folder, *folder.parents) if f.is_relative_to(top) and (left := _left(f)) is not None
                ]
    return max(0, min(free))


def _left(group: Path) -> int | None:
    """What the limit of one control group leaves, bytes; file pages that can be dropped count as free."""
    for limit, used, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):
            left = int((group / limit).read_text()) - int((group / used).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return left + int(stat.get(reclaimable, 0))
    return None


def _physical_memory() -> int:
    """All memory of the machine, bytes: macOS gives file and inactive pages back, so nearly all of it counts."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
