"""Copies of what layers carry from token to token, in the GPU's memory: made and put back without the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.cuda.builder import SLOTS
from tinychat.kernels.executor import StateCopy

Parts = Sequence[tuple[str, int]]  # each layer's buffer, and the bytes of one slot


class KeptState:
    """A copy of the state of all layers; its memory is used for another one when nobody holds it."""

    def __init__(self, states: KeptStates, name: str) -> None:
        self.states, self.name = states, name

    def tobytes(self) -> bytes:
        return self.states.gpu.download(self.name, self.states.nbytes).tobytes()

    def __del__(self) -> None:
        self.states.unused.append(self.name)


class KeptStates:
    """The copies of one executor's states. `gpu`: a device.GPU."""

    def __init__(self, gpu: Any, parts: Parts) -> None:
        self.gpu, self.parts = gpu, parts
        self.nbytes = sum(nbytes for _, nbytes in parts)
        self.unused, self._names = list[str](), (f"kept:{n}" for n in count())

    def copy(self, slot: int) -> StateCopy:
        """The state in `slot`, behind everything enqueued before; in the host's memory where the GPU's is full."""
        sources = [(f"{name}+{slot * nbytes}", nbytes) for name, nbytes in self.parts]
        if not self.unused:
            name = next(self._names)
            try:
                self.gpu.allocate(name, self.nbytes)
            except TinychatError:
                return np.concatenate([self.gpu.download(source, nbytes) for source, nbytes in sources]).data
            self.unused.append(name)
        kept, at = KeptState(self, self.unused.pop()), 0
        for source, nbytes in sources:
            self.gpu.copy(f"{kept.name}+{at}", source, nbytes)
            at += nbytes
        return kept

    def put(self, state: StateCopy) -> None:
        """Makes every slot hold `state`, whatever position comes next. Raises TinychatError for bytes that do not
        fit."""
        data, at = np.empty(0, np.uint8), 0
        if not isinstance(state, KeptState):
            data = np.frombuffer(state.tobytes(), np.uint8)
            if data.size != self.nbytes:
                raise TinychatError(f"a saved state of {data.size:,} bytes is not of this model")
        for name, nbytes in self.parts:
            if isinstance(state, KeptState):
                self.gpu.copy(name, f"{state.name}+{at}", nbytes)
            else:
                self.gpu.upload(name, data[at : at + nbytes])
            for slot in range(1, SLOTS):
                self.gpu.copy(f"{name}+{slot * nbytes}", name, nbytes)
            at += nbytes
        self.gpu.synchronize()
