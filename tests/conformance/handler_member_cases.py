"""Who is in a round and who comes next: late nodes, spares, lost nodes."""

from __future__ import annotations

from rdzv.conformance.handler_kit import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    LIVENESS_WINDOW_SECONDS,
    LOSS_SECONDS_MAX,
    NOTICE_SECONDS_MAX,
    SLACK_SECONDS,
    Job,
    Stopwatch,
    assert_together,
    bootstrap_of,
    handler_book,
    hold_for,
    join_all,
    notice_moments,
    results,
    together,
    wait_until,
    without_garbage_collection,
)
from rdzv.conformance.target import Target

case = handler_book("membership")
told_together = handler_book("membership", needs=("server_clock",))


@case
@without_garbage_collection()
def late_nodes_are_taken_in_one_round_and_ranks_stay(target: Target) -> None:
    def one_comes() -> None:
        with Job(target, "2:3", run_id="one") as job:
            nodes, _ = job.start(2)
            late, watch = job.node(), Stopwatch()
            joining = late.join()
            job.assert_together(notice_moments(nodes))
            assert watch.seconds < NOTICE_SECONDS_MAX + SLACK_SECONDS
            assert [node.handler.num_nodes_waiting() for node in nodes] == [1, 1]
            joins = [node.join() for node in nodes]
            infos = results([*nodes, late], [*joins, joining])
            assert [info.rank for info in infos] == [0, 1, 2]
            assert [node.handler.num_nodes_waiting() for node in job.nodes] == [0, 0, 0]

    def a_crowd_comes() -> None:
        with Job(target, "4:12", run_id="crowd", last_call_timeout=1.0) as job:
            nodes, _ = job.start(4)
            crowd = [job.node() for _ in range(8)]
            joins = [node.join() for node in crowd]
            job.assert_together(notice_moments(nodes))
            infos = results([*nodes, *crowd], [*(node.join() for node in nodes), *joins])
            assert [info.rank for info in infos[:4]] == [0, 1, 2, 3]
            assert nodes[0].state.round == 2

    together(one_comes, a_crowd_comes)


@told_together
@without_garbage_collection()
def all_agents_are_told_at_the_same_time(target: Target) -> None:
    """Whoever stops its workers before the others makes theirs fail."""
    with Job(target, "8:9", last_call_timeout=0.1) as job:
        nodes, _ = job.start(8)
        late = job.node().join()
        assert_together(notice_moments(nodes))
        assert not late.done()


@case
def a_node_that_restarts_its_workers_brings_the_others_back(target: Target) -> None:
    with Job(target, "2:2") as job:
        nodes, _ = job.start(2)
        again = nodes[0].join()
        notice_moments(nodes[1:], NOTICE_SECONDS_MAX + SLACK_SECONDS)
        infos = results(nodes, [again, nodes[1].join()])
        assert [info.rank for info in infos] == [0, 1]


@case
def a_spare_parks_without_a_deadline_and_takes_a_free_place(target: Target) -> None:
    with Job(target, "2:2") as job:
        nodes, _ = job.start(2)
        # Its deadline begins when there is a place, and the others have yet to hear of it.
        spare = job.node(join_timeout=NOTICE_SECONDS_MAX)
        parked = spare.join()
        wait_until("it is parked", lambda: spare.is_parked)
        hold_for("the spare waits", lambda: not parked.done(), 4.0)
        assert not any(node.noticed for node in nodes)
        nodes[0].exit()
        notice_moments(nodes[1:], NOTICE_SECONDS_MAX + SLACK_SECONDS)
        infos = results([nodes[1], spare], [nodes[1].join(), parked])
        assert infos[0].rank == 0, "rank 0 is a survivor"


@case
@without_garbage_collection()
def lost_nodes_are_noticed_in_time_and_the_run_goes_on(target: Target) -> None:
    def lose(rank: int) -> None:
        with Job(target, "2:3", run_id=f"rank-{rank}", last_call_timeout=2.0) as job:
            nodes, old = job.start(3)
            lost = nodes.pop(rank)
            lost.vanish()
            watch = Stopwatch()
            job.assert_together(notice_moments(nodes))
            assert watch.seconds >= LIVENESS_WINDOW_SECONDS - KEEP_ALIVE_INTERVAL_SECONDS
            assert watch.seconds < LOSS_SECONDS_MAX + SLACK_SECONDS
            assert set(nodes[0].state.lost) == {lost.id}
            infos = join_all(nodes)
            assert lost.id not in nodes[0].state.participant_ids
            assert bootstrap_of(infos[0]) != bootstrap_of(old[0])

    def rank_0_vanishes() -> None:
        lose(0)

    def rank_2_vanishes() -> None:
        lose(2)

    def one_says_goodbye() -> None:
        with Job(target, "2:3", run_id="goodbye", last_call_timeout=2.0) as job:
            nodes, _ = job.start(3)
            nodes.pop(0).exit()
            watch = Stopwatch()
            job.assert_together(notice_moments(nodes))
            assert watch.seconds < NOTICE_SECONDS_MAX + SLACK_SECONDS < LIVENESS_WINDOW_SECONDS
            join_all(nodes)

    def all_vanish_and_others_come_in_their_place() -> None:
        with Job(target, "2:3", run_id="all", last_call_timeout=2.0) as job:
            old, _ = job.start(3)
            for node in old:
                node.vanish()
            watch = Stopwatch()
            nodes, _ = job.start(2)
            assert watch.seconds < LIVENESS_WINDOW_SECONDS + 1.0 + SLACK_SECONDS
            assert nodes[0].state.round == 2
            assert not {node.id for node in old} & set(nodes[0].state.participant_ids)

    together(
        rank_0_vanishes,
        rank_2_vanishes,
        one_says_goodbye,
        all_vanish_and_others_come_in_their_place,
    )
