"""The lower rungs of the benchmark ladder: one kernel, then one layer. The whole model is `tinychat.bench`."""

from tinychat.ladder.measure import block, kernel
from tinychat.ladder.results import Rung, history, save, store_path, table

__all__ = ["Rung", "block", "history", "kernel", "save", "store_path", "table"]
