"""What a node does at the barrier, effect by effect: see rdzv.protocol and rdzv.steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rdzv.effects import Announce, Beat, Swap, Wait
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from rdzv.machine import Rules
from rdzv.protocol import close, finish, give_up, join
from rdzv.state import Closing, Proposal, State

from .protocol_kit import (
    INTERVAL,
    NOW,
    RULES,
    WINDOW,
    Peer,
    World,
    document,
    entry,
    nodes,
    round_id,
)

ALONE = Rules(min_nodes=1, max_nodes=1)
PAIR = Rules(min_nodes=2, max_nodes=2)
GRACE = RULES.closed_grace_seconds
CLOSED = document("xy", closed=Closing("done"))


def ended(peers: list[Peer]) -> Callable[[], bool]:
    return lambda: all(peer.result is not None or peer.error is not None for peer in peers)


def finals(world: World) -> list[State]:
    """Every document that made a round final."""
    written = [State("none"), *world.written]
    return [
        after
        for before, after in itertools.pairwise(written)
        if after.round > before.round and before.proposal is not None
    ]


# The first join


def test_a_first_join_is_so_many_effects() -> None:
    world = World(ALONE)
    (peer,) = world.enter("a")
    world.run(1.0, until=ended([peer]))
    assert peer.pace == "Read Announce Swap ListRoster Swap Announce ListRoster Swap"
    assert "Wait" not in peer.kinds
    assert world.now == NOW
    assert peer.result == world.state == finals(world)[0]


def test_a_node_that_does_not_coordinate_reads_once_and_lists_never() -> None:
    world = World(PAIR)
    first, second = world.enter("ab")
    world.run(1.0, until=ended([first, second]))
    assert first.result == second.result == world.state
    assert second.pace in ("Read Announce Swap Announce", "Read Announce Announce")
    # The document: made, frozen, final.
    assert len(world.written) == 3


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_lost_exchange_changes_no_outcome(name: str, lost: str) -> None:
    number = 0
    while True:
        world = World(PAIR)
        peers = world.enter("ab")
        peer = peers["ab".index(name)]
        peer.loses = {number: lost}
        world.run(60.0, until=ended(peers))
        assert [each.error for each in peers] == [None, None]
        assert peers[0].result == peers[1].result == world.state
        assert [(s.round, set(s.participants)) for s in finals(world)] == [(1, set(nodes("ab")))]
        assert sum(state.round == 0 and state.proposal is None for state in world.written) <= 2
        incarnations = {state.incarnation for state in world.written}
        assert len(incarnations) == 1
        if number >= len(peer.log):
            break
        number += 1
    assert number >= 4


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_lost_exchange_changes_no_later_round(lost: str) -> None:
    for name in "ab":
        for number in range(12):
            world = World(PAIR)
            peers = world.form("ab")
            for peer in peers:
                peer.forget()
                peer.join()
            peers["ab".index(name)].loses = {number: lost}
            world.run(100.0, until=ended(peers))
            assert peers[0].result == peers[1].result == world.state
            assert [state.round for state in finals(world)] == [1, 2]
            assert world.state.participants == finals(world)[0].participants


# Deadlines and budgets


def test_the_deadline_ends_a_join_and_says_what_was_waited_for() -> None:
    world = World()
    (peer,) = world.enter("a", 20.0)
    world.run(19.9)
    assert peer.error is None
    world.run(0.1)
    assert isinstance(peer.error, RendezvousTimeoutError)
    assert "1 of at least 2 nodes are here" in str(peer.error)


def test_the_deadline_holds_while_the_backend_does_not_answer() -> None:
    world = World()
    world.is_down = True
    (peer,) = world.enter("a", 20.0)
    world.run(19.9)
    assert peer.error is None
    world.run(0.1)
    assert isinstance(peer.error, RendezvousTimeoutError)


def test_without_a_deadline_the_outage_budget_ends_a_join() -> None:
    world = World()
    (peer,) = world.enter("a", outage_timeout_seconds=50.0)
    world.run(7.0)
    world.is_down = True
    world.run(50.0 - INTERVAL)
    assert peer.error is None
    world.run(3 * INTERVAL)
    assert isinstance(peer.error, RendezvousConnectionError)


def test_a_backend_that_comes_back_leaves_the_whole_budget() -> None:
    world = World()
    (peer,) = world.enter("a", outage_timeout_seconds=50.0)
    for _ in range(4):
        world.is_down = True
        world.run(40.0)
        world.is_down = False
        world.run(10.0)
    assert peer.error is None
    assert peer.session.failures == 0


def test_nobody_waits_for_an_abandoned_join() -> None:
    world = World()
    (peer,) = world.enter("a")
    world.run(1.0)
    peer.session.abandoned = True
    world.run(INTERVAL)
    assert isinstance(peer.error, RendezvousTimeoutError)


def test_a_spare_has_no_deadline_until_it_is_promoted_and_then_a_fresh_one() -> None:
    world = World(PAIR)
    first, second = world.form("ab")
    (spare,) = world.enter("c", 20.0)
    world.run(100.0)
    assert (spare.error, spare.session.parked, spare.session.deadline) == (None, True, None)
    assert world.state.waiting == 0
    second.runs = False
    second.finish(give_up(second.session))
    world.run(1.0)
    assert world.state.lost == ("b",)
    assert not spare.session.parked
    world.run(18.0)
    assert spare.error is None
    world.run(2.0)
    assert isinstance(spare.error, RendezvousTimeoutError)
    assert first.session.notice.count == 1


# A closed run


def test_a_new_node_is_refused_at_a_closed_run_and_never_announces() -> None:
    world = World()
    world.put(CLOSED)
    world.now += 13.0
    (peer,) = world.enter("a")
    world.run(1.0)
    assert isinstance(peer.error, RendezvousClosedError)
    assert f"again in {GRACE - 13.0:.1f} s" in str(peer.error)
    assert peer.kinds == ["Read", "Beat"]


def test_after_the_grace_a_new_incarnation_replaces_the_closed_one() -> None:
    world = World(replace(ALONE, closed_grace_seconds=GRACE))
    world.put(CLOSED)
    world.now += GRACE
    (peer,) = world.enter("a")
    world.run(1.0)
    assert peer.kinds[:4] == ["Read", "Beat", "Swap", "Announce"]
    assert (peer.result.round, peer.result.replaces) == (1, ("i",))


def test_without_a_clock_a_closed_run_is_watched_and_seldom_asked() -> None:
    world = World(ALONE)
    world.put(CLOSED)
    (peer,) = world.enter("a", has_clock=False)
    world.run(GRACE - 0.1)
    assert "Announce" not in peer.kinds
    assert peer.kinds.count("Beat") <= GRACE / INTERVAL + 1
    world.run(0.2)
    assert peer.result.replaces == ("i",)


def test_the_watch_starts_again_when_the_closed_run_changes() -> None:
    world = World(ALONE)
    world.put(CLOSED)
    (peer,) = world.enter("a", has_clock=False)
    world.run(GRACE - 10.0)
    world.put(replace(CLOSED, closed=Closing("done again")))
    world.run(GRACE - 0.1)
    assert peer.result is None
    world.run(0.2)
    assert peer.result is not None


def test_a_watcher_enters_what_somebody_else_has_begun() -> None:
    world = World(ALONE)
    world.put(CLOSED)
    (peer,) = world.enter("a", has_clock=False)
    world.run(10.0)
    world.put(State("next", replaces=("i",)))
    world.run(1.0)
    assert (peer.result.incarnation, peer.result.round) == ("next", 1)


def test_a_member_of_the_closed_run_is_refused_even_after_the_grace() -> None:
    world = World()
    world.put(CLOSED)
    world.now += 10 * GRACE
    (peer,) = world.enter("x", entry=entry("x", running=round_id()))
    world.run(1.0)
    assert isinstance(peer.error, RendezvousClosedError)
    assert peer.kinds == ["Read"]


def test_a_member_of_a_replaced_run_never_announces_in_the_next() -> None:
    world = World(ALONE)
    world.put(State("next", replaces=("i",)))
    (peer,) = world.enter("x", entry=entry("x", running=round_id()))
    world.run(1.0)
    assert isinstance(peer.error, RendezvousClosedError)
    assert peer.kinds == ["Read"]


@pytest.mark.parametrize(
    ("ended_well", "error"),
    [(True, RendezvousGracefulExitError), (False, RendezvousClosedError)],
)
def test_a_waiting_node_hears_of_the_end(ended_well: bool, error: type[Exception]) -> None:
    world = World()
    (peer,) = world.enter("a")
    world.run(1.0)
    world.put(replace(world.state, closed=Closing("the job is done", ended_well)))
    world.run(0.0)
    assert isinstance(peer.error, error)
    assert "the job is done" in str(peer.error)


# Leaving and closing


def test_giving_up_withdraws_first_and_then_voids_the_proposal() -> None:
    world = World(PAIR)
    world.put(document(proposal=Proposal("p", nodes("ab"))))
    peer = Peer(world, "a")
    peer.finish(give_up(peer.session))
    assert peer.kinds == ["Withdraw", "Read", "Swap"]
    assert world.state == document()


def test_giving_up_names_the_node_lost_in_its_round_and_repeats_a_lost_race() -> None:
    world = World(PAIR)
    first, second = world.form("ab")
    second.runs = False
    second.start(give_up(second.session))
    while second.kinds[-1] != "Read":
        second.advance()
    world.put(replace(world.state, waiting=1))
    while second.advance():
        pass
    assert second.kinds[-5:] == ["Read", "Swap", "Read", "Beat", "Swap"]
    assert (world.state.lost, world.state.waiting) == (("b",), 1)
    assert first.error is None


def test_giving_up_writes_nothing_where_nobody_counts_on_the_node() -> None:
    world = World(PAIR)
    world.form("ab")
    before = list(world.written)
    spare = Peer(world, "c")
    spare.finish(give_up(spare.session))
    assert (spare.kinds, world.written) == (["Withdraw", "Read"], before)


@pytest.mark.parametrize(
    ("running", "lost", "closes"),
    [
        (round_id(), (), True),
        (round_id(), ("a",), False),
        (round_id(2), (), False),
        (None, (), False),
    ],
)
def test_only_members_close_on_leaving(running: Any, lost: tuple[str, ...], closes: bool) -> None:
    for members_only in (True, False):
        world = World()
        world.put(document("ab", lost=lost))
        peer = Peer(world, "a", entry=entry("a", running=running))
        done = peer.finish(close(peer.session, "why", members_only=members_only))
        assert done is (world.state.closed is not None) is (closes or not members_only)
        assert world.state.closed in (None, Closing("why"))


def test_closing_a_run_without_a_document_and_a_closed_one() -> None:
    world = World()
    peer = Peer(world, "a")
    assert peer.finish(close(peer.session, "why", members_only=True)) is False
    assert world.written == []
    assert peer.finish(close(peer.session, "why", members_only=False)) is True
    assert peer.finish(close(peer.session, "again", members_only=False)) is True
    assert world.state.closed == Closing("why")


def test_the_last_one_to_finish_sees_that_the_run_ended_well() -> None:
    for finishing in ("ab", "a"):
        world = World(PAIR)
        peers = world.form("ab")
        for peer in peers:
            peer.runs = False
            if peer.session.id in finishing:
                peer.finish(finish(peer.session))
        assert peers[0].finish(close(peers[0].session, "done", members_only=True))
        assert world.state.closed == Closing("done", ended_well=finishing == "ab")


# What the simulation found


def test_a_coordinator_with_an_old_listing_does_not_spin() -> None:
    world = World()
    peers = world.enter("ab")
    world.run(1.0)
    peers[1].die()
    peers[1].finish(give_up(peers[1].session))
    world.run(20.0)
    assert peers[0].kinds.count("Wait") < 12


def test_a_wiped_backend_is_noticed_at_once_and_does_not_make_a_waiting_node_spin() -> None:
    world = World()
    (peer,) = world.enter("a")
    world.run(INTERVAL / 2)
    world.space.wipe()
    world.run(0.1)
    assert world.state is not None
    assert peer.kinds.count("Announce") == 2


def test_an_announcement_without_an_answer_is_made_again_and_feared_for_two_minutes() -> None:
    world = World()
    (peer,) = world.enter("a")
    peer.loses = {1: "answer"}
    world.run(110.0)
    announced, beats = peer.kinds.count("Announce"), peer.kinds.count("Beat")
    assert announced >= beats >= 20
    world.run(20.0)
    peer.forget()
    world.run(50.0)
    assert peer.kinds.count("Announce") == 0


def test_a_confirmation_whose_request_was_lost_is_made_again() -> None:
    world = World(PAIR)
    peers = world.enter("ab")
    world.run(1.0, until=lambda: peers[1].kinds[-1:] == ["Announce"] and world.state is not None)
    second = peers[1]
    second.loses = {len(second.log): "request"}
    world.run(10.0, until=ended(peers))
    assert peers[0].result == second.result == world.state


def test_a_proposal_that_was_dropped_is_left_and_the_next_one_confirmed() -> None:
    world = World(PAIR)
    (first,) = world.enter("a")
    world.run(1.0)
    proposal = Proposal("p", nodes("ax"))
    world.put(replace(world.state, proposal=proposal, coordinator=""))
    world.run(1.0)
    confirmed = first.session.entry.running
    assert confirmed == world.state.proposal_id
    world.put(replace(world.state, proposal=None))
    world.run(1.0)
    assert first.session.entry == entry("a", left=confirmed)
    (second,) = world.enter("b")
    world.run(1.0, until=ended([first, second]))
    assert first.result == second.result == world.state


def test_beats_are_spread_over_the_ranks_but_never_more_than_an_interval_apart() -> None:
    world = World(Rules(min_nodes=5, max_nodes=5))
    peers = world.form("abcde")
    moments = {round(peer.wakes_at - world.now, 3) for peer in peers}
    assert len(moments) == 5
    for peer in peers:
        beats = [e for e in peer.log if isinstance(e, (Announce, Beat))]
        last = max(
            at for e, at in zip(peer.log, peer.logged_at, strict=True) if any(e is b for b in beats)
        )
        assert peer.wakes_at <= last + INTERVAL


def test_a_waiting_node_puts_a_later_document_back_and_completes_nothing_for_a_window() -> None:
    world = World(PAIR)
    world.form("ab")
    (spare,) = world.enter("c")
    world.run(20.0)
    known = world.state
    for peer in [peer for peer in world.peers if peer is not spare]:
        peer.die()
    world.space.wipe()
    world.enter("d")
    world.run(WINDOW - 0.5)
    assert (world.state.round, world.state.participants) == (1, known.participants)
    assert world.state.refill
    world.run(2 * INTERVAL, until=ended([spare]))
    assert spare.result.round == 2


def test_a_coordinator_that_died_is_replaced() -> None:
    world = World(PAIR)
    (first,) = world.enter("a")
    world.run(1.0)
    first.die()
    world.run(1.0)
    others = world.enter("bc")
    world.run(WINDOW + 2 * INTERVAL, until=ended(others))
    assert {node.id for node in others[0].result.participants} == {"b", "c"}


def test_joining_leaves_the_last_round_and_forgets_what_was_known_of_it() -> None:
    world = World(PAIR)
    peer = world.form("ab")[0]
    session = peer.session
    last = session.state.round_id
    session.entry = replace(session.entry, finished=True)
    steps = join(session, None)
    next(steps)
    assert session.entry == replace(entry("a"), left=last)
    assert (session.notice.count, session.overtaken, session.announced) == (0, False, False)


def test_every_wait_names_its_reason_and_its_end() -> None:
    world = World()
    (peer,) = world.enter("a", 12.0)
    world.run(15.0)
    waits = [effect for effect in peer.log if isinstance(effect, Wait)]
    assert waits
    assert all(wait.why and 0.0 <= wait.timeout_seconds <= INTERVAL for wait in waits)
    assert all(isinstance(e.token, str) for e in peer.log if isinstance(e, Swap) and e.token)
