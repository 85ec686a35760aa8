"""What HTTP costs, and whether memory stays flat: one model in this process, asked directly and through the server.

    python -m scripts.server_cost MODEL.gguf [--requests 1000] [--rounds 5] [-n 128]

Decode: the engine's own tok/s of answers asked for directly and over HTTP, in turns. First token: how much later the
first piece arrives over HTTP than the engine has it. Memory: of this process, before and after many requests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from tests.support.serving import serving
from tinychat import process
from tinychat.backend.local import LocalBackend
from tinychat.backend.protocol import Backend, Finished, Piece, Request
from tinychat.backend.remote import RemoteBackend
from tinychat.engine.stats import rss_bytes
from tinychat.kernels.sampling import Sampling
from tinychat.measure.bench import TEXT
from tinychat.server.answer import ServedModel


def once(backend: Backend, turn: int, n: int) -> tuple[float, float, float]:
    """(decode tok/s by the engine, by this clock, seconds from the engine's first token to its arrival)."""
    message = {"role": "user", "content": f"{turn} {TEXT}"}
    began = time.perf_counter()
    first = last = 0.0
    for event in backend.answer(Request(messages=(message,), sampling=Sampling(temperature=0.0), max_tokens=n)):
        if isinstance(event, Piece) and event.text:
            last = time.perf_counter()
            first = first or last
        elif isinstance(event, Finished):
            stats = event.stats
    ours = stats.template_s + stats.tokenise_s + stats.ttft_s
    return stats.decode_tok_s, (stats.generated_tokens - 1) / (last - first), first - began - ours


def client(url: str, n: int, pipe: Connection) -> None:
    """Asks over HTTP, one answer for each turn that comes through `pipe`; in a process of its own, as clients are."""
    backend = RemoteBackend.open(url)
    while (turn := pipe.recv()) is not None:
        pipe.send(once(backend, turn, n))
    backend.close()


def compare(local: LocalBackend, url: str, rounds: int, n: int) -> None:
    """Prints what HTTP costs: answers of `n` tokens, direct and over HTTP in turns; the median and the best, because
    other programs of a machine only ever make a run slower."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    asking = context.Process(target=client, args=(url, n, there))
    asking.start()
    runs: dict[str, list[tuple[float, float, float]]] = {"direct": [], "http": []}
    for turn in range(-2, 2 * rounds, 2):
        direct = once(local, turn, n)
        here.send(turn + 1)
        http = here.recv()
        if turn >= 0:
            runs["direct"].append(direct)
            runs["http"].append(http)
    here.send(None)
    asking.join()
    for way, found in runs.items():
        engine, clock, late = zip(*found)
        print(f"{way:6} {_speeds(engine)} tok/s in the engine, {_speeds(clock)} arriving, first token", end=" ")
        print(f"{1e3 * statistics.median(late):.1f} ms later (best {1e3 * min(late):.1f})")


def _speeds(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.1f} (best {max(values):.1f})"


def many(url: str, requests: int) -> None:
    """Prints this process's memory while `requests` are answered."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with httpx.Client(timeout=60) as http:
        for i in range(requests + 1):
            path = ("/v1/chat/completions", "/v1/messages", "/v1/chat/completions")[i % 3]
            http.post(url + path, json=body | ({"stream": True} if i % 3 == 2 else {})).raise_for_status()
            if i % max(1, requests // 5) == 0:
                print(f"{i:5} requests: {rss_bytes() / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--threads", type=int, help="of the engine")
    args = parser.parse_args()
    process.prepare()
    local = LocalBackend.open(args.model, max_context=2048, threads=args.threads)
    with serving(ServedModel("m", local, local)) as url:
        if args.rounds:
            compare(local, url, args.rounds, args.n)
        if args.requests:
            many(url, args.requests)
    local.close()


if __name__ == "__main__":
    main()
