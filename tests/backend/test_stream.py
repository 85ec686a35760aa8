"""Events between two threads: none is lost, the order stays, and who waits is woken."""

import random
import threading
import time

from tinychat.backend.stream import EventStream

MANY = 20_000


def produce(stream: EventStream[int]) -> threading.Thread:
    def run() -> None:
        rng = random.Random(1)
        for i in range(MANY):
            stream.put(i)
            if rng.random() < 0.01:
                time.sleep(0)
        stream.end()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_who_iterates_gets_every_event_in_order() -> None:
    for _ in range(5):
        stream: EventStream[int] = EventStream()
        produce(stream)
        assert list(stream) == list(range(MANY)) and stream.ended


def test_who_polls_gets_every_event_in_order() -> None:
    stream: EventStream[int] = EventStream()
    produce(stream)
    seen: list[int] = []
    while not stream.ended:
        seen += stream.poll()
        time.sleep(0)
    assert seen == list(range(MANY)) and stream.poll() == []


def test_wake_is_called_for_what_comes_and_for_what_is_there() -> None:
    woken: list[int] = []
    stream: EventStream[int] = EventStream()
    stream.on_event(lambda: woken.append(1))
    stream.put(1)
    stream.end()
    assert len(woken) == 2
    stream.on_event(lambda: woken.append(1))
    assert len(woken) == 3 and list(stream) == [1]
