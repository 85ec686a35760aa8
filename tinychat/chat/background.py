"""Runs work on a thread and delivers its result as a Future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def settle(future: Future[T], job: Callable[[], T]) -> None:
    """Does `job` and puts its result, or what it raised, into `future`."""
    try:
        future.set_result(job())
    except Exception as e:
        future.set_exception(e)
