"""No wait without an end: what hangs below, the bootstrap, shutting down and being interrupted."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousInfo

import rdzv.bootstrap
import rdzv.handler
from rdzv.backends.memory import MemoryBackend
from rdzv.bootstrap import BootstrapServer
from rdzv.codec import decode_state
from rdzv.driver import Stopped
from rdzv.effects import Notice, Prepare
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rdzv.ports import Closable, Entry, Pulse, Question, Token
from rdzv.round_store import RoundStore
from rdzv.state import Proposal

from .handler_kit import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    LIVENESS_WINDOW_SECONDS,
    PATIENCE_SECONDS,
    Job,
    Node,
    Stopwatch,
    TroubledBackend,
    backend_of,
    join_all,
    results,
    start_troubled,
    together,
    troubled,
    wait_until,
    without_garbage_collection,
)

SOON_SECONDS = 2.0


# --------------------------------------------------------------------------------- what can hang


def a_backend_that_hangs_holds_no_joiner_beyond_its_deadline() -> None:
    with Job("1:1", join_timeout=1.0, close_timeout=1.0) as job:
        node = job.node(troubled(job))
        backend_of(node).hang()
        watch = Stopwatch()
        with pytest.raises(RendezvousTimeoutError, match="run 'job'"):
            node.handler.next_rendezvous()
        assert 1.0 <= watch.seconds < 1.0 + SOON_SECONDS
        watch = Stopwatch()
        assert not node.handler.shutdown()
        assert watch.seconds < 1.0 + SOON_SECONDS
        backend_of(node).resume()


def a_backend_that_hangs_holds_no_shutdown_beyond_its_deadline() -> None:
    with Job("1:1", close_timeout=1.0) as job:
        (node,) = start_troubled(job, 1)
        backend_of(node).hang()
        backend_of(node).hanging.wait(PATIENCE_SECONDS)
        assert node.handler.num_nodes_waiting() == 0
        assert not node.handler.is_closed()
        watch = Stopwatch()
        with pytest.raises(RendezvousTimeoutError, match="closed within 1 s"):
            node.handler.set_closed()
        assert not node.handler.shutdown()
        assert watch.seconds < 2 * 1.0 + 2 * SOON_SECONDS
        backend_of(node).resume()


def a_joiner_that_is_shut_down_before_its_turn_is_told() -> None:
    with Job("1:1", close_timeout=1.0) as job:
        (node,) = start_troubled(job, 1)
        backend_of(node).hang()
        assert backend_of(node).hanging.wait(PATIENCE_SECONDS)
        joining = node.join()
        wait_until("it is its turn next", lambda: node.handler._keep_alive._orders.qsize())
        assert not node.handler.shutdown()
        backend_of(node).resume()
        error = joining.exception(PATIENCE_SECONDS)
        assert isinstance(error, RendezvousClosedError), repr(error)


def a_backend_that_answers_too_late_closes_nothing() -> None:
    with Job("1:1", join_timeout=1.0) as job:
        node = job.node(troubled(job))
        backend_of(node).hang()
        with pytest.raises(RendezvousTimeoutError):
            node.handler.next_rendezvous()
        backend_of(node).resume()
        assert node.handler.shutdown(), "it closes nothing: it never got in"
        (other,), _ = job.start(1)
        assert node.id not in other.state.participant_ids
        assert not other.handler.is_closed()


def test_a_name_that_does_not_resolve_in_time_is_told_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()

    def getaddrinfo(*arguments: object, **options: object) -> Any:
        released.wait(PATIENCE_SECONDS)
        raise OSError("released by the test")

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    watch = Stopwatch()
    with Job("1:1", join_timeout=1.0) as job:
        with pytest.raises(RendezvousError, match="--local-addr"):
            job.node(local_addr="node-of-a-slow-resolver").handler.next_rendezvous()
        assert watch.seconds < 1.0 + SOON_SECONDS
        released.set()


def shutdown_never_raises() -> None:
    class Broken(TroubledBackend, Closable):
        def get_state(self) -> tuple[bytes, Token] | None:
            if self.is_down:
                raise ZeroDivisionError("as the test wanted")
            return super().get_state()

        def withdraw(self, node_id: str, ttl_seconds: float) -> None:
            raise KeyError("as the test wanted")

        def close(self) -> None:
            raise AssertionError("as the test wanted")

    with Job("1:1", close_timeout=1.0) as job:
        backend = Broken(job.space, job.run_id)
        node = job.node(backend)
        node.join().result(PATIENCE_SECONDS)
        backend.is_down = True
        assert node.handler.shutdown() is False
        assert node.handler.shutdown() is True, "what has been tried is not tried again"


def a_second_barrier_of_one_handler_is_refused() -> None:
    with Job("2:2") as job:
        node, other = job.node(), job.node()
        joining = node.join()
        wait_until(
            "it is in the barrier", lambda: bool(MemoryBackend(job.space, job.run_id).entries())
        )
        with pytest.raises(RendezvousStateError, match="another thread"):
            node.handler.next_rendezvous()
        other.join().result(PATIENCE_SECONDS)
        joining.result(PATIENCE_SECONDS)
        assert len(node.state.participants) == 2


def a_forked_child_closes_nothing() -> None:
    with Job("1:1") as job:
        (node,), _ = job.start(1)
        child = os.fork()
        if not child:
            os._exit(0 if node.handler.shutdown() and not node.handler.is_closed() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not node.handler._is_shut_down
        assert node.handler.shutdown()
        assert node.handler.is_closed()


# ------------------------------------------------------------------------------------- bootstrap


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
        with Job("2:2") as job:
            job.start(2)
    assert raised["count"] == 3


def test_a_wipe_while_the_round_is_set_up_sends_nobody_round_again() -> None:
    slow = threading.Event()

    class Slow(RoundStore):
        def multi_set(self, keys: Any, values: Any) -> None:
            slow.wait(PATIENCE_SECONDS)
            super().multi_set(keys, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rdzv.handler, "RoundStore", Slow)
        with Job("2:2") as job:
            nodes = [job.node(), job.node()]
            joins = [node.join() for node in nodes]
            wait_until(
                "a round is final", lambda: all(n.handler._keep_alive._running for n in nodes)
            )
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


# ------------------------------------------------------------------------------ the exit barrier


def test_an_agent_that_is_interrupted_leaves_the_barrier() -> None:
    """A signal handler that raises, as torch's does, ends the wait; the node must not be counted
    in a round that nobody waits for."""

    class Interrupt(BaseException):
        pass

    with Job("2:2") as job:
        node = job.node()

        def wait(*_: object) -> RendezvousInfo:
            wait_until("it waits", lambda: node.is_announced)
            raise Interrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node.handler, "_wait", wait)
            with pytest.raises(Interrupt):
                node.handler.next_rendezvous()
        roster = node.handler._driver._roster
        wait_until(
            "it has withdrawn",
            lambda: all(row.withdrawn for row in roster.entries()),
            KEEP_ALIVE_INTERVAL_SECONDS + SOON_SECONDS,
        )
        nodes, _ = job.start(2)
        assert node.id not in nodes[0].state.participant_ids


def that_a_node_has_finished_is_told_before_the_barrier() -> None:
    with Job("2:2") as job:
        nodes, infos = job.start(2)
        infos[1].store.add("torchelastic/agent/terminal_state/num_members", 1)
        observer = nodes[0].handler._driver
        present, _ = observer._list()
        finished = {seen.entry.node.id: seen.entry.finished for seen in present}
        assert finished == {nodes[0].id: False, nodes[1].id: True}


def that_a_node_has_finished_is_told_after_an_outage_if_not_before() -> None:
    with Job("2:2") as job:
        nodes = [job.node(), job.node(troubled(job))]
        infos = join_all(nodes)
        backend_of(nodes[1]).is_down = True
        infos[1].store.add("torchelastic/agent/terminal_state/num_members", 1)
        backend_of(nodes[1]).is_down = False

        def told() -> bool:
            present, _ = nodes[0].handler._driver._list()
            return any(seen.entry.finished for seen in present)

        wait_until("it is told", told, LIVENESS_WINDOW_SECONDS)


def test_what_breaks_a_round_that_is_being_set_up() -> None:
    with Job("1:2") as job:
        (node,), _ = job.start(1)
        node.vanish()
        assert node.handler._keep_alive.wait(PATIENCE_SECONDS)
        session, state = node.handler._session, node.state
        assert node.handler._broken(state) == ""
        session.state = None
        assert node.handler._broken(state) == "", "the backend has lost its data for a moment"
        session.state = replace(state, round=state.round - 1, participants=(), nonce="")
        assert node.handler._broken(state) == "", "an older copy"
        session.state = replace(state, lost=(node.id,))
        assert "lost" in node.handler._broken(state)
        session.state = state
        session.notice = Notice(count=1)
        assert "formed anew" in node.handler._broken(state)
        session.overtaken = True
        assert "another round" in node.handler._broken(state)
        session.run_closed = True
        with pytest.raises(RendezvousClosedError):
            node.handler._broken(state)


def test_closing_while_a_round_is_set_up_is_told() -> None:
    class Never(RoundStore):
        def multi_set(self, keys: Any, values: Any) -> None:
            raise dist.DistNetworkError("as the test wanted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rdzv.handler, "RoundStore", Never)
        with Job("2:2") as job:
            nodes = [job.node(), job.node()]
            joins = [node.join() for node in nodes]
            wait_until(
                "a round is final", lambda: all(n.handler._keep_alive._running for n in nodes)
            )
            job.node().handler.set_closed()
            errors = [join.exception(PATIENCE_SECONDS) for join in joins]
            assert [type(error) for error in errors] == [RendezvousClosedError] * 2


# ------------------------------------------------------------------------------------- all of it


def test_what_ends_although_something_hangs() -> None:
    """One test, for these spend their time waiting and can do so side by side."""
    with without_garbage_collection():
        together(
            a_backend_that_hangs_holds_no_joiner_beyond_its_deadline,
            a_backend_that_hangs_holds_no_shutdown_beyond_its_deadline,
            a_joiner_that_is_shut_down_before_its_turn_is_told,
            a_backend_that_answers_too_late_closes_nothing,
            shutdown_never_raises,
            a_second_barrier_of_one_handler_is_refused,
            a_forked_child_closes_nothing,
            that_a_node_has_finished_is_told_before_the_barrier,
            that_a_node_has_finished_is_told_after_an_outage_if_not_before,
        )
