"""The barrier, re-joining, spares and closing, as agents see them when nothing fails."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier

from rdzv.backends.sql import SqlBackend, SqlOptions
from rdzv.codec import decode_state
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from rdzv.state import State

from .handler_kit import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    NOTICE_SECONDS_MAX,
    PATIENCE_SECONDS,
    Job,
    Node,
    Stopwatch,
    assert_together,
    bootstrap_of,
    close,
    grow,
    hold_for,
    in_thread,
    join_all,
    lose_one,
    notice_moments,
    results,
    together,
    wait_until,
    without_garbage_collection,
)

EXIT_BARRIER = "torchelastic/agent/terminal_state"
SOON_SECONDS = 2.0
"""For what needs no waiting at all, on a machine that may be busy."""


def document(job: Job) -> State:
    found = job.nodes[0].handler._backend.get_state()
    assert found is not None
    return decode_state(found[0])


def waits_in_barrier(node: Node) -> bool:
    return node.is_announced


# ----------------------------------------------------------------------------------- the barrier


def test_the_round_starts_when_all_are_there() -> None:
    with Job("3:3", last_call_timeout=60) as job:
        first = [job.node(), job.node()]
        joins = [node.join() for node in first]
        wait_until("both wait", lambda: all(waits_in_barrier(node) for node in first))
        hold_for("nobody starts", lambda: not any(join.done() for join in joins), 0.3)
        last, watch = job.node(), Stopwatch()
        infos = results([*first, last], [*joins, last.join()])
        assert watch.seconds < SOON_SECONDS
        assert sorted(info.rank for info in infos) == [0, 1, 2]
        assert [node.handler.num_nodes_waiting() for node in job.nodes] == [0, 0, 0]
        assert not any(node.handler.is_closed() for node in job.nodes)


def test_a_single_node_is_a_round() -> None:
    with Job("1:1") as job:
        _, (info,) = job.start(1)
        assert (info.rank, info.world_size) == (0, 1)


def test_the_last_call_waits_for_newcomers_and_no_longer() -> None:
    def nobody_comes() -> None:
        with Job("2:4", last_call_timeout=1.5) as job:
            watch = Stopwatch()
            job.start(2)
            assert 1.5 <= watch.seconds < 1.5 + SOON_SECONDS

    def one_comes() -> None:
        with Job("2:4", last_call_timeout=1.5) as job:
            first, watch = [job.node(), job.node()], Stopwatch()
            joins = [node.join() for node in first]
            wait_until("both wait", lambda: all(waits_in_barrier(node) for node in first))
            hold_for("nobody starts", lambda: not any(join.done() for join in joins), 0.5)
            late = job.node()
            results([*first, late], [*joins, late.join()])
            assert 1.5 <= watch.seconds < 1.5 + SOON_SECONDS, "a newcomer does not restart it"

    def it_is_cut_short() -> None:
        with Job("2:3", last_call_timeout=60) as job:
            watch = Stopwatch()
            job.start(3)
            assert watch.seconds < SOON_SECONDS

    together(nobody_comes, one_comes, it_is_cut_short)


def test_what_the_agent_asks() -> None:
    with Job("1:1", run_id="a run/of mine") as job:
        (node,), _ = job.start(1)
        assert node.handler.get_backend() == "memory"
        assert node.handler.get_run_id() == "a run/of mine"


# ---------------------------------------------------------------------- bootstrap and the store


def test_workers_find_a_server_where_the_bootstrap_says() -> None:
    with Job("2:2") as job:
        nodes, infos = job.start(2)
        assert all(node.handler.use_agent_store for node in nodes)
        host, port = bootstrap_of(infos[1])
        timeout = timedelta(seconds=10)
        clients = [
            dist.TCPStore(host, port, world_size=2, is_master=False, timeout=timeout) for _ in infos
        ]
        clients[0].set("key", "value")
        assert clients[1].get("key") == b"value"


def test_without_a_shared_store_a_free_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with Job("2:2") as job:
        nodes, infos = job.start(2)
        assert not any(node.handler.use_agent_store for node in nodes)
        host, port = bootstrap_of(infos[1])
        worker_0 = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
        dist.TCPStore(host, port, is_master=False).set("key", "value")
        assert worker_0.get("key") == b"value"


def test_the_server_lives_as_long_as_rank_0s_store() -> None:
    with Job("1:1") as job:
        (node,), infos = job.start(1)
        host, port = bootstrap_of(infos[0])
        assert node.handler.shutdown()
        job.nodes.clear()
        del node
        gc.collect()
        infos[0].store.set("key", "value")
        assert infos[0].store.get("key") == b"value"
        timeout = timedelta(seconds=10)
        dist.TCPStore(host, port, is_master=False, timeout=timeout).set("key", "value")


def test_a_round_sees_no_key_and_no_server_of_an_earlier_one() -> None:
    with Job("2:2") as job:
        nodes, old = job.start(2)
        old[0].store.set("key", "old")
        assert old[1].store.get("key") == b"old"
        new = join_all(nodes)
        assert not new[0].store.check(["key"])
        assert not new[1].store.check(["key"])
        new[0].store.set("key", "new")
        assert old[0].store.get("key") == b"old"
        assert bootstrap_of(new[0]) != bootstrap_of(old[0])


def test_run_ids_do_not_meet_in_one_store() -> None:
    with Job("1:1", run_id="job") as one, Job("1:1", run_id="job/1") as other:
        other.store_client = one.store_client
        _, (first,) = one.start(1)
        _, (second,) = other.start(1)
        first.store.set("key", "value")
        assert not second.store.check(["key"])
        assert "key" in first.store.list_keys()
        assert "key" not in second.store.list_keys()


# ------------------------------------------------------------------------------------ re-joining


def a_late_node_is_taken_and_ranks_stay() -> None:
    with Job("2:3") as job:
        nodes, _ = job.start(2)
        late, watch = job.node(), Stopwatch()
        joining = late.join()
        assert_together(notice_moments(nodes))
        assert watch.seconds < NOTICE_SECONDS_MAX + 0.5
        assert [node.handler.num_nodes_waiting() for node in nodes] == [1, 1]
        joins = [node.join() for node in nodes]
        infos = results([*nodes, late], [*joins, joining])
        assert [info.rank for info in infos] == [0, 1, 2]
        assert [node.handler.num_nodes_waiting() for node in job.nodes] == [0, 0, 0]


def many_agents_hear_of_a_late_node_together() -> None:
    with Job("8:9", last_call_timeout=0.1) as job:
        nodes, _ = job.start(8)
        late = job.node().join()
        assert_together(notice_moments(nodes))
        assert not late.done()


def a_crowd_of_late_nodes_costs_one_round() -> None:
    with Job("4:12", last_call_timeout=1.0) as job:
        nodes, _ = job.start(4)
        crowd = [job.node() for _ in range(8)]
        joins = [node.join() for node in crowd]
        assert_together(notice_moments(nodes))
        results([*nodes, *crowd], [*(node.join() for node in nodes), *joins])
        assert nodes[0].state.round == 2


def a_node_that_restarts_its_workers_brings_the_others_back() -> None:
    with Job("2:2") as job:
        nodes, _ = job.start(2)
        again = nodes[0].join()
        notice_moments(nodes[1:], NOTICE_SECONDS_MAX + 0.5)
        infos = results(nodes, [again, nodes[1].join()])
        assert [info.rank for info in infos] == [0, 1]


# ---------------------------------------------------------------------------------------- spares


def a_spare_parks_without_a_deadline_and_takes_a_free_place() -> None:
    with Job("2:2") as job:
        nodes, _ = job.start(2)
        spare = job.node(join_timeout=3.0)
        parked = spare.join()
        wait_until("it is parked", lambda: spare.handler._session.parked)
        hold_for("the spare waits", lambda: not parked.done(), 4.0)
        assert not any(node.noticed for node in nodes)
        nodes[0].exit()
        notice_moments(nodes[1:], NOTICE_SECONDS_MAX + 0.5)
        infos = results([nodes[1], spare], [nodes[1].join(), parked])
        assert infos[0].rank == 0, "rank 0 is a survivor"


def surplus_nodes_of_the_first_round_are_spares() -> None:
    with Job("2:2") as job:
        nodes = [job.node() for _ in range(4)]
        joins = [node.join() for node in nodes]
        wait_until("two are in", lambda: sum(join.done() for join in joins) == 2)
        hold_for("two wait", lambda: sum(join.done() for join in joins) == 2, 0.3)
        inside = [pair for pair in zip(nodes, joins, strict=True) if pair[1].done()]
        results([node for node, _ in inside], [join for _, join in inside])


def spares_leave_gracefully_when_the_run_has_ended_well() -> None:
    with Job("2:2") as job:
        nodes, infos = job.start(2)
        spare = job.node()
        parked = spare.join()
        wait_until("it is parked", lambda: spare.handler._session.parked)
        barriers = [
            in_thread(lambda info=info: barrier(info.store, 2, EXIT_BARRIER, 10))  # type: ignore[misc]
            for info in infos
        ]
        for passed in barriers:
            passed.result(PATIENCE_SECONDS)
        assert not parked.done(), "it ends when the run is closed"
        assert all(node.handler.shutdown() for node in nodes)
        error = parked.exception(SOON_SECONDS)
        assert isinstance(error, RendezvousGracefulExitError)
        assert "ended well" in str(error)
        assert spare.handler.shutdown()


def spares_are_told_that_the_run_was_closed_when_it_did_not_end_well() -> None:
    with Job("2:2") as job:
        nodes, _ = job.start(2)
        spare = job.node()
        parked = spare.join()
        wait_until("it is parked", lambda: spare.handler._session.parked)
        assert nodes[0].handler.shutdown()
        assert isinstance(parked.exception(SOON_SECONDS), RendezvousClosedError)


# --------------------------------------------------------------------------------------- closing


def test_shutdown_of_a_member_closes_and_its_peers_run_on() -> None:
    with Job("2:2") as job:
        nodes, _ = job.start(2)
        assert nodes[0].handler.shutdown()
        assert document(job).closed is not None
        wait_until("the other hears of it", nodes[1].handler.is_closed)
        assert nodes[1].handler.num_nodes_waiting() == 0
        with pytest.raises(RendezvousClosedError):
            nodes[1].handler.next_rendezvous()
        assert nodes[1].handler.shutdown()
        assert nodes[1].handler.shutdown(), "a second time is no harm"
        with pytest.raises(RendezvousClosedError):
            nodes[1].handler.next_rendezvous()


def test_set_closed() -> None:
    def by_a_runner() -> None:
        with Job("2:2") as job:
            nodes, _ = job.start(2)
            nodes[1].handler.set_closed()
            assert nodes[1].handler.is_closed()
            wait_until("the other hears of it", nodes[0].handler.is_closed)
            nodes[1].handler.set_closed()

    def by_a_node_that_never_joined() -> None:
        with Job("2:2") as job:
            nodes, _ = job.start(2)
            job.node().handler.set_closed()
            wait_until("all hear of it", lambda: all(n.handler.is_closed() for n in nodes))
            assert [node.handler.num_nodes_waiting() for node in nodes] == [0, 0]

    def by_a_node_that_waits() -> None:
        with Job("2:2") as job:
            node = job.node()
            joining = node.join()
            wait_until("it waits", lambda: waits_in_barrier(node))
            node.handler.set_closed()
            assert isinstance(joining.exception(SOON_SECONDS), RendezvousClosedError)

    def before_anybody_came() -> None:
        with Job("1:1") as job:
            job.node().handler.set_closed()
            with pytest.raises(RendezvousClosedError):
                job.node().handler.next_rendezvous()

    together(by_a_runner, by_a_node_that_never_joined, by_a_node_that_waits, before_anybody_came)


def a_run_id_serves_again_after_the_grace() -> None:
    grace_seconds = 2.0
    with Job("2:2", closed_grace=grace_seconds) as job:
        nodes, infos = job.start(2)
        infos[0].store.set("key", "old")
        closed_incarnation = nodes[0].state.incarnation
        runner, closing = nodes[1], nodes[0]
        assert closing.handler.shutdown()
        watch = Stopwatch()
        early = job.node()
        with pytest.raises(RendezvousClosedError, match=r"used again in [012]\.\d s") as caught:
            early.handler.next_rendezvous()
        assert "--rdzv-id" in str(caught.value)
        assert early.handler.shutdown()
        wait_until("the grace is over", lambda: watch.seconds > grace_seconds)
        again, new = job.start(2)
        assert again[0].state.incarnation != closed_incarnation
        assert again[0].state.round == 1
        assert not new[0].store.check(["key"])
        hold_for(
            "the old run's node is left alone",
            lambda: runner.handler.num_nodes_waiting() == 0 and runner.handler.is_closed(),
            2 * KEEP_ALIVE_INTERVAL_SECONDS,
        )
        assert runner.handler.shutdown(), "which closes only its own run"
        assert document(job).closed is None
        assert [node.handler.num_nodes_waiting() for node in again] == [0, 0]


# ------------------------------------------------------------------- closing is for members only


def a_joiner_that_timed_out_does_not_close_the_run() -> None:
    with Job("2:3") as job:
        nodes, _ = job.start(2)
        late = job.node(join_timeout=0.5)
        watch = Stopwatch()
        with pytest.raises(RendezvousTimeoutError, match="round 1"):
            late.handler.next_rendezvous()
        assert watch.seconds < 0.5 + SOON_SECONDS
        assert late.handler.shutdown()
        assert document(job).closed is None
        # That it waited is taken back, unless that was told too long ago; then they meet in vain.
        wait_until("it is forgotten", lambda: nodes[0].noticed or not document(job).waiting)
        if nodes[0].noticed:
            join_all(nodes)
        assert document(job).closed is None
        assert document(job).participant_ids == tuple(node.id for node in nodes)


def a_spare_does_not_close_the_run() -> None:
    with Job("2:2") as job:
        nodes, _ = job.start(2)
        spare = job.node()
        parked = spare.join()
        wait_until("it is parked", lambda: spare.handler._session.parked)
        spare.handler.shutdown()
        assert parked.exception(SOON_SECONDS) is not None
        assert document(job).closed is None
        assert not any(node.handler.is_closed() for node in nodes)


def a_rejoiner_that_timed_out_does_not_close_the_run() -> None:
    with Job("2:2", join_timeout=1.0) as job:
        nodes, _ = job.start(2)
        with pytest.raises(RendezvousTimeoutError):
            nodes[0].handler.next_rendezvous()
        assert nodes[0].handler.shutdown()
        assert document(job).closed is None
        assert not nodes[1].handler.is_closed()


def a_joiner_alone_gives_up_and_leaves_nothing_behind() -> None:
    with Job("2:2", join_timeout=0.5) as job:
        alone = job.node()
        with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes"):
            alone.handler.next_rendezvous()
        listed = job.nodes[0].handler._driver._roster.entries()
        assert [row.entry.node_id for row in listed if not row.withdrawn] == []
        assert alone.handler.shutdown()
        nodes, _ = job.start(2, join_timeout=PATIENCE_SECONDS)
        assert alone.id not in nodes[0].state.participant_ids


# ----------------------------------------------------------------------------- the exit barrier


def a_finished_node_is_let_go_when_the_run_goes_on() -> None:
    with Job("2:3") as job:
        nodes, infos = job.start(3)
        waiting = in_thread(lambda: barrier(infos[2].store, 3, EXIT_BARRIER, 60))
        wait_until("it has finished", lambda: nodes[2].handler._session.entry.finished)
        again = nodes[0].join()
        notice_moments(nodes[1:2])
        results(nodes[:2], [again, nodes[1].join()])
        error = waiting.exception(NOTICE_SECONDS_MAX)
        assert isinstance(error, dist.DistStoreError)
        assert "exit barrier" in str(error)
        assert nodes[2].handler.num_nodes_waiting() == 0
        assert nodes[2].handler.shutdown()
        assert document(job).closed is None, "it was no member any more"


def a_job_that_is_ending_takes_no_newcomer() -> None:
    with Job("2:3") as job:
        nodes, infos = job.start(2)
        finished = in_thread(lambda: barrier(infos[1].store, 2, EXIT_BARRIER, 60))
        wait_until("it has finished", lambda: nodes[1].handler._session.entry.finished)
        late = job.node()
        joining = late.join()
        wait_until("it waits", lambda: waits_in_barrier(late))
        hold_for(
            "nobody re-joins for it",
            lambda: not any(node.noticed for node in nodes),
            NOTICE_SECONDS_MAX,
        )
        barrier(infos[0].store, 2, EXIT_BARRIER, 10)
        finished.result(PATIENCE_SECONDS)
        assert all(node.handler.shutdown() for node in nodes)
        assert isinstance(joining.exception(SOON_SECONDS), RendezvousGracefulExitError)


# ------------------------------------------------------------------------------------- all of it


def test_the_life_of_a_job(tmp_path: Path) -> None:
    """One test, for these spend their time waiting and can do so side by side."""

    def on_sqlite() -> None:
        def make_backend(run_id: str) -> SqlBackend:
            backend = SqlBackend(str(tmp_path / "job.db"), run_id, SqlOptions(), name="sqlite")
            backends.callback(backend.close)
            return backend

        with ExitStack() as backends, Job("2:3", make_backend=make_backend) as job:
            close(lose_one(grow(job)))

    with without_garbage_collection():
        together(
            on_sqlite,
            a_late_node_is_taken_and_ranks_stay,
            many_agents_hear_of_a_late_node_together,
            a_crowd_of_late_nodes_costs_one_round,
            a_node_that_restarts_its_workers_brings_the_others_back,
            a_spare_parks_without_a_deadline_and_takes_a_free_place,
            surplus_nodes_of_the_first_round_are_spares,
            spares_leave_gracefully_when_the_run_has_ended_well,
            spares_are_told_that_the_run_was_closed_when_it_did_not_end_well,
            a_run_id_serves_again_after_the_grace,
            a_joiner_that_timed_out_does_not_close_the_run,
            a_spare_does_not_close_the_run,
            a_rejoiner_that_timed_out_does_not_close_the_run,
            a_joiner_alone_gives_up_and_leaves_nothing_behind,
            a_finished_node_is_let_go_when_the_run_goes_on,
            a_job_that_is_ending_takes_no_newcomer,
        )
