"""Closing a run, who may, what becomes of those that wait, and using its id again."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier

from rdzv.conformance.handler_kit import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    NOTICE_SECONDS_MAX,
    PATIENCE_SECONDS,
    Job,
    Stopwatch,
    handler_book,
    hold_for,
    in_thread,
    join_all,
    notice_moments,
    results,
    soon_seconds,
    together,
    wait_until,
)
from rdzv.conformance.target import Target
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

case = handler_book("closing")
dated = handler_book("closing", needs=("server_clock",))

EXIT_BARRIER = "torchelastic/agent/terminal_state"


@case
def shutdown_of_a_member_closes_and_its_peers_run_on(target: Target) -> None:
    with Job(target, "2:2") as job:
        nodes, _ = job.start(2)
        assert nodes[0].handler.shutdown()
        assert job.document.closed is not None
        wait_until("the other hears of it", nodes[1].handler.is_closed)
        assert nodes[1].handler.num_nodes_waiting() == 0
        with pytest.raises(RendezvousClosedError):
            nodes[1].handler.next_rendezvous()
        assert nodes[1].handler.shutdown()
        assert nodes[1].handler.shutdown(), "a second time is no harm"
        with pytest.raises(RendezvousClosedError):
            nodes[1].handler.next_rendezvous()


@case
def anybody_can_close_the_run(target: Target) -> None:
    def a_runner() -> None:
        with Job(target, "2:2", run_id="runner") as job:
            nodes, _ = job.start(2)
            nodes[1].handler.set_closed()
            assert nodes[1].handler.is_closed()
            wait_until("the other hears of it", nodes[0].handler.is_closed)
            nodes[1].handler.set_closed()

    def a_node_that_never_joined() -> None:
        with Job(target, "2:2", run_id="outsider") as job:
            nodes, _ = job.start(2)
            job.node().handler.set_closed()
            wait_until("all hear of it", lambda: all(n.handler.is_closed() for n in nodes))
            assert [node.handler.num_nodes_waiting() for node in nodes] == [0, 0]

    def a_node_that_waits() -> None:
        with Job(target, "2:2", run_id="waiting") as job:
            node = job.node()
            joining = node.join()
            wait_until("it waits", lambda: node.is_announced)
            node.handler.set_closed()
            assert isinstance(joining.exception(soon_seconds(target)), RendezvousClosedError)

    together(a_runner, a_node_that_never_joined, a_node_that_waits)


@dated
def a_closed_run_refuses_newcomers_for_a_while(target: Target) -> None:
    with Job(target, "1:1") as job:
        job.node().handler.set_closed()
        early = job.node(join_timeout=5.0)
        with pytest.raises(RendezvousClosedError, match=r"used again in \d\d\.\d s") as caught:
            early.handler.next_rendezvous()
        assert "--rdzv-id" in str(caught.value)
        assert early.handler.shutdown()
        assert job.entries == []


@case
def a_run_id_serves_again_after_the_grace(target: Target) -> None:
    grace_seconds = 2.0
    with Job(target, "2:2", closed_grace=grace_seconds) as job:
        nodes, infos = job.start(2)
        infos[0].store.set("key", "old")
        closed_incarnation = nodes[0].state.incarnation
        runner, closing = nodes[1], nodes[0]
        watch = Stopwatch()
        assert closing.handler.shutdown()
        if "server_clock" not in target.without:
            with pytest.raises(RendezvousClosedError, match=r"used again in [012]\.\d s"):
                job.node().handler.next_rendezvous()
            wait_until("the grace is over", lambda: watch.seconds > grace_seconds)
        again, new = job.start(2)
        assert watch.seconds >= grace_seconds
        assert again[0].state.incarnation != closed_incarnation
        assert again[0].state.round == 1
        assert not new[0].store.check(["key"])
        hold_for(
            "the old run's node is left alone",
            lambda: runner.handler.num_nodes_waiting() == 0 and runner.handler.is_closed(),
            2 * KEEP_ALIVE_INTERVAL_SECONDS,
        )
        assert runner.handler.shutdown(), "which closes only its own run"
        assert job.document.closed is None
        assert [node.handler.num_nodes_waiting() for node in again] == [0, 0]


@case
def who_never_got_in_does_not_close_the_run(target: Target) -> None:
    soon = soon_seconds(target)

    def join_in_vain(intervals: float) -> None:
        seconds = intervals * KEEP_ALIVE_INTERVAL_SECONDS
        with Job(target, "2:3", run_id=f"joiner-{intervals}") as job:
            nodes, _ = job.start(2)
            late = job.node(join_timeout=seconds)
            watch = Stopwatch()
            with pytest.raises(RendezvousTimeoutError, match="round 1"):
                late.handler.next_rendezvous()
            assert watch.seconds < seconds + soon
            assert late.handler.shutdown()
            assert job.document.closed is None
            # That it waited is taken back, unless it was told too long ago; then they meet in vain.
            wait_until("it is forgotten", lambda: nodes[0].noticed or not job.document.waiting)
            if nodes[0].noticed:
                join_all(nodes)
            assert job.document.closed is None
            assert job.document.participant_ids == tuple(node.id for node in nodes)

    def a_joiner_that_timed_out_before_it_counted() -> None:
        join_in_vain(0.5)

    def a_joiner_that_timed_out() -> None:
        join_in_vain(1.5)

    def a_spare() -> None:
        with Job(target, "2:2", run_id="spare") as job:
            nodes, _ = job.start(2)
            spare = job.node()
            parked = spare.join()
            wait_until("it is parked", lambda: spare.is_parked)
            spare.handler.shutdown()
            assert parked.exception(soon) is not None
            assert job.document.closed is None
            assert not any(node.handler.is_closed() for node in nodes)

    def a_rejoiner_that_timed_out() -> None:
        with Job(target, "2:2", run_id="rejoiner", join_timeout=PATIENCE_SECONDS) as job:
            first, second = job.node(join_timeout=1.0), job.node()
            join_all([first, second])
            with pytest.raises(RendezvousTimeoutError):
                first.handler.next_rendezvous()
            assert first.handler.shutdown()
            assert job.document.closed is None
            assert not second.handler.is_closed()

    together(
        a_joiner_that_timed_out_before_it_counted,
        a_joiner_that_timed_out,
        a_spare,
        a_rejoiner_that_timed_out,
    )


@case
def spares_are_told_how_the_run_has_ended(target: Target) -> None:
    soon = soon_seconds(target)

    def well() -> None:
        with Job(target, "2:2", run_id="well") as job:
            nodes, infos = job.start(2)
            spare = job.node()
            parked = spare.join()
            wait_until("it is parked", lambda: spare.is_parked)
            barriers = [
                in_thread(functools.partial(barrier, info.store, 2, EXIT_BARRIER, 10))
                for info in infos
            ]
            for passed in barriers:
                passed.result(PATIENCE_SECONDS)
            assert not parked.done(), "it ends when the run is closed"
            assert all(node.handler.shutdown() for node in nodes)
            error = parked.exception(soon)
            assert isinstance(error, RendezvousGracefulExitError)
            assert "ended well" in str(error)
            assert spare.handler.shutdown()

    def not_well() -> None:
        with Job(target, "2:2", run_id="not-well") as job:
            nodes, _ = job.start(2)
            spare = job.node()
            parked = spare.join()
            wait_until("it is parked", lambda: spare.is_parked)
            assert nodes[0].handler.shutdown()
            assert isinstance(parked.exception(soon), RendezvousClosedError)

    together(well, not_well)


@case
def a_node_that_has_finished_is_no_member_any_more(target: Target) -> None:
    def it_is_let_go_when_the_run_goes_on() -> None:
        with Job(target, "2:3", run_id="goes-on") as job:
            nodes, infos = job.start(3)
            waiting = in_thread(lambda: barrier(infos[2].store, 3, EXIT_BARRIER, 60))
            wait_until("it has finished", lambda: nodes[2].has_finished)
            again = nodes[0].join()
            notice_moments(nodes[1:2])
            results(nodes[:2], [again, nodes[1].join()])
            error = waiting.exception(NOTICE_SECONDS_MAX)
            assert isinstance(error, dist.DistStoreError)
            assert "exit barrier" in str(error)
            assert nodes[2].handler.num_nodes_waiting() == 0
            assert nodes[2].handler.shutdown()
            assert job.document.closed is None, "it was no member any more"

    def a_job_that_is_ending_takes_no_newcomer() -> None:
        with Job(target, "2:3", run_id="is-ending") as job:
            nodes, infos = job.start(2)
            finished = in_thread(lambda: barrier(infos[1].store, 2, EXIT_BARRIER, 60))
            wait_until("it has finished", lambda: nodes[1].has_finished)
            late = job.node()
            joining = late.join()
            wait_until("it waits", lambda: late.is_announced)
            hold_for(
                "nobody re-joins for it",
                lambda: not any(node.noticed for node in nodes),
                NOTICE_SECONDS_MAX,
            )
            barrier(infos[0].store, 2, EXIT_BARRIER, 10)
            finished.result(PATIENCE_SECONDS)
            assert all(node.handler.shutdown() for node in nodes)
            error = joining.exception(soon_seconds(target))
            assert isinstance(error, RendezvousGracefulExitError)

    together(it_is_let_go_when_the_run_goes_on, a_job_that_is_ending_takes_no_newcomer)
