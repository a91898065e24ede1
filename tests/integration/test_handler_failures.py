"""What agents see when nodes die, the backend fails, or something below hangs."""

from __future__ import annotations

import logging

import pytest

from rdzv.backends.memory import MemoryBackend
from rdzv.codec import decode_state
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rdzv.ports import Entry, Pulse, Question, Token

from .handler_kit import (
    LIVENESS_WINDOW_SECONDS,
    LOSS_SECONDS_MAX,
    NOTICE_SECONDS_MAX,
    SLACK_SECONDS,
    Job,
    Node,
    Stopwatch,
    TroubledBackend,
    assert_together,
    backend_of,
    hold_for,
    join_all,
    notice_moments,
    results,
    start_troubled,
    together,
    troubled,
    wait_until,
    without_garbage_collection,
)

GARBAGE = b"not written by rdzv"
SOON_SECONDS = 2.0


# ------------------------------------------------------------------------------------ lost nodes


def the_three_lowest_ranks_may_all_be_lost() -> None:
    with Job("2:5") as job:
        nodes, _ = job.start(5)
        for node in nodes[:3]:
            node.vanish()
        assert_together(notice_moments(nodes[3:], 2 * LIVENESS_WINDOW_SECONDS + 5))
        join_all(nodes[3:])


def a_lost_node_stops_nobody_where_that_is_switched_off() -> None:
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


def a_lost_node_stops_nobody_where_too_few_are_left() -> None:
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


def a_node_that_was_silent_too_long_learns_that_it_was_expelled() -> None:
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


class DyingBackend(TroubledBackend):
    """Takes its node with it at the moment that a test chooses."""

    def __init__(self, job: Job, moment: str) -> None:
        super().__init__(job.space, job.run_id)
        self.moment = moment
        self.node: Node | None = None

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        if entry.round_label:
            self._die_at("asked to confirm")
        return super().announce(entry, ttl_seconds, question)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        answer = super().set_state(state, token)
        if answer is not None and answer[2] and decode_state(state).proposal is not None:
            self._die_at("has frozen")
        return answer

    def _die_at(self, moment: str) -> None:
        if moment == self.moment:
            assert self.node is not None
            self.node.vanish()
            raise RendezvousConnectionError("dead, as the test wanted")


def die_in_the_barrier(moment: str) -> None:
    with Job("2:3") as job:
        backend = DyingBackend(job, moment)
        dying = backend.node = job.node(backend)
        dying.join()
        wait_until("it forms the round", lambda: dying.handler._session.coordinates)
        nodes = [job.node(), job.node()]
        watch = Stopwatch()
        join_all(nodes)
        assert dying.id not in nodes[0].state.participant_ids
        assert watch.seconds < LOSS_SECONDS_MAX + SLACK_SECONDS


def a_node_that_dies_before_it_confirms_costs_a_window_and_not_the_job() -> None:
    die_in_the_barrier("asked to confirm")


def a_coordinator_that_dies_after_freezing_costs_a_window_and_not_the_job() -> None:
    die_in_the_barrier("has frozen")


def a_coordinator_that_dies_in_the_last_call_costs_a_window_and_not_the_job() -> None:
    with Job("2:4", last_call_timeout=1.0) as job:
        dying = job.node()
        dying.join()
        wait_until("it forms the round", lambda: dying.handler._session.coordinates)
        nodes = [job.node(), job.node()]
        joins = [node.join() for node in nodes]
        wait_until("all wait", lambda: all(node.is_announced for node in nodes))
        dying.vanish()
        watch = Stopwatch()
        results(nodes, joins)
        assert dying.id not in nodes[0].state.participant_ids
        assert watch.seconds < LOSS_SECONDS_MAX + 1.0 + SLACK_SECONDS


# --------------------------------------------------------------------------------------- outages


def running_nodes_outlive_an_outage() -> None:
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


def an_outage_longer_than_the_budget_fails_the_agent() -> None:
    with Job("1:1", outage_timeout=2.0, keep_alive_interval=0.25, close_timeout=0.5) as job:
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


def test_that_data_were_lost_is_told_once_for_each_loss(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="rdzv")
    with Job("1:1", keep_alive_interval=0.25) as job:
        (node,), _ = job.start(1)
        before = node.state.round_id
        for loss in (1, 2):
            job.space.wipe()
            wait_until("it is told", lambda: caplog.text.count("puts it back") >= loss)  # noqa: B023
            wait_until("the document is back", lambda: job.document_round == before)
            beats = node.handler._session.pulse_at
            wait_until("beats go on", lambda: node.handler._session.pulse_at > beats)  # noqa: B023
            assert caplog.text.count("puts it back") == loss


