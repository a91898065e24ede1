"""How a round is set up once it is final: rank 0 serves, and everybody learns where."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

import rdzv.bootstrap
import rdzv.handler
from rdzv.backends.memory import MemoryBackend
from rdzv.bootstrap import BootstrapServer, Hosting
from rdzv.codec import decode_state
from rdzv.driver import Stopped
from rdzv.effects import Prepare
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from rdzv.ports import Entry, Pulse, Question
from rdzv.round_store import RoundStore
from rdzv.state import Proposal

from .handler_kit import (
    PATIENCE_SECONDS,
    Job,
    Node,
    Stopwatch,
    bootstrap_of,
    results,
    wait_until,
    without_garbage_collection,
)

SOON_SECONDS = 2.0


def late(hosting: Hosting, timeout_seconds: float) -> int:
    """In place of ``Hosting.port``: the server is there too late for the document."""
    return 0


@contextlib.contextmanager
def published_by(store: type[RoundStore]) -> Iterator[tuple[Job, list[Node], list[Future[Any]]]]:
    """Two nodes and their joins. Their round is final, and its address goes by the round's store,
    which is such a one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rdzv.handler, "RoundStore", store)
        patch.setattr(Hosting, "port", late)
        with Job("2:2") as job:
            nodes = [job.node(), job.node()]
            joins = [node.join() for node in nodes]
            wait_until(
                "a round is final", lambda: all(n.handler._keep_alive._running for n in nodes)
            )
            yield job, nodes, joins


def test_rank_0_that_dies_before_it_has_published_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead: list[Node] = []

    def start_or_die(address: str, deadline: float, *, shared: bool) -> BootstrapServer:
        with lock:
            if not dead:
                # The server is started while the others confirm.
                wait_until("the round is final", lambda: any(map(is_rank_0, nodes)))
                dead.append(next(filter(is_rank_0, nodes)))
                dead[0].vanish()
                raise SystemExit
        return BootstrapServer(address, deadline, shared=shared)

    def is_rank_0(node: Node) -> bool:
        state = node.handler._session.state
        return state is not None and state.rank_of(node.id) == 0

    lock = threading.Lock()
    monkeypatch.setattr(rdzv.handler, "BootstrapServer", start_or_die)
    with Job("2:3") as job:
        nodes = [job.node() for _ in range(3)]
        joins = [node.join() for node in nodes]
        wait_until("rank 0 has died", lambda: dead)
        pairs = [pair for pair in zip(nodes, joins, strict=True) if pair[0] is not dead[0]]
        survivors = [node for node, _ in pairs]
        infos = results(survivors, [join for _, join in pairs])
        assert {info.world_size for info in infos} == {2}
        assert all(node.state.round == 2 for node in survivors)


def test_without_enough_nodes_for_another_round_the_deadline_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*arguments: object, **options: object) -> BootstrapServer:
        raise SystemExit

    monkeypatch.setattr(rdzv.handler, "BootstrapServer", never)
    monkeypatch.setattr(rdzv.bootstrap, "SLICE_SECONDS", 2.0)
    with Job("2:2", join_timeout=3.0) as job:
        nodes = [job.node(), job.node()]
        watch = Stopwatch()
        joins = [node.join() for node in nodes]
        errors = [join.exception(PATIENCE_SECONDS) for join in joins]
        assert {type(error) for error in errors} == {SystemExit, RendezvousTimeoutError}
        assert watch.seconds < 3.0 + 1.5, "there is one deadline for both rounds"


def test_a_server_that_cannot_start_names_the_option_and_closes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Accepted when chosen, and gone when it is needed, as after a change of the network.
    monkeypatch.setattr(rdzv.handler, "choose_address", lambda *_: "203.0.113.1")
    with Job("1:2", join_timeout=2.0) as job:
        node = job.node()
        watch = Stopwatch()
        with pytest.raises(RendezvousConnectionError, match="--local-addr"):
            node.handler.next_rendezvous()
        assert watch.seconds < 2.0 + SOON_SECONDS
        observer = MemoryBackend(job.space, job.run_id)
        wait_until("it has left", lambda: all(row.withdrawn for row in observer.entries()))
        assert node.handler.shutdown()
        monkeypatch.undo()
        job.start(1)


def test_a_node_that_never_got_in_closes_nothing_even_before_it_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*arguments: object, **options: object) -> BootstrapServer:
        raise RendezvousConnectionError("as the test wanted")

    monkeypatch.setattr(rdzv.handler, "BootstrapServer", never)
    with Job("1:1") as job:
        node = job.node()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node.handler._keep_alive, "leave", lambda: None)
            with pytest.raises(RendezvousConnectionError):
                node.handler.next_rendezvous()
        assert node.handler.shutdown()
        found = MemoryBackend(job.space, job.run_id).get_state()
        assert found is not None
        assert decode_state(found[0]).closed is None


