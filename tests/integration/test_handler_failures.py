"""What agents see when nodes die, the backend fails, or something below hangs."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousInfo

import rdzv.handler
from rdzv.backends.memory import MemoryBackend
from rdzv.bootstrap import BootstrapServer
from rdzv.codec import decode_state
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rdzv.ports import Entry, Pulse, Question, Token

from .handler_kit import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    LIVENESS_WINDOW_SECONDS,
    NOTICE_SECONDS_MAX,
    PATIENCE_SECONDS,
    Job,
    Node,
    Stopwatch,
    TroubledBackend,
    assert_together,
    bootstrap_of,
    hold_for,
    join_all,
    notice_moments,
    results,
    together,
    wait_until,
    without_garbage_collection,
)

SLACK_SECONDS = 0.5
LOSS_SECONDS_MAX = LIVENESS_WINDOW_SECONDS + 2 * KEEP_ALIVE_INTERVAL_SECONDS + 1.0
SOON_SECONDS = 2.0


def troubled(job: Job) -> TroubledBackend:
    return TroubledBackend(job.space, job.run_id)


def backend_of(node: Node) -> TroubledBackend:
    backend = node.handler._backend
    assert isinstance(backend, TroubledBackend)
    return backend


def start_troubled(job: Job, count: int, **options: Any) -> list[Node]:
    """As ``Job.start``, on backends whose trouble the test can make."""
    nodes = [job.node(troubled(job), **options) for _ in range(count)]
    join_all(nodes)
    return sorted(nodes, key=lambda node: node.state.rank_of(node.id) or 0)


# ------------------------------------------------------------------------------------ lost nodes


def test_survivors_of_a_lost_node_form_a_smaller_round() -> None:
    def lose(rank: int) -> None:
        with Job("2:3") as job:
            nodes, old = job.start(3)
            lost = nodes.pop(rank)
            lost.vanish()
            watch = Stopwatch()
            assert_together(notice_moments(nodes))
            assert watch.seconds >= LIVENESS_WINDOW_SECONDS - KEEP_ALIVE_INTERVAL_SECONDS
            assert watch.seconds < LOSS_SECONDS_MAX + SLACK_SECONDS
            infos = join_all(nodes)
            assert lost.id not in nodes[0].state.participant_ids
            assert bootstrap_of(infos[0]) != bootstrap_of(old[0])

    def lose_rank_0() -> None:
        lose(0)

    def lose_rank_2() -> None:
        lose(2)

    def lose_one_that_says_goodbye() -> None:
        with Job("2:3") as job:
            nodes, _ = job.start(3)
            nodes.pop(0).exit()
            watch = Stopwatch()
            assert_together(notice_moments(nodes))
            assert watch.seconds < NOTICE_SECONDS_MAX + SLACK_SECONDS < LIVENESS_WINDOW_SECONDS
            join_all(nodes)

    with without_garbage_collection():
        together(lose_rank_0, lose_rank_2, lose_one_that_says_goodbye)


def test_the_three_lowest_ranks_may_all_be_lost() -> None:
    with Job("2:5") as job, without_garbage_collection():
        nodes, _ = job.start(5)
        for node in nodes[:3]:
            node.vanish()
        assert_together(notice_moments(nodes[3:], 2 * LIVENESS_WINDOW_SECONDS + 5))
        join_all(nodes[3:])


def test_a_lost_node_stops_nobody_where_that_is_not_wanted() -> None:
    def it_is_switched_off() -> None:
        with Job("2:3", restart_on_node_loss="false") as job:
            nodes, _ = job.start(3)
            lost = nodes.pop(0)
            lost.exit()
            wait_until("it is known", lambda: all(node.state.lost for node in nodes))
            hold_for(
                "nobody re-joins",
                lambda: not any(node.noticed for node in nodes),
                NOTICE_SECONDS_MAX,
            )
            joins = [job.node().join(), *(node.join() for node in nodes)]
            results([job.nodes[-1], *nodes], joins)

    def too_few_are_left() -> None:
        with Job("3:3") as job:
            nodes, _ = job.start(3)
            nodes.pop(1).exit()
            wait_until("it is known", lambda: all(node.state.lost for node in nodes))
            hold_for(
                "nobody re-joins",
                lambda: not any(node.noticed for node in nodes),
                NOTICE_SECONDS_MAX,
            )
            replacement = job.node()
            joining = replacement.join()
            notice_moments(nodes)
            joins = [node.join() for node in nodes]
            infos = results([*nodes, replacement], [*joins, joining])
            assert [info.rank for info in infos] == [0, 2, 1]

    together(it_is_switched_off, too_few_are_left)


def test_a_node_that_was_silent_too_long_learns_that_it_was_expelled() -> None:
    with Job("1:2") as job:
        nodes = start_troubled(job, 2)
        silent, survivor = nodes
        backend_of(silent).hang()
        notice_moments([survivor])
        (info,) = join_all([survivor])
        assert info.world_size == 1
        backend_of(silent).resume()
        notice_moments([silent], SOON_SECONDS)
        join = silent.join()
        notice_moments([survivor])
        infos = results([silent, survivor], [join, survivor.join()])
        assert [info.rank for info in infos] == [1, 0]


def test_a_node_that_dies_inside_the_barrier_costs_a_window_and_not_the_job() -> None:
    with Job("2:3", last_call_timeout=1.0) as job:
        nodes = [job.node() for _ in range(3)]
        joins = [node.join() for node in nodes]
        wait_until("all wait", lambda: all(node.is_announced for node in nodes))
        dead = next(node for node in nodes if node.handler._session.coordinates)
        dead.vanish()
        pairs = [pair for pair in zip(nodes, joins, strict=True) if pair[0] is not dead]
        results([node for node, _ in pairs], [join for _, join in pairs])


# --------------------------------------------------------------------------------------- outages


def test_running_nodes_outlive_an_outage() -> None:
    with Job("2:3", outage_timeout=60) as job:
        nodes = start_troubled(job, 2)
        for node in nodes:
            backend_of(node).is_down = True
        wait_until("it is noticed", lambda: all(n.handler._session.failures > 2 for n in nodes))
        hold_for(
            "everybody runs on",
            lambda: [node.handler.num_nodes_waiting() for node in nodes] == [0, 0],
            LIVENESS_WINDOW_SECONDS + 1.0,
        )
        assert not any(node.handler.is_closed() for node in nodes)
        for node in nodes:
            backend_of(node).is_down = False
        wait_until("it is over", lambda: not any(n.handler._session.failures for n in nodes))
        hold_for(
            "nobody was lost",
            lambda: not any(node.noticed or node.state.lost for node in nodes),
            NOTICE_SECONDS_MAX,
        )
        joining = job.node().join()
        notice_moments(nodes)
        results([*nodes, job.nodes[-1]], [*(node.join() for node in nodes), joining])


def test_an_outage_longer_than_the_budget_fails_the_agent() -> None:
    with Job("1:1", outage_timeout=2.0, keep_alive_interval=0.25) as job:
        (node,) = start_troubled(job, 1)
        backend_of(node).is_down = True
        watch = Stopwatch()

        def raised() -> RendezvousError | None:
            try:
                node.handler.num_nodes_waiting()
            except RendezvousError as error:
                return error
            return None

        error = wait_until("the budget is spent", raised)
        assert isinstance(error, RendezvousConnectionError)
        assert "as the test wanted" in str(error)
        assert 1.5 < watch.seconds < 2.0 + SOON_SECONDS
        backend_of(node).is_down = False
        wait_until("it recovers", lambda: raised() is None)
        backend_of(node).is_down = True
        assert not node.handler.shutdown(), "it cannot"


def test_health_is_logged_once_for_each_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rdzv")
    with Job("1:1", keep_alive_interval=0.25) as job:
        (node,) = start_troubled(job, 1)
        for _ in range(2):
            caplog.clear()
            backend_of(node).is_down = True
            wait_until("many beats failed", lambda: node.handler._session.failures >= 5)
            backend_of(node).is_down = False
            wait_until("it is over", lambda: "answers again" in caplog.text)
            told = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert len(told) == 1
            assert "as the test wanted" in told[0].getMessage()
            assert caplog.text.count("answers again") == 1


def test_waiting_nodes_outlive_an_outage_shorter_than_the_join_timeout() -> None:
    with Job("2:2") as job:
        first = job.node(troubled(job))
        joining = first.join()
        wait_until("it waits", lambda: first.is_announced)
        backend_of(first).is_down = True
        wait_until("it notices", lambda: first.handler._session.failures > 1)
        second = job.node()
        other = second.join()
        wait_until("the second waits", lambda: second.is_announced)
        backend_of(first).is_down = False
        results([first, second], [joining, other])


def test_a_node_that_joins_during_an_outage_gives_up_at_its_deadline() -> None:
    with Job("1:1", join_timeout=1.0) as job:
        node = job.node(troubled(job))
        backend_of(node).is_down = True
        watch = Stopwatch()
        with pytest.raises(RendezvousTimeoutError, match="as the test wanted"):
            node.handler.next_rendezvous()
        assert 1.0 <= watch.seconds < 1.0 + SOON_SECONDS
        assert not node.handler.shutdown()


def test_a_confirmation_that_never_arrived_is_given_again() -> None:
    class Deaf(TroubledBackend):
        """Loses the first announcement that confirms a round."""

        lost = 0

        def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
            if entry.round_label and not self.lost:
                self.lost += 1
                raise RendezvousConnectionError("lost, as the test wanted")
            return super().announce(entry, ttl_seconds, question)

    with Job("2:2") as job:
        deaf = Deaf(job.space, job.run_id)
        nodes = [job.node(deaf), job.node()]
        join_all(nodes)
        assert deaf.lost == 1


# ------------------------------------------------------------------------------------ lost data


def test_a_backend_that_lost_its_data_is_refilled_and_nobody_re_joins() -> None:
    def under_runners() -> None:
        with Job("2:3") as job:
            nodes, _ = job.start(3)
            before = nodes[0].state.round_id
            job.space.wipe()
            wait_until("the document is back", lambda: document_round(job) == before)
            hold_for(
                "nobody re-joins",
                lambda: not any(node.noticed for node in nodes),
                LIVENESS_WINDOW_SECONDS + 1.0,
            )
            assert not nodes[0].state.lost
            assert len(nodes[0].handler._driver._roster.entries()) == 3

    def under_waiting_nodes() -> None:
        with Job("2:2") as job:
            first = job.node()
            joining = first.join()
            wait_until("it waits", lambda: first.is_announced)
            job.space.wipe()
            second = job.node()
            results([first, second], [joining, second.join()])

    def under_a_spare() -> None:
        with Job("2:2") as job:
            nodes, _ = job.start(2)
            before = nodes[0].state.round_id
            spare = job.node()
            parked = spare.join()
            wait_until("it is parked", lambda: spare.handler._session.parked)
            job.space.wipe()
            wait_until("the document is back", lambda: document_round(job) == before)
            hold_for(
                "nothing happens",
                lambda: not parked.done() and not any(node.noticed for node in nodes),
                LIVENESS_WINDOW_SECONDS + 1.0,
            )

    def with_a_newcomer_first() -> None:
        with Job("1:3", last_call_timeout=2.0) as job:
            nodes, _ = job.start(1)
            before = nodes[0].state
            job.space.wipe()
            newcomer = job.node()
            joining = newcomer.join()
            wait_until("it waits", lambda: newcomer.is_announced)
            notice_moments(nodes)
            results([*nodes, newcomer], [nodes[0].join(), joining])
            assert newcomer.state.incarnation == before.incarnation
            assert newcomer.state.round == before.round + 1

    together(under_runners, under_waiting_nodes, under_a_spare, with_a_newcomer_first)


def document_round(job: Job) -> object:
    found = job.nodes[0].handler._backend.get_state()
    return None if found is None else decode_state(found[0]).round_id


def test_a_wiped_backend_does_not_make_waiting_nodes_spin() -> None:
    with Job("3:3", keep_alive_interval=2.0) as job:
        nodes = [job.node(troubled(job)) for _ in range(2)]
        for node in nodes:
            node.join()
            wait_until("it waits", lambda node=node: node.is_announced)  # type: ignore[misc]
        before = [sum(backend_of(node).calls.values()) for node in nodes]
        job.space.wipe()
        observer = MemoryBackend(job.space, job.run_id)
        wait_until("all are back", lambda: len(observer.entries()) == 2)
        for node, calls in zip(nodes, before, strict=True):
            assert sum(backend_of(node).calls.values()) - calls < 40


def test_garbage_is_left_as_it_is() -> None:
    garbage = b"not written by rdzv"

    def newcomers_say_so() -> None:
        with Job("1:1") as job:
            node = job.node()
            node.handler._backend.set_state(garbage, None)
            with pytest.raises(RendezvousStateError):
                node.handler.next_rendezvous()
            node.handler.shutdown()
            assert document_bytes(job) == garbage

    def runners_run_on() -> None:
        with Job("1:2", outage_timeout=60) as job:
            (node,), _ = job.start(1)
            found = node.handler._backend.get_state()
            assert found is not None
            node.handler._backend.set_state(garbage, found[1])
            wait_until("it is noticed", lambda: node.handler._session.failures > 2)
            assert node.handler.num_nodes_waiting() == 0
            assert document_bytes(job) == garbage
            node.handler.shutdown()
            assert document_bytes(job) == garbage

    together(newcomers_say_so, runners_run_on)


def document_bytes(job: Job) -> bytes:
    found = job.nodes[0].handler._backend.get_state()
    assert found is not None
    return found[0]


# --------------------------------------------------------------------------------- what can hang


def test_a_backend_that_hangs_holds_nobody_beyond_the_deadline() -> None:
    def joining() -> None:
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

    def running() -> None:
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

    def answering_after_the_deadline() -> None:
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

    together(joining, running, answering_after_the_deadline)


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


def test_shutdown_never_raises() -> None:
    class Broken(TroubledBackend):
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


# ------------------------------------------------------------------------------------- bootstrap


def test_rank_0_that_dies_before_it_has_published_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead: list[Node] = []

    def start_or_die(address: str, deadline: float, *, shared: bool) -> BootstrapServer:
        with lock:
            if not dead:
                dead.append(next(n for n in nodes if n.state.rank_of(n.id) == 0))
                dead[0].vanish()
                raise SystemExit
        return BootstrapServer(address, deadline, shared=shared)

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
    with Job("2:2", join_timeout=3.0) as job:
        nodes = [job.node(), job.node()]
        watch = Stopwatch()
        joins = [node.join() for node in nodes]
        errors = [join.exception(PATIENCE_SECONDS) for join in joins]
        assert {type(error) for error in errors} == {SystemExit, RendezvousTimeoutError}
        assert watch.seconds < 3.0 + SOON_SECONDS


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
        assert node.handler.shutdown()
        monkeypatch.undo()
        (other,), _ = job.start(1)
        assert other.state.closed is None


def test_a_round_store_that_fails_for_a_moment_is_asked_again() -> None:
    raised = {"count": 0}

    class Flaky(rdzv.handler.RoundStore):
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

    class Slow(rdzv.handler.RoundStore):
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
            wait_until("the document is back", lambda: document_round(job) == before)
            slow.set()
            results(nodes, joins)
            assert nodes[0].state.round_id == before


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


def test_that_a_node_has_finished_is_told_before_the_barrier() -> None:
    with Job("2:2") as job:
        nodes, infos = job.start(2)
        infos[1].store.add("torchelastic/agent/terminal_state/num_members", 1)
        observer = nodes[0].handler._driver
        present, _ = observer._list()
        finished = {seen.entry.node.id: seen.entry.finished for seen in present}
        assert finished == {nodes[0].id: False, nodes[1].id: True}


def test_that_a_node_has_finished_is_told_after_an_outage_if_not_before() -> None:
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


def test_closing_while_a_round_is_set_up_is_told() -> None:
    class Never(rdzv.handler.RoundStore):
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