def waiting_nodes_outlive_an_outage_shorter_than_the_join_timeout() -> None:
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


def a_node_that_joins_during_an_outage_gives_up_at_its_deadline() -> None:
    with Job("1:1", join_timeout=1.0) as job:
        node = job.node(troubled(job))
        backend_of(node).is_down = True
        watch = Stopwatch()
        with pytest.raises(RendezvousTimeoutError, match="as the test wanted"):
            node.handler.next_rendezvous()
        assert 1.0 <= watch.seconds < 1.0 + SOON_SECONDS
        assert not node.handler.shutdown()


def a_confirmation_that_never_arrived_is_given_again() -> None:
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


def spares_stay_spares_on_a_backend_that_lost_its_data() -> None:
    with Job("2:2") as job:
        nodes, _ = job.start(2)
        before = nodes[0].state.round_id
        spare = job.node()
        parked = spare.join()
        wait_until("it is parked", lambda: spare.handler._session.parked)
        job.space.wipe()
        wait_until("the document is back", lambda: job.document_round == before)
        hold_for(
            "nothing happens",
            lambda: not parked.done() and not any(node.noticed for node in nodes),
            LIVENESS_WINDOW_SECONDS + 1.0,
        )


def a_newcomer_waits_for_those_who_know_what_was_lost() -> None:
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


def a_wiped_backend_does_not_make_waiting_nodes_spin() -> None:
    with Job("3:3", keep_alive_interval=2.0) as job:
        coordinator = job.node(troubled(job))
        coordinator.join()
        wait_until("it forms the round", lambda: coordinator.handler._session.coordinates)
        other = job.node(troubled(job))
        other.join()
        wait_until("it waits", lambda: backend_of(other).calls["wait_for_change"] > 0)
        coordinator.vanish()
        before = sum(backend_of(other).calls.values())
        job.space.wipe()
        observer = MemoryBackend(job.space, job.run_id)
        wait_until("it is back", lambda: [r for r in observer.entries() if not r.withdrawn])
        assert sum(backend_of(other).calls.values()) - before < 20


def newcomers_tell_of_garbage_and_leave_it() -> None:
    with Job("1:1") as job:
        node = job.node()
        node.handler._backend.set_state(GARBAGE, None)
        with pytest.raises(RendezvousStateError):
            node.handler.next_rendezvous()
        node.handler.shutdown()
        assert document_bytes(job) == GARBAGE


def runners_run_on_beside_garbage_and_leave_it() -> None:
    with Job("1:2", outage_timeout=60) as job:
        (node,), _ = job.start(1)
        found = node.handler._backend.get_state()
        assert found is not None
        node.handler._backend.set_state(GARBAGE, found[1])
        wait_until("it is noticed", lambda: node.handler._session.failures > 2)
        assert node.handler.num_nodes_waiting() == 0
        assert document_bytes(job) == GARBAGE
        node.handler.shutdown()
        assert document_bytes(job) == GARBAGE


def document_bytes(job: Job) -> bytes:
    """The document, whatever it is."""
    found = job.nodes[0].handler._backend.get_state()
    assert found is not None
    return found[0]


# ------------------------------------------------------------------------------------- all of it


def test_what_fails() -> None:
    """One test, for these spend their time waiting and can do so side by side."""
    with without_garbage_collection():
        together(
            a_lost_node_stops_nobody_where_that_is_switched_off,
            a_lost_node_stops_nobody_where_too_few_are_left,
            spares_stay_spares_on_a_backend_that_lost_its_data,
            a_newcomer_waits_for_those_who_know_what_was_lost,
            newcomers_tell_of_garbage_and_leave_it,
            runners_run_on_beside_garbage_and_leave_it,
            the_three_lowest_ranks_may_all_be_lost,
            a_node_that_was_silent_too_long_learns_that_it_was_expelled,
            a_node_that_dies_before_it_confirms_costs_a_window_and_not_the_job,
            a_coordinator_that_dies_after_freezing_costs_a_window_and_not_the_job,
            a_coordinator_that_dies_in_the_last_call_costs_a_window_and_not_the_job,
            running_nodes_outlive_an_outage,
            an_outage_longer_than_the_budget_fails_the_agent,
            waiting_nodes_outlive_an_outage_shorter_than_the_join_timeout,
            a_node_that_joins_during_an_outage_gives_up_at_its_deadline,
            a_confirmation_that_never_arrived_is_given_again,
            a_wiped_backend_does_not_make_waiting_nodes_spin,
        )
