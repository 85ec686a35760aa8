"""The lower rungs of the benchmark ladder: one kernel, then one layer. The whole model is `tinychat.measure.bench`."""

from tinychat.measure.microbench.measure import block, kernel
from tinychat.measure.microbench.results import Rung, history, save, store_path, table

__all__ = ["Rung", "block", "history", "kernel", "save", "store_path", "table"]
