"""Multi-token prediction: the rows that the model's own block has beside the layers', its drafts, its side file."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan, has_mtp
from tinychat.errors import TinychatError, printable
from tinychat.kernels.executor import Executor
from tinychat.kernels.ops import Plan


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


_QUANT = re.compile(r"[-.](I?Q\d\w*|B?F16|F32|MXFP4\w*)$", re.IGNORECASE)


def with_mtp(gguf: GGUF, config: ModelConfig) -> tuple[GGUF, Plan]:
    """The plan of `gguf` with its MTP, and the file with the tensors of its side file, where it has one.

    Raises TinychatError where the block or the side file does not fit the model, which can be run without them.
    """
    if not has_mtp(gguf, config) and (path := _side_file(gguf.path)):
        block, other = f"blk.{config.layers}.", GGUF.open(path)
        if other.metadata.get("general.architecture") != config.architecture:
            raise TinychatError(f"{printable(str(path))} is not of a {config.architecture} model")
        gguf = gguf.joined(other, block)
        if not has_mtp(gguf, config):
            raise TinychatError(f"{printable(str(path))} has no {block}nextn.eh_proj.weight")
    return gguf, build_plan(gguf, config, mtp=True)


def _side_file(path: Path) -> Path | None:
    """mtp-NAME.gguf beside NAME.gguf, perhaps of another quant."""
    same = path.with_name(f"mtp-{path.name}")
    if same.is_file():
        return same
    name = _QUANT.sub("", path.stem)
    return next(iter(sorted(path.parent.glob(f"mtp-{glob.escape(name)}[-.]*gguf"))), None)
