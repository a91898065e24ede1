"""What the clauses about stores are written with."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rdzv.conformance.clauses import book
from rdzv.conformance.target import Target

Connect = Callable[[], Any]
Case = Callable[[Connect], None]

SHORT = timedelta(milliseconds=100)
LONG = timedelta(seconds=30)
INT_MAX_MS = timedelta(milliseconds=2**31 - 1)
"""What torch's RPC waits with."""
LONG_ENOUGH_TO_SEE_SECONDS = 0.05
"""A call that has not returned after this long is taken to be blocked."""


def store_book(group: str, *needs: str) -> Callable[[Case], Case]:
    """A decorator as :func:`rdzv.conformance.clauses.book` makes one, for functions that take
    what opens stores."""
    enter = book("store", group, needs=("store", *needs))

    def case(function: Case) -> Case:
        @functools.wraps(function)
        def on_target(target: Target) -> None:
            function(target.store)

        enter(on_target)
        return function

    return case


@contextmanager
def times_out(at_least: timedelta = SHORT) -> Iterator[None]:
    """The block raises the error of a wait that ended in vain, not sooner and not much later."""
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"[Tt]imeout"):
        yield
    passed = time.monotonic() - start
    # A millisecond is the resolution of C++'s timeouts.
    assert at_least.total_seconds() - 0.002 <= passed < at_least.total_seconds() + 5


class Background:
    """A call in another thread, which is seen to be blocked before the test goes on."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._call = call
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._outcome.put((True, self._call()))
        except BaseException as error:
            self._outcome.put((False, error))

    def still_blocked(self) -> Background:
        try:
            early = self._outcome.get(timeout=LONG_ENOUGH_TO_SEE_SECONDS)
        except queue.Empty:
            return self
        raise AssertionError(f"the call did not block: {early[1]!r}")

    def result(self) -> Any:
        good, value = self._outcome.get(timeout=LONG.total_seconds() + 5)
        if not good:
            raise value
        return value


def in_threads(count: int, call: Callable[[int], object]) -> list[Any]:
    """The results of ``call(0)`` to ``call(count - 1)``, made in as many threads at once."""
    start = threading.Barrier(count)

    def run(index: int) -> object:
        start.wait()
        return call(index)

    running = [Background(lambda index=index: run(index)) for index in range(count)]  # type: ignore[misc]
    return [each.result() for each in running]
