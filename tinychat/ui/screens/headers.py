"""Sizes in memory from the headers of model files, read when a model is first looked at."""

from __future__ import annotations

from functools import partial

from tinychat.errors import TinychatError
from tinychat.models.fit import Sizes, sizes_of
from tinychat.ui.screens.picker_rows import Row
from tinychat.ui.screens.sheet import in_daemon


class Headers:
    """By model name: `sizes`, and `errors`, one line each."""

    def __init__(self) -> None:
        self.sizes: dict[str, Sizes] = {}
        self.errors: dict[str, str] = {}
        self._asked: set[str] = set()

    def missing(self, row: Row) -> bool:
        """Whether this model's size is neither known nor being read."""
        return not (row.model.kv_bytes(1) or row.model.why_not or row.model.name in self._asked)

    async def read(self, row: Row) -> None:
        """Reads the header from the file, or by range requests from its first source."""
        self._asked.add(row.model.name)
        try:
            self.sizes[row.model.name] = await in_daemon(partial(sizes_of, row.model, row.path))
        except (TinychatError, ValueError, OSError) as e:
            self.errors[row.model.name] = str(e)