def test_a_round_store_that_fails_for_a_moment_is_asked_again() -> None:
    raised = {"count": 0}

    class Flaky(RoundStore):
        def multi_set(self, keys: Any, values: Any) -> None:
            raised["count"] += 1
            if raised["count"] <= 2:
                raise dist.DistNetworkError("as the test wanted")
            super().multi_set(keys, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rdzv.handler, "RoundStore", Flaky)
        patch.setattr(Hosting, "port", late)
        with Job("2:2") as job:
            job.start(2)
    assert raised["count"] == 3


def test_where_the_document_tells_where_rank_0_serves_nobody_asks_the_store() -> None:
    class Silent(RoundStore):
        def multi_set(self, keys: Any, values: Any) -> None:
            raise AssertionError

        def peek(self, keys: Any) -> list[bytes | None]:
            raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rdzv.handler, "RoundStore", Silent)
        with Job("3:3") as job:
            nodes, infos = job.start(3)
            addresses = {bootstrap_of(info) for info in infos}
            assert addresses == {("127.0.0.1", nodes[0].state.port)}


def test_a_server_that_cannot_be_published_ends_with_the_attempt() -> None:
    class Never(RoundStore):
        def multi_set(self, keys: Any, values: Any) -> None:
            raise dist.DistNetworkError("as the test wanted")

    servers: list[weakref.ref[BootstrapServer]] = []

    def start(address: str, deadline: float, *, shared: bool) -> BootstrapServer:
        server = BootstrapServer(address, deadline, shared=shared)
        servers.append(weakref.ref(server))
        return server

    with pytest.MonkeyPatch.context() as patch, without_garbage_collection():
        patch.setattr(rdzv.handler, "RoundStore", Never)
        patch.setattr(Hosting, "port", late)
        patch.setattr(rdzv.handler, "BootstrapServer", start)
        with Job("1:1", join_timeout=1.0) as job, pytest.raises(RendezvousTimeoutError) as caught:
            job.node().handler.next_rendezvous()
        assert "rank 0" in str(caught.value)
        wait_until("its server has ended", lambda: [each() for each in servers] == [None])


def test_a_wipe_while_the_round_is_set_up_sends_nobody_round_again() -> None:
    slow = threading.Event()

    class Slow(RoundStore):
        def multi_set(self, keys: Any, values: Any) -> None:
            slow.wait(PATIENCE_SECONDS)
            super().multi_set(keys, values)

    with published_by(Slow) as (job, nodes, joins):
        before = nodes[0].state.round_id
        job.space.wipe()
        wait_until("the document is back", lambda: job.document_round == before)
        slow.set()
        results(nodes, joins)
        assert nodes[0].state.round_id == before


def test_nothing_is_hosted_for_nobody() -> None:
    """The background thread may have read that it will be rank 0 just when its caller gave up."""
    with Job("1:1") as job:
        (node,), _ = job.start(1)
        proposed = replace(node.state, proposal=Proposal("late", node.state.participants))
        for _ in range(2):
            with pytest.raises(Stopped):
                node.handler._driver.perform(Prepare(proposed))
            assert node.handler._hosting is None
            node.handler.shutdown()


def test_a_port_that_is_merely_free_is_looked_for_when_the_round_is_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody else would have the more time to take it."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    released = threading.Event()

    class Hesitant(MemoryBackend):
        def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
            if entry.round_label:
                released.wait(PATIENCE_SECONDS)
            return super().announce(entry, ttl_seconds, question)

    with Job("2:2") as job:
        first = job.node(local_addr="127.0.0.1")
        second = job.node(Hesitant(job.space, job.run_id), local_addr="127.0.0.2")
        joins = [first.join(), second.join()]
        wait_until(
            "the first has confirmed",
            lambda: any(
                entry.node.id == first.id and entry.running is not None for entry in job.entries
            ),
        )
        assert job.open_store().num_keys() == 0
        released.set()
        assert [info.rank for info in results([first, second], joins)] == [0, 1]


def test_closing_while_a_round_is_set_up_is_told() -> None:
    class Never(RoundStore):
        def multi_set(self, keys: Any, values: Any) -> None:
            raise dist.DistNetworkError("as the test wanted")

    with published_by(Never) as (job, _, joins):
        job.node().handler.set_closed()
        errors = [join.exception(PATIENCE_SECONDS) for join in joins]
        assert [type(error) for error in errors] == [RendezvousClosedError] * 2
