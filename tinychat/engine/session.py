"""What the KV cache holds, and the two ways it grows: prefill and decode.

Cache rows are addressed by position, so reusing a prefix and rolling back are only bookkeeping. The state of a delta
rule is not: it goes back to a snapshot. Behind a place where layers with a sliding window have lost rows, all begins
again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from tinychat.engine import snapshots
from tinychat.engine.drafts import common_prefix
from tinychat.engine.grammar import Matcher
from tinychat.engine.mtp import Predictor
from tinychat.engine.snapshots import Snapshots
from tinychat.engine.speculation import Clock, Source, Speculate, Speculation
from tinychat.engine.stats import Stats
from tinychat.errors import TinychatError
from tinychat.kernels.executor import Executor, StateCopy
from tinychat.kernels.limits import check_sampling
from tinychat.kernels.ops import Plan
from tinychat.kernels.sampling import Sampling

SMALLEST_CHUNK = 32  # tokens per prefill call, at least

OnPrefill = Callable[[int, int, int], None]


class Session:
    """One sequence in one executor's cache. `tokens` are the ids whose rows the cache holds, in order; `state_at`, how
    many of them the executor's state has seen, -1 where it is of another sequence."""

    def __init__(
        self, executor: Executor, plan: Plan, max_context: int, stats: Stats, speculate: Speculate = "auto"
    ) -> None:
        self.executor, self.plan, self.max_context, self.stats = executor, plan, max_context, stats
        self.tokens: list[int] = []
        self.mtp = Predictor(executor) if plan.mtp else None
        self.state_at = 0
        self.snapshots = Snapshots(snapshots.kept(plan))
        self._apart = snapshots.distance(executor.prefill_chunk)  # tokens
        # where this thread computes, what other programs take of its core is no cost of a step
        self.clock: Clock = time.thread_time if executor.threads else time.perf_counter
        self.speculate(speculate)

    def speculate(self, mode: Speculate) -> None:
        """From now on as many drafts as `mode` says, and nothing learned before."""
        most = self.executor.limits.verified - 1
        self.speculation = Speculation(mode, most, self.max_context, self.stats, self.clock)

    def prefill(self, prompt: Sequence[int], on_prefill: OnPrefill | None, stop: threading.Event | None) -> bool:
        """Makes the cache hold all of `prompt` but its last token, which decode runs unless the executor has run it
        with the others; False if `stop` ended it early.

        The longest common prefix with what the cache holds stays, of a plan with a state up to a snapshot;
        `on_prefill(done, total, reused)` counts the rest. Of a call that `stop` cuts short nothing is kept; of a
        plan with a state, which would be lost, no call is.
        Raises TinychatError for an empty prompt, one that leaves no room for an answer, or an id outside the
        vocabulary.
        """
        s, last = self.stats, len(prompt) - 1
        self.check(prompt)
        reused = self._rewind(common_prefix(self.tokens, prompt[:last]))
        s.phase, s.prompt_tokens, s.reused_tokens, s.prefilled_tokens = "prefill", len(prompt), reused, 0
        s.prefill_s = s.prefill_tok_s = 0.0
        started, total = time.perf_counter(), last - reused
        size = max(self.executor.prefill_chunk, SMALLEST_CHUNK)
        places = snapshots.places(reused, last, self._apart) if self.plan.state_bytes else []
        cut = False

        def report(done: int) -> None:
            s.prefill_s, s.prefilled_tokens = time.perf_counter() - started, done
            s.prefill_tok_s = done / s.prefill_s
            if on_prefill:
                on_prefill(done, total, reused)

        def watch(share: float) -> bool:
            nonlocal cut
            report(len(self.tokens) - reused + int(share * len(chunk)))
            cut = not self.plan.state_bytes and stop is not None and stop.is_set()
            return cut

        if on_prefill:
            on_prefill(0, total, reused)
        while len(self.tokens) < last:
            if stop and stop.is_set():
                return False
            first = len(self.tokens)
            due = [n for n in places if n > first]
            end = min(first + size, last, *due[1:2])
            chunk = list(prompt[first:end])
            self.state_at = -1  # until the call has ended
            if due and due[0] <= end:
                self.snapshots.add(due[0], self.executor.forward_keeping(chunk, first, due[0], watch))
            else:
                self.executor.forward(chunk, first, following=prompt[last] if end == last else None, watch=watch)
                if cut:
                    report(first - reused)
                    return False
            self.tokens += chunk
            self.state_at = end
            if self.speculation.most:
                self.complete()
            s.context_used = len(self.tokens)
            report(len(self.tokens) - reused)
        return True

    def decode(
        self, token: int, sampling: Sampling, recent: Sequence[int], matcher: Matcher | None = None
    ) -> Iterator[tuple[int, float, Source]]:
        """Runs `token` behind what the cache holds, then each token that follows; yields (id, log-probability, source).

        Ends when the context is full. A token's row is in the cache once the next one was yielded. `matcher` says which
        tokens may come; those that it forces are run together, without sampling, with log-probability 0. Drafts change
        how many tokens a step yields, never which. Raises TinychatError for parameters that the executor does not
        follow.
        """
        check_sampling(sampling, self.executor.limits)
        history, speculation, mask = list(recent), self.speculation, matcher.mask if matcher else None
        speculation.start(history)
        while (room := self.max_context - len(self.tokens)) > 0:
            pos, forced = len(self.tokens), matcher.forced() if matcher else []
            drafts: list[int] = []
            began = self.clock()
            if forced:
                steps = self._together(token, forced[:room])
            elif speculation.most:
                drafts = speculation.drafts(room - 1, partial(self.mtp.draft, self.tokens, token) if self.mtp else None)
                ahead = speculation.alike(len(drafts), self.mtp is not None)
                steps = self.executor.verify(token, drafts, pos, sampling, history, mask, ahead=ahead)
            else:
                steps = self.executor.decode(token, pos, sampling, history, mask)
            for i, (following, logprob) in enumerate(steps):
                source: Source = "grammar" if forced else speculation.source if i and drafts else ""
                speculation.took(source, len(drafts), self.clock() - began)
                self.tokens.append(token)
                self.state_at = max(self.state_at, len(self.tokens))
                if self.plan.state_bytes and not forced and self.snapshots.due(len(self.tokens), self._apart):
                    self.snapshots.add(len(self.tokens), self.executor.read_state())
                token = following
                history.append(token)
                speculation.add(token)
                if matcher and not forced:
                    matcher.accept(token)
                yield token, logprob, source
                if matcher and not forced and matcher.forces:
                    break
                began = self.clock()
            steps.close()  # type: ignore[attr-defined]

    def complete(self) -> None:
        """Writes the cache rows of MTP that lack."""
        if self.mtp:
            self.mtp.follow(self.tokens)

    def restored(self, first: int, ids: Sequence[int]) -> None:
        """The cache holds rows of `ids` from position `first` on, which were read from a file; of MTP too."""
        self.tokens[first:] = ids
        if self.mtp and self.mtp.rows >= first:  # else rows in front of them lack, and it goes on there
            self.mtp.rows = len(self.tokens)

    def _together(self, token: int, forced: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Runs what is forced behind `token` in one go, all but the last."""
        self.executor.forward([token, *forced[:-1]], len(self.tokens))
        self.state_at = len(self.tokens) + len(forced)
        for following in forced:
            yield following, 0.0

    def cut(self, n: int) -> None:
        """Forgets all but the first `n` tokens."""
        del self.tokens[n:]
        self.snapshots.cut(n)
        if self.state_at > n:
            self.state_at = -1
        if self.mtp:
            self.mtp.rows = min(self.mtp.rows, n)

    def state(self, n: int) -> bytes:
        """The state behind the first `n` tokens; b"" where it is not known."""
        if n == self.state_at:
            return self.executor.read_state().tobytes()
        at, state = self.snapshots.last(n)
        return state.tobytes() if at == n else b""

    def _rewind(self, n: int) -> int:
        """Keeps the first `n` tokens, or as many of them as the executor can go on from: those that a snapshot of its
        state has seen, none in front of rows that layers with a window have lost. Returns their number."""
        state: StateCopy | None = None
        if self.plan.state_bytes and n != self.state_at:
            n, state = self.snapshots.last(n)
        if not self.executor.reaches(n):
            n = 0
        if state and n:
            self.executor.write_state(state)
        self.cut(n)
        self.state_at = n
        return n

    def logits(self, ids: Sequence[int], decode: bool) -> np.ndarray:
        """float32 (len(ids), vocab), from an empty cache; `decode` runs one token at a time."""
        self.check(ids)
        self.cut(0)
        step = 1 if decode else max(self.executor.prefill_chunk, SMALLEST_CHUNK)
        rows = []
        for start in range(0, len(ids), step):
            chunk = list(ids[start : start + step])
            out = self.executor.forward(chunk, start, "all")
            assert out is not None
            rows.append(out)
            self.tokens += chunk
            self.state_at = len(self.tokens)
        return np.concatenate(rows)

    def check(self, prompt: Sequence[int]) -> None:
        """Raises TinychatError for a prompt that cannot be run."""
        if not prompt:
            raise TinychatError("the prompt is empty")
        if len(prompt) > self.max_context:
            raise TinychatError(
                f"the prompt has {len(prompt):,} tokens, the context holds {self.max_context:,}; "
                "shorten it or load the model with a larger context"
            )
        bad = next((i for i in prompt if not 0 <= i < self.plan.vocab), None)
        if bad is not None:
            raise TinychatError(f"token id {bad} is outside the vocabulary of {self.plan.vocab:,}")
