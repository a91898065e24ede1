"""The barrier, and what a round gives to its nodes: ranks, a store, a place to meet."""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest
import torch.distributed as dist

from rdzv.conformance.handler_kit import (
    PATIENCE_SECONDS,
    Job,
    Stopwatch,
    bootstrap_of,
    handler_book,
    hold_for,
    join_all,
    results,
    soon_seconds,
    together,
    wait_until,
)
from rdzv.conformance.target import Target
from rdzv.errors import RendezvousTimeoutError

case = handler_book("rendezvous")

AT_ONCE = 12
"""So many nodes come at the same moment; a backend without a roster is good for some more."""
CLIENT_TIMEOUT = timedelta(seconds=10)


@case
def the_round_starts_when_all_are_there(target: Target) -> None:
    with Job(target, "3:3", last_call_timeout=60) as job:
        first = [job.node(), job.node()]
        joins = [node.join() for node in first]
        wait_until("both wait", lambda: all(node.is_announced for node in first))
        hold_for("nobody starts", lambda: not any(join.done() for join in joins), 0.3)
        last, watch = job.node(), Stopwatch()
        infos = results([*first, last], [*joins, last.join()])
        assert watch.seconds < soon_seconds(target)
        assert sorted(info.rank for info in infos) == [0, 1, 2]
        assert [node.handler.num_nodes_waiting() for node in job.nodes] == [0, 0, 0]
        assert not any(node.handler.is_closed() for node in job.nodes)


@case
def a_single_node_is_a_round(target: Target) -> None:
    with Job(target, "1:1") as job:
        _, (info,) = job.start(1)
        assert (info.rank, info.world_size) == (0, 1)


@case
def many_nodes_that_come_at_once_agree(target: Target) -> None:
    with Job(target, f"{AT_ONCE}:{AT_ONCE}") as job:
        nodes, _ = job.start(AT_ONCE)
        assert {entry.node.id for entry in job.entries} == {node.id for node in nodes}
        assert job.document_round == nodes[0].state.round_id


@case
def the_last_call_waits_for_newcomers_and_no_longer(target: Target) -> None:
    soon = soon_seconds(target)
    last_call = 2 * soon + 1.0

    def nobody_comes() -> None:
        with Job(target, "2:4", run_id="nobody", last_call_timeout=1.5) as job:
            watch = Stopwatch()
            job.start(2)
            assert 1.5 <= watch.seconds < 1.5 + 2 * soon

    def one_comes() -> None:
        with Job(target, "2:4", run_id="one", last_call_timeout=last_call) as job:
            first, watch = [job.node(), job.node()], Stopwatch()
            joins = [node.join() for node in first]
            wait_until("both wait", lambda: all(node.is_announced for node in first))
            waited = last_call - soon - 0.5
            hold_for("nobody starts", lambda: not any(join.done() for join in joins), waited)
            late = job.node()
            results([*first, late], [*joins, late.join()])
            restarted = waited + last_call
            assert last_call <= watch.seconds < restarted, "a newcomer does not restart it"

    def it_is_cut_short() -> None:
        with Job(target, "2:3", run_id="full", last_call_timeout=60) as job:
            watch = Stopwatch()
            job.start(3)
            assert watch.seconds < 30, "not even half of it"

    together(nobody_comes, one_comes, it_is_cut_short)


@case
def the_surplus_of_the_first_round_waits(target: Target) -> None:
    with Job(target, "2:2") as job:
        nodes = [job.node() for _ in range(4)]
        joins = [node.join() for node in nodes]
        wait_until("two are in", lambda: sum(join.done() for join in joins) == 2)
        hold_for("two wait", lambda: sum(join.done() for join in joins) == 2, 0.3)
        inside = [pair for pair in zip(nodes, joins, strict=True) if pair[1].done()]
        results([node for node, _ in inside], [join for _, join in inside])


@case
def a_joiner_alone_gives_up_and_leaves_nothing_behind(target: Target) -> None:
    with Job(target, "2:2", join_timeout=3.0) as job:
        alone, watch = job.node(), Stopwatch()
        with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes"):
            alone.handler.next_rendezvous()
        assert watch.seconds < 3.0 + soon_seconds(target)
        wait_until("it has left", lambda: job.entries == [])
        assert alone.handler.shutdown()
        assert job.document.closed is None
        nodes, _ = job.start(2, join_timeout=PATIENCE_SECONDS)
        assert alone.id not in nodes[0].state.participant_ids


@case
def workers_find_a_server_where_the_bootstrap_says(target: Target) -> None:
    with Job(target, "2:2") as job:
        nodes, infos = job.start(2)
        assert all(node.handler.use_agent_store for node in nodes)
        host, port = bootstrap_of(infos[1])
        clients = [
            dist.TCPStore(host, port, world_size=2, is_master=False, timeout=CLIENT_TIMEOUT)
            for _ in infos
        ]
        clients[0].set("key", "value")
        assert clients[1].get("key") == b"value"


@case
def the_store_of_a_round_outlives_its_handler(target: Target) -> None:
    with Job(target, "1:1") as job:
        (node,), infos = job.start(1)
        host, port = bootstrap_of(infos[0])
        assert node.handler.shutdown()
        job.nodes.clear()
        del node
        gc.collect()
        infos[0].store.set("key", "value")
        assert infos[0].store.get("key") == b"value"
        client = dist.TCPStore(host, port, is_master=False, timeout=CLIENT_TIMEOUT)
        client.set("key", "value")


@case
def a_round_sees_no_key_and_no_server_of_an_earlier_one(target: Target) -> None:
    with Job(target, "2:2") as job:
        nodes, old = job.start(2)
        old[0].store.set("key", "old")
        assert old[1].store.get("key") == b"old"
        new = join_all(nodes)
        assert not new[0].store.check(["key"])
        assert not new[1].store.check(["key"])
        new[0].store.set("key", "new")
        assert old[0].store.get("key") == b"old"
        assert bootstrap_of(new[0]) != bootstrap_of(old[0])


@case
def runs_do_not_meet(target: Target) -> None:
    with Job(target, "1:2", run_id="job") as one, Job(target, "1:2", run_id="job/1") as other:
        nodes = [one.node(), other.node()]
        first, second = (join.result(PATIENCE_SECONDS) for join in [node.join() for node in nodes])
        assert first.world_size == second.world_size == 1
        first.store.set("key", "value")
        assert not second.store.check(["key"])
        if not {"store", "list_keys"} & set(target.without):
            assert "key" in first.store.list_keys()
            assert "key" not in second.store.list_keys()
        assert nodes[0].handler.shutdown()
        assert one.document.closed is not None
        assert other.document.closed is None
        assert not nodes[1].handler.is_closed()
