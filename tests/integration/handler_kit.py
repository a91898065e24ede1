"""What the tests of handlers need beside the kit's own nodes and jobs: a backend in memory, in real
time, and trouble with it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
from torch.distributed import Store
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.conformance import handler_kit
from rdzv.conformance.handler_kit import (
    CONFIGURATION,
    KEEP_ALIVE_INTERVAL_SECONDS,
    LIVENESS_WINDOW_SECONDS,
    LOSS_SECONDS_MAX,
    NOTICE_SECONDS_MAX,
    PATIENCE_SECONDS,
    SLACK_SECONDS,
    Node,
    Stopwatch,
    assert_together,
    bootstrap_of,
    hold_for,
    in_thread,
    join_all,
    notice_moments,
    results,
    together,
    wait_until,
    without_garbage_collection,
)
from rdzv.conformance.target import Target
from rdzv.errors import RendezvousClosedError, RendezvousConnectionError
from rdzv.ports import Entry, Listed, Pulse, Question, Token
from rdzv.stores.memory import MemoryStore

from .targets import MemoryTarget

__all__ = [
    "CONFIGURATION",
    "KEEP_ALIVE_INTERVAL_SECONDS",
    "LIVENESS_WINDOW_SECONDS",
    "LOSS_SECONDS_MAX",
    "NOTICE_SECONDS_MAX",
    "PATIENCE_SECONDS",
    "SLACK_SECONDS",
    "Job",
    "Node",
    "RealTimeMemoryTarget",
    "Stopwatch",
    "TroubledBackend",
    "assert_together",
    "backend_of",
    "bootstrap_of",
    "close",
    "grow",
    "hold_for",
    "in_thread",
    "join_all",
    "lose_one",
    "notice_moments",
    "results",
    "start_troubled",
    "together",
    "troubled",
    "wait_until",
    "without_garbage_collection",
]


class RealTimeMemoryTarget(MemoryTarget):
    """On this machine's clock, as handlers need it."""

    real_time = True

    def __init__(self) -> None:
        super().__init__()
        self.space = MemorySpace()

    def let_pass(self, seconds: float) -> None:
        Target.let_pass(self, seconds)


class Job(handler_kit.Job):
    """The nodes of one run, on a space in memory of its own unless told how else to make a
    backend."""

    def __init__(
        self,
        nodes: str,
        *,
        make_backend: Callable[[str], RendezvousBackend] | None = None,
        run_id: str = "job",
        **options: Any,
    ) -> None:
        target = RealTimeMemoryTarget()
        super().__init__(target, nodes, run_id=run_id, **options)
        self.space = target.space
        self.store_client = target.client
        self._make_backend = make_backend

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes:
            node.vanish()
        self.space.wipe()  # wakes those that wait for a change
        super().__exit__(kind, error, trace)

    def open_backend(self) -> RendezvousBackend:
        if self._make_backend is not None:
            return self._make_backend(self.run_id)
        return super().open_backend()

    def open_store(self) -> Store:
        return MemoryStore(self.store_client)


def grow(job: Job) -> list[Node]:
    """A job of two to three nodes: two start, and a late one joins them."""
    nodes, _ = job.start(2)
    late = job.node()
    joining = late.join()
    notice_moments(nodes)
    infos = results([*nodes, late], [*(node.join() for node in nodes), joining])
    assert [info.rank for info in infos] == [0, 1, 2]
    return [*nodes, late]


def lose_one(nodes: list[Node]) -> list[Node]:
    """The lowest rank vanishes, and the others form a round."""
    nodes[0].vanish()
    watch = Stopwatch()
    notice_moments(nodes[1:])
    assert watch.seconds < LIVENESS_WINDOW_SECONDS + 3 * KEEP_ALIVE_INTERVAL_SECONDS + 1.0
    join_all(nodes[1:])
    return nodes[1:]


def close(nodes: list[Node]) -> None:
    """One of them closes the run, and all hear of it."""
    nodes[0].handler.set_closed()
    wait_until("all hear of it", lambda: all(node.handler.is_closed() for node in nodes))
    with pytest.raises(RendezvousClosedError):
        nodes[1].handler.next_rendezvous()


class TroubledBackend(MemoryBackend):
    """Counts the calls; is down, or hangs, when told so."""

    def __init__(self, space: MemorySpace, run_id: str) -> None:
        super().__init__(space, run_id)
        self.calls: Counter[str] = Counter()
        self.is_down = False
        self.resumed = threading.Event()
        self.resumed.set()
        self.hanging = threading.Event()

    def hang(self) -> None:
        """Let every call from now on block until :meth:`resume`."""
        self.resumed.clear()

    def resume(self) -> None:
        self.resumed.set()

    def get_state(self) -> tuple[bytes, Token] | None:
        self._enter("get_state")
        return super().get_state()

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        self._enter("set_state")
        return super().set_state(state, token)

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        self._enter("announce")
        return super().announce(entry, ttl_seconds, question)

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        self._enter("beat")
        return super().beat(node_id, ttl_seconds, question)

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        self._enter("withdraw")
        super().withdraw(node_id, ttl_seconds)

    def entries(self) -> list[Listed]:
        self._enter("entries")
        return super().entries()

    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: object = None
    ) -> tuple[bytes, Token] | None:
        self._enter("wait_for_change")
        return super().wait_for_change(token, timeout_seconds, revision)

    def _enter(self, call: str) -> None:
        self.calls[call] += 1
        if not self.resumed.is_set():
            self.hanging.set()
            self.resumed.wait()
        if self.is_down:
            raise RendezvousConnectionError("the backend is down, as the test wanted")


def troubled(job: Job) -> TroubledBackend:
    """A backend for a node of the job whose trouble the test can make."""
    return TroubledBackend(job.space, job.run_id)


def backend_of(node: Node) -> TroubledBackend:
    """What :func:`troubled` made for the node."""
    backend = node.handler._backend
    assert isinstance(backend, TroubledBackend)
    return backend


def start_troubled(job: Job, count: int, **options: Any) -> list[Node]:
    """As ``Job.start``, on backends whose trouble the test can make."""
    nodes = [job.node(troubled(job), **options) for _ in range(count)]
    join_all(nodes)
    return sorted(nodes, key=lambda node: node.state.rank_of(node.id) or 0)
