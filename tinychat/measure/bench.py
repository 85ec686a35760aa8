"""The benchmark of a loaded model: prefill and decode speed, as medians of several runs."""

from __future__ import annotations

import statistics
import threading

from tinychat.engine.devices import OnProgress
from tinychat.engine.engine import Engine
from tinychat.engine.memory_limit import limit_of
from tinychat.engine.speculation import Speculate
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import Sampling
from tinychat.measure.lock import machine_lock
from tinychat.measure.results import Conditions, ModelResult
from tinychat.measure.synthetic import break_even, synthetic

TEXT = (  # prose: with random tokens a mixture of experts would choose other experts than with language
    "When the harbour master climbed the tower that morning, the fog lay so thick over the water "
    "that even the nearest masts "
    "were only a guess. He lit the second lamp, wrote the hour into the book, and listened. "
    "Somewhere beyond the breakwater a "
    "bell rang twice, paused, and rang again; that would be the timber ship from the north, three "
    "days late and, by the sound "
    "of it, much too close to the rocks. There were rules for such a case, and there was what one "
    "did. The rules asked for "
    "a signal, an answer and a second signal, each with its own interval. What one did was to run "
    "down the stairs, wake the "
    "pilot's daughter, and hope that the old rowing boat had been pulled up on the right side of the quay."
)


def run(
    engine: Engine,
    n_prompt: int = 128,
    n_gen: int = 64,
    repeats: int = 3,
    report: OnProgress | None = None,
    stop: threading.Event | None = None,
    *,
    name: str = "",
    speculate: Speculate = 0,
    accept: float | None = None,
    wait: bool = True,
) -> ModelResult:
    """Measures prefill of `n_prompt` and greedy decode of `n_gen` tokens, `repeats` times after one warm-up.

    `name` is what the user calls the model; `speculate`: drafts of a decode step, 0 measures single steps. `accept`:
    drafts are synthetic, and right with this chance (synthetic.py); each run is measured in single steps too. Holds
    the machine's benchmark lock. The KV cache is restored afterwards. Raises TinychatError: context too small, another
    benchmark runs and not `wait`, or `stop` was set.
    """
    report = report or (lambda text, fraction: None)
    if min(n_prompt, n_gen - 1, repeats) < 1:
        raise TinychatError("a benchmark needs at least 1 prompt token, 2 generated tokens and 1 repeat")
    if n_prompt + n_gen > engine.info.max_context:
        raise TinychatError(
            f"{n_prompt:,} prompt and {n_gen:,} generated tokens do not fit the context of "
            f"{engine.info.max_context:,}; load the model with a larger one, or measure less"
        )
    answers = dict[tuple[int, ...], list[int]]()
    drafts = speculate if accept is not None and isinstance(speculate, int) and speculate else 1
    if accept is not None and engine.executor.limits.verified <= drafts:
        raise TinychatError(f"this device verifies no {drafts} drafts in a step, so acceptance changes nothing here")
    with (
        machine_lock(report, stop, wait=wait),
        engine.cache_kept(),
        engine.speculating(speculate),
        synthetic(engine, accept, drafts, answers) as known,
    ):
        engine.stats.limit_gb_s = limit_of(engine.executor, thorough=True)
        runs, singles = [], list[float]()
        for n in range(repeats + 1):
            text = f"run {n} of {repeats}" if n else "warming up"
            report(text, n / (repeats + 1))
            ids = prompt(engine, n_prompt, n)
            if known:
                engine.session.speculate(0)
                singles.append(_once(engine, ids, n_gen, stop, answers)[0])
                engine.session.speculation = known
                engine.session.cut(0)
            runs.append(_once(engine, ids, n_gen, stop, answers))
            if n:
                report(f"{text}: {runs[-1][0]:.1f} tok/s", (n + 1) / (repeats + 1))
    decode, prefill, ttft, per_step = (tuple(values) for values in zip(*runs[1:]))
    info, s, speed = engine.info, engine.stats, statistics.median(decode)
    measured = Conditions.now(name or info.name, info.fingerprint, info.device, info.threads, s.limit_gb_s)
    tokens_per_step = statistics.median(per_step)
    gb_s = s.bytes_per_token * speed / tokens_per_step / 1e9
    single = statistics.median(singles[1:]) if singles else 0.0
    label = str(speculate or "off") if accept is None else f"SYNTHETIC {accept:.0%} of {drafts}"
    return ModelResult(
        **vars(measured),
        path=str(info.path),
        quant=info.quant,
        n_prompt=n_prompt,
        n_gen=n_gen,
        decode_tok_s=speed,
        prefill_tok_s=statistics.median(prefill),
        ttft_s=statistics.median(ttft),
        load_s=s.load_s,
        kernels_per_token=s.kernels_per_token,
        jit_batches=s.jit_batches,
        bytes_per_token=s.bytes_per_token,
        gb_s=gb_s,
        limit_share=measured.share(gb_s),
        kv_bytes_per_token=s.kv_bytes_per_token,
        rss_bytes=s.rss_bytes,
        decode_runs=decode,
        max_context=info.max_context,
        speculate=label,
        tokens_per_step=tokens_per_step,
        single_tok_s=single,
        break_even=break_even(single * tokens_per_step / speed, drafts) if single and speed else 0.0,
    )


def prompt(engine: Engine, n: int, turn: int) -> list[int]:
    """`n` token ids of prose. It begins at another word in every turn, so that no row of the KV cache is reused."""
    text = TEXT.split()
    start = 7 * turn % len(text)
    words = text[start:] + text[:start]
    ids: list[int] = []
    while len(ids) < n:
        ids += engine.tokenizer.encode(" ".join(words) + "\n")
    return ids[:n]


def _once(
    engine: Engine,
    ids: list[int],
    n_gen: int,
    stop: threading.Event | None,
    answers: dict[tuple[int, ...], list[int]],
) -> tuple[float, float, float, float]:
    """(decode tok/s, prefill tok/s, TTFT in s, tokens per decode step) of one run. A model that ends its answer early
    is made to continue. `answers` gets what it said to each prompt."""
    s, greedy = engine.stats, Sampling(temperature=0.0)
    done = steps = decode_steps = 0
    decode_s = prefill_tok_s = ttft_s = 0.0
    filler = ids[-1]
    while done < n_gen:
        new = [t.id for t in engine.generate(ids, greedy, n_gen - done, raw=True, stop=stop) if t.id is not None]
        if stop and stop.is_set():
            raise TinychatError("the benchmark was stopped; nothing was saved")
        if not new:
            raise TinychatError("the model generated nothing; this file cannot be benchmarked")
        answers[tuple(ids)] = new
        if not done:
            prefill_tok_s, ttft_s = s.prefill_tok_s, s.ttft_s
        done, steps, decode_s = done + len(new), steps + len(new) - 1, decode_s + s.decode_s
        decode_steps += s.decode_steps
        ids = [*ids, *new[:-1], filler]
    return steps / decode_s if decode_s else 0.0, prefill_tok_s, ttft_s, done / decode_steps
