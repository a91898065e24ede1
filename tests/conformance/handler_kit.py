"""Nodes of one job as threads of this process: real handlers, real time, and what befalls them.

Rules:

* A liveness window of four seconds and a keep-alive interval of one: shorter ones make healthy
  nodes look lost on a machine that stalls. So a clause that loses a node takes five seconds and
  more, and scenarios that only wait run side by side, each under a run id of its own.
* Nothing here sleeps for a fixed time: :func:`wait_until` polls a condition and has a deadline.
* A node dies only as a process does: :meth:`Node.vanish` stops it where it is.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.adapters import POLL_MAX_SECONDS
from rdzv.conformance.clauses import Function, book
from rdzv.conformance.target import Target
from rdzv.driver import Driver
from rdzv.effects import ListRoster, Read
from rdzv.errors import RendezvousConnectionError
from rdzv.handler import DynamicRendezvousHandler, create_handler
from rdzv.state import RosterEntry, State
from rdzv.stores.memory import MemoryClient, MemoryStore

T = TypeVar("T")
JobT = TypeVar("JobT", bound="Job")

KEEP_ALIVE_INTERVAL_SECONDS = 1.0
LIVENESS_WINDOW_SECONDS = 4.0
CONFIGURATION: dict[str, Any] = {
    "join_timeout": 30.0,
    "last_call_timeout": 0.3,
    "close_timeout": 5.0,
    "keep_alive_interval": KEEP_ALIVE_INTERVAL_SECONDS,
    "keep_alive_max_attempt": 4,
}
PATIENCE_SECONDS = 30.0
"""For what should happen soon, on a machine that may be busy."""
SLACK_SECONDS = 0.5
NOTICE_SECONDS_MAX = 2 * KEEP_ALIVE_INTERVAL_SECONDS + 1.0
"""From a change of the roster until the agents are told, where a beat has to find it."""
LOSS_SECONDS_MAX = LIVENESS_WINDOW_SECONDS + 2 * KEEP_ALIVE_INTERVAL_SECONDS + 1.0
"""From the death of a node until the agents are told."""
TOGETHER_SECONDS_MAX = 0.05
"""All agents of a round are told within this time of each other."""


def handler_book(
    group: str,
    *,
    needs: tuple[str, ...] = (),
    controls: tuple[str, ...] = (),
    timeout_seconds: float = 120.0,
) -> Callable[[Function], Function]:
    """:func:`rdzv.conformance.clauses.book` for clauses that take real time."""
    return book(
        "handler",
        group,
        needs=needs,
        controls=("real_time", *controls),
        timeout_seconds=timeout_seconds,
    )


def soon_seconds(target: Target) -> float:
    """For what needs no waiting at all, on a machine that may be busy; a few polls more where
    nobody can be told."""
    return 2.0 + (3 * POLL_MAX_SECONDS if "watch" in target.without else 0.0)


def wait_until(
    what: str, condition: Callable[[], T | None], deadline_seconds: float = PATIENCE_SECONDS
) -> T:
    """What the condition returns as soon as it is true."""
    deadline = time.monotonic() + deadline_seconds
    pause = threading.Event()
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {deadline_seconds:g} s: {what}"
        pause.wait(0.005)


def hold_for(what: str, condition: Callable[[], object], seconds: float) -> None:
    """Fail as soon as the condition no longer holds within the next seconds."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while time.monotonic() < deadline:
        assert condition(), f"not for {seconds:g} s: {what}"
        pause.wait(0.01)


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Start the call in a daemon thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="test-agent", daemon=True).start()
    return future


def together(*scenarios: Callable[[], None]) -> None:
    """Run scenarios that wait a lot and have nothing in common side by side."""
    running = {scenario.__name__: in_thread(scenario) for scenario in scenarios}
    failed = {}
    for name, future in running.items():
        error = future.exception()
        if error is not None:
            failed[name] = error
    for name, error in failed.items():
        raise AssertionError(f"{name} failed, of {sorted(failed)} in all") from error


class Node:
    """A handler, and the agent that would call it."""

    def __init__(self, handler: DynamicRendezvousHandler) -> None:
        self.handler = handler

    def __repr__(self) -> str:
        return f"Node({self.id})"

    @property
    def id(self) -> str:
        return self.handler.node.id

    @property
    def state(self) -> State:
        """The document as this node has last read it."""
        state = self.handler._session.state
        assert state is not None
        return state

    @property
    def noticed(self) -> bool:
        return self.handler.num_nodes_waiting() > 0

    @property
    def is_announced(self) -> bool:
        return self.handler._session.announced

    @property
    def is_parked(self) -> bool:
        """Whether it waits as a spare."""
        return self.handler._session.parked

    @property
    def has_finished(self) -> bool:
        """Whether its agent has begun the exit barrier."""
        return self.handler._session.entry.finished

    @property
    def heard_at(self) -> float:
        """When the backend last answered it (``time.monotonic``)."""
        return self.handler._session.last_contact or 0.0

    def join(self) -> Future[RendezvousInfo]:
        """Call ``next_rendezvous()`` in a thread."""
        return in_thread(self.handler.next_rendezvous)

    def vanish(self) -> None:
        """Die without a word, as by kill -9 or loss of power."""
        self.handler._departure.cancel()
        self.handler._keep_alive.stop()

    def exit(self) -> None:
        """End as a process does that nobody told to shut down: the atexit path."""
        self.handler._departure.now()


