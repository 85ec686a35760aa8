"""Runs a plan with plain tinygrad tensors, on any of tinygrad's devices, where no faster executor works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from tinygrad import Tensor, dtypes

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import CACHE_VALUE_BYTES, Experts
from tinychat.kernels.executor import ExecutorKind, KeepsInPieces, Logits, Mask, SingleSteps, StateCopy, Watch, Weights
from tinychat.kernels.limits import Limits, check
from tinychat.kernels.ops import Plan
from tinychat.kernels.profile import Calls, Kernel, StepProfile, calls_of
from tinychat.kernels.sampler import sample
from tinychat.kernels.sampling import Sampling
from tinychat.kernels.tinygrad import profile as profiling
from tinychat.kernels.tinygrad.dequant import CODECS
from tinychat.kernels.tinygrad.step import Step

LIMITS = Limits(frozenset(CODECS), prefill_chunk=32, verified=16, mtp=True)


class ReferenceExecutor(SingleSteps, KeepsInPieces):
    """`MeasurableExecutor` on tinygrad tensors. `cache_f16`: the KV cache is F16 to save memory, not F32."""

    kind: ExecutorKind = "reference"
    limits = LIMITS
    threads = 0
    jit_batches = 0
    sampling_s = 0.0

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        max_context: int,
        device: str | None = None,
        cache_f16: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        check(plan, LIMITS, "tinygrad", max_context)
        self.plan, self.max_context = plan, max_context
        self._type = dtypes.float16 if cache_f16 else dtypes.float32
        self.step = Step(plan, weights, max_context, device, self._type, progress)
        self.device = f"{self.step.device} · plain tinygrad"
        self.weight_bytes = sum(t.nbytes() for t in self.step.packed.values())
        self.cache_bytes = sum(t.nbytes() for t, _ in self.step.caches)
        routed = any(isinstance(layer.feed_forward, Experts) for layer in plan.layers)
        # the experts of one token are gathered at a time, and a state goes from token to token
        self.prefill_chunk = 1 if routed or plan.state_bytes else min(LIMITS.prefill_chunk, self.step.windows.together)

    @property
    def kernels_per_token(self) -> int:
        """See Executor.kernels_per_token."""
        jit = self.step.decode_jit
        return len(jit.captured._linear.src) if jit and jit.captured else 0

    @property
    def jit_state(self) -> str:
        """See Executor.jit_state: the first step is captured, and replayed from then on."""
        jit = self.step.decode_jit
        return "replaying" if jit and jit.captured else "compiling"

    def forward(
        self,
        ids: Sequence[int],
        pos: int,
        logits: Logits = "none",
        *,
        mtp: bool = False,
        following: int | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray | None:
        """See Executor.forward. What follows is not run with them; nothing is asked. Tokens after the last whole chunk
        run one at a time, because each length is captured separately."""
        out, done, run = [], 0, self.step.run_mtp if mtp else self._run
        while done < len(ids):
            n = self.prefill_chunk if len(ids) - done >= self.prefill_chunk and not (mtp and pos + done == 0) else 1
            last = done + n == len(ids)
            want = logits == "all" or (logits == "last" and last)
            rows = run(ids[done : done + n], pos + done, want)
            if rows is not None:
                out.append(rows if logits == "all" else rows[-1:])
            done += n
        return np.concatenate(out) if out else None

    def _run(self, ids: Sequence[int], pos: int, want_logits: bool) -> np.ndarray | None:
        self.step.slide(self.step.windows.base_for(pos, len(ids)))
        return self.step.run(ids, pos, want_logits)

    def reaches(self, pos: int) -> bool:
        """See Executor.reaches."""
        return self.step.windows.reaches(pos)

    def draft(self, ids: Sequence[int], pos: int) -> int:
        """See Executor.draft."""
        rows = self.forward(ids, pos, "last", mtp=True)
        assert rows is not None
        return int(rows[0].argmax())

    def decode(
        self, token: int, pos: int, sampling: Sampling, recent: Sequence[int], mask: Mask | None = None
    ) -> Iterator[tuple[int, float]]:
        """See Executor.decode; sampling runs on the host."""
        seen = list(recent)
        while pos < self.max_context:
            rows = self._run([token], pos, True)
            assert rows is not None
            token, logprob = sample(rows[0], sampling, pos, seen, mask() if mask else None)
            seen.append(token)
            yield token, logprob
            pos += 1

    def routes(self) -> np.ndarray | None:
        """See Executor.routes: None, because intermediate results are not copied from the device."""
        return None

    @property
    def cache_layout(self) -> str:
        """See Executor.cache_layout."""
        return f"reference {self._type.name} 1{' mtp' * bool(self.plan.mtp)}"

    def read_cache(self, first: int, rows: int) -> bytes:
        """See Executor.read_cache: K's rows of every layer, then V's."""
        places = [(t, *self.step.windows.place(cache, first, rows)) for t, cache in self.step.caches]
        return b"".join(t[start:end].numpy().tobytes() for t, start, end in places if start < end)

    def write_cache(self, data: bytes, first: int, rows: int) -> None:
        """See Executor.write_cache."""
        kind, at = np.dtype(np.float16 if self._type == dtypes.float16 else np.float32), 0
        windows, halves = self.step.windows, -(-len(data) * CACHE_VALUE_BYTES // kind.itemsize)
        self.step.slide(windows.base_with(first, rows, windows.held(halves, rows)))
        for t, cache in self.step.caches:
            start, end = windows.place(cache, first, rows)
            if start < end:
                part = np.frombuffer(data, kind, (end - start) * t.shape[1], at)
                t[start:end].assign(Tensor(part.reshape(end - start, -1), device=self.step.device)).realize()
                at += part.nbytes

    @property
    def state_bytes(self) -> int:
        """See Executor.state_bytes."""
        return self.plan.state_bytes

    def read_state(self) -> StateCopy:
        """See Executor.read_state."""
        return memoryview(b"".join(t.numpy().tobytes() for t in self.step.state_tensors))

    def write_state(self, state: StateCopy) -> None:
        """See Executor.write_state."""
        data = state.tobytes()
        if len(data) != self.state_bytes:
            raise TinychatError(f"a saved state of {len(data):,} bytes is not of this model")
        at = 0
        for t in self.step.state_tensors:
            part = np.frombuffer(data, np.float32, t.numel(), at)
            t.assign(Tensor(part.reshape(t.shape), device=self.step.device)).realize()
            at += t.nbytes()

    def profile(self, token: int, pos: int, steps: int) -> StepProfile:
        """See MeasurableExecutor.profile."""
        return profiling.profile(self.step, token, pos, steps)

    def kernels(self) -> list[Kernel]:
        """See MeasurableExecutor.kernels."""
        return profiling.kernels(self.step)

    def seconds_of(self, groups: Sequence[Sequence[int]], pos: int, steps: int) -> Calls:
        """See MeasurableExecutor.seconds_of."""
        return calls_of(self.profile(0, pos, steps), groups)

    def stand_in(self, drafts: Sequence[int], pos: int) -> None:
        """See MeasurableExecutor.stand_in: no step is enqueued ahead."""

    def read_bandwidth(self) -> float:
        """See MeasurableExecutor.read_bandwidth: not measured."""
        return 0.0

    def close(self) -> None:
        """See Executor.close."""
        self.step.close()
