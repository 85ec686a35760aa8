"""Whose turn it is, alone and behind HTTP."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from tests.support.serving import Replay, asking, figure, finished, pieces, replaying, serving, until
from tinychat.server.queue import Queue
from tinychat.server.refusal import RequestRefused

BODY: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


async def test_clients_come_in_rotation() -> None:
    """Five requests of one client do not keep another one waiting for all of them."""
    queue, order = Queue(10), []

    async def ask(client: str, name: str) -> None:
        await queue.enter(client)
        order.append(name)
        await asyncio.sleep(0)
        queue.leave()

    asked = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("a", "a4"), ("b", "b2")]
    await asyncio.gather(*(ask(*one) for one in asked))
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert queue.running == 0 and queue.waiting == 0


async def test_too_many_are_sent_away() -> None:
    queue = Queue(1)
    await queue.enter("a")
    waiting = asyncio.create_task(queue.enter("b"))
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused) as raised:
        await queue.enter("c")
    assert raised.value.status == 503 and raised.value.retry_s >= 1
    queue.leave()
    await waiting
    queue.leave()
    await queue.enter("c")


@pytest.mark.parametrize("granted", [False, True])
async def test_whoever_goes_away_loses_the_place(granted: bool) -> None:
    """Also in the very moment in which the turn comes."""
    queue = Queue(2)
    await queue.enter("a")
    gone = asyncio.create_task(queue.enter("b"))
    patient = asyncio.create_task(queue.enter("c"))
    await asyncio.sleep(0)
    if granted:
        queue.leave()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    if not granted:
        queue.leave()
    await asyncio.wait_for(patient, 5)
    assert queue.waiting == 0 and queue.running == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_the_queue_behind_http(path: str) -> None:
    """One runs, one waits, the third is sent away with Retry-After; then the other two are answered."""
    go = threading.Event()
    served = replaying([*pieces("a"), go, finished(answer=1)])
    body = BODY | ({"max_tokens": 5} if "messages" in path else {}) | ({"stream": False} if "api" in path else {})
    with serving(served, queue_size=1) as url:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.post(url + path, json=body, timeout=120)))
            for _ in range(2)
        ]
        threads[0].start()
        until(url, "running_requests", 1)
        threads[1].start()
        until(url, "waiting_requests", 1)
        third = httpx.post(url + path, json=body, timeout=120)
        go.set()
        for t in threads:
            t.join()
    assert third.status_code == 503 and int(third.headers["retry-after"]) >= 1
    assert third.json()["error"]
    assert [a.status_code for a in answers] == [200, 200]


def test_a_client_that_hangs_up_in_the_queue() -> None:
    """Its request is never given to the backend."""
    go = threading.Event()
    served = replaying([*pieces("a"), go, finished(answer=1)])
    with serving(served) as url:
        first = threading.Thread(target=lambda: httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=120))
        first.start()
        until(url, "running_requests", 1)
        with asking(url, "/v1/chat/completions", BODY):
            until(url, "waiting_requests", 1)
        until(url, "waiting_requests", 0)
        go.set()
        first.join()
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=120).status_code == 200
    assert isinstance(served.backend, Replay)
    assert len(served.backend.requests) == 2


def test_a_client_that_hangs_up_while_it_is_answered() -> None:
    """The request is cancelled, and the next one has its turn when the backend has ended the first."""
    go = threading.Event()
    served = replaying([*pieces("a"), go, *pieces("b"), finished(answer=2)])
    with serving(served) as url:
        with asking(url, "/v1/chat/completions", BODY):
            until(url, "running_requests", 1)
        until(url, "hung_up_total", 1)
        assert isinstance(served.backend, Replay)
        assert served.backend.requests[0].cancel.wait(120)
        assert figure(url, "running_requests") == 1  # the backend has not said that it is free
        go.set()
        until(url, "running_requests", 0)
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=120).status_code == 200