class Job:
    """The nodes of one run on a target. Options are those of ``--rdzv-conf``."""

    def __init__(self, target: Target, nodes: str, *, run_id: str = "job", **options: Any) -> None:
        self.target = target
        self.min_nodes, self.max_nodes = (int(count) for count in nodes.split(":"))
        self.run_id = run_id
        self.nodes: list[Node] = []
        self._options = {**CONFIGURATION, **options}
        self._memory = MemoryClient()
        self._observer: Driver | None = None

    def __enter__(self: JobT) -> JobT:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes:
            node.vanish()
        if kind is None:
            for node in self.nodes:
                assert node.handler._keep_alive.wait(PATIENCE_SECONDS), "the thread has ended"

    def open_backend(self) -> RendezvousBackend:
        """Another backend of this run."""
        backend: RendezvousBackend = self.target.connect(self.run_id)
        return backend

    def open_store(self) -> Store:
        """Another store of this run; one in memory where the backend comes with none."""
        if "store" in self.target.without:
            return MemoryStore(self._memory)
        return self.target.store(self.run_id)

    def node(
        self,
        backend: RendezvousBackend | None = None,
        local_addr: str = "127.0.0.1",
        **options: Any,
    ) -> Node:
        """One more node, with options of its own where given."""
        backend = backend or self.open_backend()
        parameters = RendezvousParameters(
            backend=backend.name,
            endpoint="",
            run_id=self.run_id,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            local_addr=local_addr,
            **{**self._options, **options},
        )
        node = Node(create_handler(self.open_store(), backend, parameters))
        self.nodes.append(node)
        return node

    def start(self, count: int, **options: Any) -> tuple[list[Node], list[RendezvousInfo]]:
        """As many new nodes in a round; in rank order."""
        nodes = [self.node(**options) for _ in range(count)]
        infos = join_all(nodes)
        ordered = sorted(zip(infos, nodes, strict=True), key=lambda pair: pair[0].rank)
        return [node for _, node in ordered], [info for info, _ in ordered]

    # What somebody sees who is no node of it

    @property
    def document(self) -> State:
        """The document as it is now."""
        found: State | None = self._observe(Read()).state
        assert found is not None, "there is no document"
        return found

    @property
    def document_round(self) -> object:
        """The identity of the round in the document; None without one, or without an answer."""
        try:
            found: State | None = self._observe(Read()).state
        except RendezvousConnectionError:
            return None
        return None if found is None else found.round_id

    @property
    def entries(self) -> list[RosterEntry]:
        """Those of all live nodes."""
        present, _ = self._observe(ListRoster())
        return [one.entry for one in present]

    def _observe(self, effect: Read | ListRoster) -> Any:
        if self._observer is None:
            self._observer = Driver(self.open_backend(), LIVENESS_WINDOW_SECONDS)
        return self._observer.perform(effect)

    def assert_together(self, moments: Sequence[float]) -> None:
        """Invariant 11, wherever the backend tells how old a change is."""
        if "server_clock" not in self.target.without:
            assert_together(moments)


def join_all(nodes: Sequence[Node]) -> list[RendezvousInfo]:
    """Call ``next_rendezvous()`` on all nodes at once; see :func:`results`."""
    return results(nodes, [node.join() for node in nodes])


def results(nodes: Sequence[Node], joins: Sequence[Future[RendezvousInfo]]) -> list[RendezvousInfo]:
    """What the joins returned, once it is known that these nodes, and no others, agree on it."""
    infos = [join.result(PATIENCE_SECONDS) for join in joins]
    check_agreement(nodes, infos)
    return infos


def check_agreement(nodes: Sequence[Node], infos: Sequence[RendezvousInfo]) -> None:
    """Invariant 1."""
    assert sorted(info.rank for info in infos) == list(range(len(nodes)))
    assert {info.world_size for info in infos} == {len(nodes)}
    assert len({bootstrap_of(info) for info in infos}) == 1
    assert len({node.state.round_id for node in nodes}) == 1
    for node, info in zip(nodes, infos, strict=True):
        assert node.state.rank_of(node.id) == info.rank
        info.store.set(f"rank-{info.rank}", node.id)
    keys = [f"rank-{rank}" for rank in range(len(nodes))]
    participants = [node_id.encode() for node_id in nodes[0].state.participant_ids]
    for info in infos:
        assert values_of(info.store, keys) == participants


def values_of(store: Any, keys: Sequence[str]) -> list[bytes]:
    """In one request, where the store can do that."""
    if store.has_extended_api():
        values: list[bytes] = store.multi_get(keys)
        return values
    return [store.get(key) for key in keys]


def bootstrap_of(info: RendezvousInfo) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT."""
    bootstrap = info.bootstrap_store_info
    assert bootstrap is not None
    return bootstrap.master_addr, bootstrap.master_port


def notice_moments(
    nodes: Sequence[Node], deadline_seconds: float = PATIENCE_SECONDS
) -> list[float]:
    """When, from now on, each node's ``num_nodes_waiting()`` turns positive."""
    started, pause = time.monotonic(), threading.Event()
    moments: dict[str, float] = {}
    while len(moments) < len(nodes):
        for node in nodes:
            if node.id not in moments and node.noticed:
                moments[node.id] = time.monotonic() - started
        assert time.monotonic() - started < deadline_seconds, (
            f"after {deadline_seconds:g} s only {len(moments)} of {len(nodes)} have noticed"
        )
        pause.wait(0.002)
    return [moments[node.id] for node in nodes]


def assert_together(moments: Sequence[float]) -> None:
    """Invariant 11."""
    spread = max(moments) - min(moments)
    assert spread <= TOGETHER_SECONDS_MAX, f"agents were told {spread * 1000:.0f} ms apart"


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """While moments are compared: a full collection stops all threads for longer than a beat."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
