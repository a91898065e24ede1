"""No wait without an end: what hangs below, shutting down and being interrupted."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousInfo

from rdzv.backends.memory import MemoryBackend
from rdzv.effects import Notice
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rdzv.ports import Closable, Token

from .handler_kit import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    LIVENESS_WINDOW_SECONDS,
    PATIENCE_SECONDS,
    Job,
    Stopwatch,
    TroubledBackend,
    backend_of,
    join_all,
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
