"""Nodes of one job as threads of this process: real handlers, real time, and what befalls them.

Nothing here sleeps for a fixed time: :func:`wait_until` polls a condition and has a deadline.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.codec import decode_state
from rdzv.errors import RendezvousClosedError, RendezvousConnectionError
from rdzv.handler import DynamicRendezvousHandler, create_handler
from rdzv.ports import Entry, Listed, Pulse, Question, Token
from rdzv.state import State
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
NOTICE_SECONDS_MAX = 2 * KEEP_ALIVE_INTERVAL_SECONDS + 1.0
"""From a change of the roster until the agents are told, where a beat has to find it."""
TOGETHER_SECONDS_MAX = 0.05
"""All agents of a round are told within this time of each other."""


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
    """The nodes of one run, on a space in memory unless told how else to make a backend."""

    def __init__(
        self,
        nodes: str,
        *,
        make_backend: Callable[[str], RendezvousBackend] | None = None,
        run_id: str = "job",
        **options: Any,
    ) -> None:
        self.min_nodes, self.max_nodes = (int(count) for count in nodes.split(":"))
        self.run_id = run_id
        self.space = MemorySpace()
        self.store_client = MemoryClient()
        self.nodes: list[Node] = []
        self._make_backend = make_backend or (lambda run_id: MemoryBackend(self.space, run_id))
        self._options = {**CONFIGURATION, **options}

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
        self.space.wipe()  # wakes those that wait for a change
        if kind is None:
            for node in self.nodes:
                assert node.handler._keep_alive.wait(PATIENCE_SECONDS), "the thread has ended"

    def node(
        self,
        backend: RendezvousBackend | None = None,
        local_addr: str = "127.0.0.1",
        **options: Any,
    ) -> Node:
        """One more node, with options of its own where given."""
        parameters = RendezvousParameters(
            backend="memory",
            endpoint="",
            run_id=self.run_id,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            local_addr=local_addr,
            **{**self._options, **options},
        )
        backend = backend or self._make_backend(self.run_id)
        handler = create_handler(MemoryStore(self.store_client), backend, parameters)
        node = Node(handler)
        self.nodes.append(node)
        return node

    def start(self, count: int, **options: Any) -> tuple[list[Node], list[RendezvousInfo]]:
        """As many new nodes in a round; in rank order."""
        nodes = [self.node(**options) for _ in range(count)]
        infos = join_all(nodes)
        ordered = sorted(zip(infos, nodes, strict=True), key=lambda pair: pair[0].rank)
        return [node for _, node in ordered], [info for info, _ in ordered]


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
        assert info.store.multi_get(keys) == participants


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


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """While moments are compared: a full collection stops all threads for longer than a beat."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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


def document_round(job: Job) -> object:
    """The identity of the round in the document, as it is now; None without one."""
    found = job.nodes[0].handler._backend.get_state()
    return None if found is None else decode_state(found[0]).round_id
