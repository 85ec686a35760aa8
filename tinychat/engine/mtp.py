"""Multi-token prediction: the rows that the model's own block has beside the layers', its drafts, its side file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tinychat.engine.gguf import GGUF
from tinychat.errors import TinychatError, printable
from tinychat.kernels.executor import Executor


class Predictor:
    """Drafts of the plan's MTP for one session. `rows`: positions, from the first on, whose row its cache holds.

    A row needs its token and the layers' output in front of it, which the executor keeps for every position. So rows
    may be written at any time after that: with a prompt's chunks, or many at once when a draft is wanted.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, self.rows = executor, 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Writes the rows that lack of `tokens`, whose rows of the layers the cache holds."""
        if self.rows < len(tokens):
            self.executor.forward(tokens[self.rows :], self.rows, mtp=True)
            self.rows = len(tokens)

    def draft(self, tokens: Sequence[int], token: int) -> int:
        """The likeliest id behind `token`, which comes behind `tokens`."""
        found = self.executor.draft([*tokens[self.rows :], token], self.rows)
        self.rows = len(tokens) + 1
        return found


def with_side_file(gguf: GGUF, layers: int, side: Path | None) -> GGUF:
    """`gguf` with the tensors of the block behind its `layers`, which are in a file of their own: `side`, or
    mtp-NAME.gguf beside NAME.gguf. Unchanged where there is no such file, or where the model has the block itself.

    Raises TinychatError for a file of another architecture or without that block.
    """
    block = f"blk.{layers}."
    beside = gguf.path.with_name(f"mtp-{gguf.path.name}")
    path = side or (beside if beside.is_file() else None)
    if path is None or any(name.startswith(f"{block}nextn.") for name in gguf.tensors):
        return gguf
    other = GGUF.open(path)
    architecture = str(gguf.metadata.get("general.architecture"))
    found = other.metadata.get("general.architecture")
    if found != architecture or f"{block}nextn.eh_proj.weight" not in other.tensors:
        raise TinychatError(
            f"{printable(str(path))}: not the multi-token prediction of {printable(gguf.path.name)}, which would be "
            f"block {layers} of a {printable(architecture)} model"
        )
    return gguf.joined(other, block)
