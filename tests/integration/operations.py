"""What the tests of several backends do with them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from rdzv import registry
from rdzv.conformance.handler_kit import in_thread
from rdzv.conformance.store_kit import Background
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question

TTL_SECONDS = 60.0
PATIENCE_SECONDS = 30.0
POLL_SECONDS = 0.02
CROWD_SECONDS_MAX = 240.0


def until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for what does not depend on this process alone."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        pause.wait(POLL_SECONDS)


def run_apart(program: str, *arguments: str) -> None:
    """Run a program of Python in a process without threads of this one, as it may fork."""
    subprocess.run([sys.executable, "-c", program, *arguments], timeout=60, check=True)


def reach(
    call: Callable[[], Any],
    seconds: float = PATIENCE_SECONDS,
    unanswered: type[Exception] = RendezvousConnectionError,
) -> Any:
    """Make a call until it is answered."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while True:
        try:
            return call()
        except unanswered:
            if time.monotonic() > deadline:
                raise
        pause.wait(POLL_SECONDS)


def use_all(backend: Any, store: Any, timeout_seconds: float = 10.0, *, start: bool = True) -> None:
    """Every operation of both, on a run without data."""
    if start:
        backend.open()
    _, token, _ = backend.set_state(b"1")
    assert backend.set_state(b"2", token)[2]
    backend.announce(Entry("node", b"data", "round"), TTL_SECONDS, Question("node", "round"))
    backend.announce(Entry("node", b"data", "later"), TTL_SECONDS, Question("node", "later"))
    assert backend.beat("node", TTL_SECONDS, Question("node", "later")).confirmed == 1
    assert backend.beat("node", 2 * TTL_SECONDS, Question("node", "later")).confirmed == 1
    revision = backend.beat("node", TTL_SECONDS, Question()).revision
    assert backend.wait_for_change(backend.get_state()[1], 0.01, revision) is None
    backend.withdraw("node", TTL_SECONDS)
    assert len(backend.entries()) == 1
    store.set_timeout(timedelta(seconds=timeout_seconds))
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.add("n", 2) == 2
    assert store.compare_set("c", "", "x") == b"x"
    store.append("a", "1")
    assert store.multi_get(["a", "b"]) == [b"11", b"2"]
    assert store.peek(["b", "absent"]) == [b"2", None]
    waiting = Background(lambda: store.get("later"))
    waiting.still_blocked()
    store.set("later", "1")
    waiting.result()
    store.queue_push("q", "1")
    assert store.queue_len("q") == 1
    assert store.check(["a", "q"])
    assert store.queue_pop("q") == b"1"
    assert store.num_keys() == len(store.list_keys()) == 5
    assert store.delete_key("a")


@contextlib.contextmanager
def crowd(
    backend: str, endpoint: str, run_id: str, count: int, **options: Any
) -> Iterator[list[Any]]:
    """The handlers of nodes that will meet, made as torchrun makes them."""
    parameters = RendezvousParameters(
        backend,
        endpoint,
        run_id,
        count,
        count,
        local_addr="127.0.0.1",
        join_timeout=CROWD_SECONDS_MAX,
        **options,
    )
    handlers: list[Any] = []
    try:
        handlers += [registry.create(parameters) for _ in range(count)]
        yield handlers
    finally:
        for handler in handlers:
            handler._departure.cancel()
            handler._keep_alive.stop()
        for handler in handlers:
            assert handler._keep_alive.wait(30.0)
            handler._backend.close()
            handler._store.close()


def meet(handlers: list[Any]) -> list[RendezvousInfo]:
    """What each of the handlers of a :func:`crowd` gets out of its barrier."""
    joins: list[Future[RendezvousInfo]] = [
        in_thread(handler.next_rendezvous) for handler in handlers
    ]
    return [joining.result(CROWD_SECONDS_MAX) for joining in joins]
