"""What a node does while its workers run: see rdzv.running, and rdzv.steps for what it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv.effects import Announce, Notice
from rdzv.errors import RendezvousConnectionError
from rdzv.machine import Rules
from rdzv.protocol import finish, give_up
from rdzv.running import keep_alive
from rdzv.state import Closing, State

from .protocol_kit import INTERVAL, WINDOW, Peer, World, document, entry

FOUR = Rules(min_nodes=2, max_nodes=4, last_call_seconds=0.0)
FIVE = Rules(min_nodes=3, max_nodes=5, last_call_seconds=1.0)
NOTICE_SECONDS = INTERVAL + 1.0


def quiet(names: str, rules: Rules = FOUR) -> tuple[World, list[Peer]]:
    """A round that has been running for a while; the peers in rank order."""
    world = World(rules)
    peers = world.form(names)
    world.run(30.0)
    for peer in peers:
        peer.forget()
    return world, sorted(peers, key=lambda peer: world.state.rank_of(peer.session.id))


def acts_at(peer: Peer) -> float:
    """The true moment at which the node's agent is to re-join."""
    assert peer.session.notice.count
    return peer.session.notice.at_seconds - peer.offset


# Nothing happens


def test_a_quiet_node_costs_one_beat_an_interval_and_no_more() -> None:
    world, peers = quiet("abcd")
    before = list(world.written)
    world.run(20 * INTERVAL)
    for peer in peers:
        assert set(peer.kinds) == {"Beat"}
        assert len(peer.kinds) in (20, 21)
        assert peer.session.notice == Notice()
    assert world.written == before


# Changes of the roster


def test_a_node_that_withdraws_is_told_of_after_its_rounds_next_beat() -> None:
    world, peers = quiet("abcd")
    peers[3].die()
    peers[3].finish(give_up(peers[3].session))
    world.run(INTERVAL)
    assert world.state.lost == ("d",)
    assert [peer.session.notice.count for peer in peers[:3]] == [1, 1, 1]


def test_a_tombstone_alone_tells_that_a_node_is_gone_however_short_one_has_watched() -> None:
    world, peers = quiet("abcd")
    for peer in peers[:3]:
        peer.session.lose_contact()
    peers[3].die()
    peers[3].backend.withdraw("d", 2 * WINDOW)
    world.run(INTERVAL)
    assert world.state.lost == ("d",)


def test_a_dead_node_is_named_lost_as_soon_as_its_entry_has_expired() -> None:
    world, peers = quiet("abcd")
    died_at = world.now
    last_beat = died_at - (INTERVAL - (peers[3].wakes_at - died_at))
    peers[3].die()
    world.run(WINDOW + INTERVAL, until=lambda: world.state.lost == ("d",))
    assert world.state.lost == ("d",)
    assert 0.0 < world.now - (last_beat + WINDOW) < 0.2


def test_without_the_hint_a_loss_is_seen_within_one_beat_more() -> None:
    world = World(FOUR)
    peers = [Peer(world, name, has_clock=False) for name in "abc"]
    world.peers.extend(peers)
    for peer in peers:
        peer.join()
    world.run(100.0, until=lambda: all(peer.result for peer in peers))
    for peer in peers:
        peer.runs = True
    world.run(30.0)
    peers[2].die()
    world.run(WINDOW + INTERVAL)
    assert world.state.lost == ("c",)
    # No clock tells how old the news are: everybody acts at once.
    world.run(INTERVAL)
    assert all(acts_at(peer) <= world.now for peer in peers[:2])


def test_a_loss_is_no_notice_where_it_is_not_wanted() -> None:
    world, peers = quiet("abcd", replace(FOUR, restart_on_node_loss=False))
    peers[3].die()
    world.run(WINDOW + 2 * INTERVAL)
    assert world.state.lost == ("d",)
    assert [peer.session.notice for peer in peers[:3]] == [Notice()] * 3


def test_only_the_three_lowest_ranks_list_the_roster_at_a_change() -> None:
    world, peers = quiet("abcde", FIVE)
    world.enter("f")  # a spare: it changes the roster, and nothing is to be published
    world.run(2 * INTERVAL)
    assert [peer.kinds.count("ListRoster") for peer in peers] == [1, 1, 1, 0, 0]
    world.run(2 * WINDOW)
    assert all("Swap" not in peer.kinds for peer in peers)


def test_higher_ranks_suspect_the_lowest_after_one_window_and_jitter() -> None:
    world, peers = quiet("abcde", replace(FIVE, min_nodes=2))
    for peer in peers[:3]:
        peer.die()
    last = peers[3]
    world.run(3 * WINDOW, until=lambda: last.session.suspect_since is not None)
    suspected_at = world.now
    world.run(WINDOW - 0.1)
    assert "ListRoster" not in last.kinds + peers[4].kinds
    world.run(2 * INTERVAL + 0.2)
    assert world.now - suspected_at < WINDOW + 2 * INTERVAL + 0.2
    assert world.state.lost == ("a", "b", "c")


def test_what_is_well_again_is_suspected_no_longer() -> None:
    world, peers = quiet("abcde", FIVE)
    (spare,) = world.enter("f")
    world.run(INTERVAL + 0.1)
    assert peers[3].session.suspect_since is not None
    spare.die()
    world.run(WINDOW + INTERVAL + 0.1)
    assert peers[3].session.suspect_since is None


# One moment for everybody to act


def test_all_act_on_a_change_at_one_age_of_it() -> None:
    world, peers = quiet("abc")
    world.enter("d")
    world.run(INTERVAL, until=lambda: world.state.waiting == 1)
    written_at = world.now
    world.run(INTERVAL)
    moments = [acts_at(peer) for peer in peers]
    assert moments == pytest.approx([written_at + NOTICE_SECONDS] * 3)


def test_a_second_loss_is_acted_on_at_one_moment_by_all() -> None:
    world, peers = quiet("abcd", replace(FOUR, min_nodes=1))
    peers[3].die()
    peers[3].finish(give_up(peers[3].session))
    told_at = world.now
    world.run(3.0)
    peers[2].die()
    peers[2].finish(give_up(peers[2].session))
    world.run(INTERVAL)
    assert world.state.lost == ("c", "d")
    moments = [acts_at(peer) for peer in peers[:2]]
    assert moments == pytest.approx([told_at + NOTICE_SECONDS] * 2, abs=0.02)


def test_a_node_looks_once_more_just_before_it_acts() -> None:
    world, peers = quiet("abc")
    world.enter("d")
    world.run(INTERVAL, until=lambda: world.state.waiting == 1)
    written_at = world.now
    world.run(NOTICE_SECONDS)
    for peer in peers:
        looked = [at - written_at for at in peer.logged_at]
        assert any(0.0 < NOTICE_SECONDS - at <= 0.2 + 1e-6 for at in looked)


def test_a_newcomer_that_leaves_in_time_disturbs_nobody() -> None:
    world, peers = quiet("abc")
    (late,) = world.enter("d")
    world.run(INTERVAL, until=lambda: world.state.waiting == 1)
    late.die()
    late.finish(give_up(late.session))
    world.run(INTERVAL)
    assert world.state.waiting == 0
    world.run(INTERVAL)
    assert [peer.session.notice for peer in peers] == [Notice()] * 3


def test_a_finished_round_is_not_scaled_up() -> None:
    world, peers = quiet("abc")
    peers[0].finish(finish(peers[0].session))
    world.enter("d")
    world.run(4 * INTERVAL)
    assert world.state.waiting == 0
    assert [peer.session.notice for peer in peers] == [Notice()] * 3


# The document is not the one the node is in


def test_an_empty_backend_is_refilled_by_runners_and_nobody_is_lost() -> None:
    world, peers = quiet("abcd")
    known = world.state
    world.space.wipe()
    world.run(2 * INTERVAL)
    assert replace(world.state, refill="") == known
    assert world.state.refill
    world.run(2 * WINDOW)
    assert world.state.lost == ()
    assert [peer.session.notice for peer in peers] == [Notice()] * 4
    assert all(peer.kinds.count("Announce") >= 1 for peer in peers)


def test_who_comes_back_to_a_refilled_backend_has_watched_nobody() -> None:
    world, peers = quiet("abcd")
    first, *others = peers
    world.space.wipe()
    first.finish(keep_alive(first.session))
    second = others[0]
    second.finish(keep_alive(second.session))
    for peer in (first, second):
        assert peer.session.contact_since == pytest.approx(peer.clock())
    assert world.state.lost == ()


@pytest.mark.parametrize("number", [0, 1])
def test_an_older_document_is_replaced_by_the_one_that_is_known(number: int) -> None:
    world, peers = quiet("ab")
    for peer in peers:
        peer.join()
    world.run(20.0, until=lambda: all(peer.result is not None for peer in peers))
    known = world.state
    for peer in peers:
        peer.runs = True
    older = State(known.incarnation) if number == 0 else replace(known, round=1, nonce="older")
    world.put(older)
    world.run(2 * INTERVAL)
    assert replace(world.state, refill="") == known
    assert not any(peer.session.overtaken for peer in peers)


@pytest.mark.parametrize(
    "other",
    [document("xy", 9, incarnation="other"), document("xy", 1, incarnation="other")],
)
def test_a_node_that_was_passed_over_is_told_to_rejoin(other: State) -> None:
    world, peers = quiet("ab")
    world.put(other)
    peers[0].finish(keep_alive(peers[0].session))
    assert peers[0].session.overtaken
    assert peers[0].session.notice.count == 1
    assert acts_at(peers[0]) == pytest.approx(world.now)
    assert world.state == other
    # A finished one has nothing to come back for.
    peers[1].session.entry = replace(peers[1].session.entry, finished=True)
    peers[1].finish(keep_alive(peers[1].session))
    assert (peers[1].session.overtaken, peers[1].session.notice.count) == (True, 0)


def test_a_node_that_was_taken_for_dead_is_told_to_rejoin() -> None:
    world, peers = quiet("abc")
    world.put(replace(world.state, lost=("b",)))
    peers[1].finish(keep_alive(peers[1].session))
    assert peers[1].session.overtaken
    peers[0].finish(keep_alive(peers[0].session))
    assert not peers[0].session.overtaken


def test_a_closed_run_ends_the_beats_and_the_workers_go_on() -> None:
    world, peers = quiet("ab")
    world.put(replace(world.state, closed=Closing("done"), waiting=1))
    world.run(2 * INTERVAL)
    for peer in peers:
        assert peer.kinds[-1] == "Withdraw"
        session = peer.session
        assert (session.run_closed, session.next_beat) == (True, float("inf"))
        assert session.notice == Notice()
        assert not session.overtaken
        peer.forget()
        peer.finish(keep_alive(session))
        peer.finish(finish(session))
        assert peer.kinds == []


# The backend does not answer


def test_an_outage_within_the_budget_ends_nothing_and_loses_nobody() -> None:
    world, peers = quiet("abcd")
    world.is_down = True
    world.run(300.0)
    assert all(peer.error is None and peer.session.failures for peer in peers)
    assert [peer.session.notice for peer in peers] == [Notice()] * 4
    world.is_down = False
    world.run(10.0)
    assert all(peer.session.failures == 0 for peer in peers)
    world.run(2 * WINDOW)
    assert (world.state.lost, world.state.round) == ((), 1)
    assert [peer.session.notice for peer in peers] == [Notice()] * 4


def test_the_outage_budget_is_spent_once_and_not_before() -> None:
    world, peers = quiet("ab")
    peer = peers[0]
    peers[1].die()
    last_contact = peer.session.last_contact - peer.offset
    world.is_down = True
    world.run(1000.0, until=lambda: peer.error is not None)
    assert isinstance(peer.error, RendezvousConnectionError)
    assert 600.0 < world.now - last_contact <= 600.0 + INTERVAL


def test_who_died_in_an_outage_is_named_lost_a_window_after_it() -> None:
    world, peers = quiet("abcd")
    world.is_down = True
    peers[3].die()
    world.run(60.0)
    world.is_down = False
    back_at = world.now
    world.run(3 * WINDOW, until=lambda: world.state.lost != ())
    assert world.state.lost == ("d",)
    assert WINDOW <= world.now - back_at < WINDOW + 2 * INTERVAL


def test_a_silence_of_one_and_a_half_intervals_breaks_contact() -> None:
    world, peers = quiet("ab")
    session = peers[0].session
    since = session.contact_since
    peers[0].finish(keep_alive(session))
    world.now += 1.4 * INTERVAL
    peers[0].finish(keep_alive(session))
    assert session.contact_since == since
    world.now += 1.6 * INTERVAL
    peers[0].finish(keep_alive(session))
    assert session.contact_since == pytest.approx(peers[0].clock())


def test_who_lost_contact_announces_again_what_it_runs() -> None:
    world, peers = quiet("ab")
    peer = peers[0]
    peer.loses = {0: "answer"}
    world.run(2 * INTERVAL)
    entries = [effect.entry for effect in peer.log if isinstance(effect, Announce)]
    assert len(entries) == 1
    assert entries[0].round_label == world.state.round_id.label


def test_a_node_without_an_entry_announces_and_names_nobody_lost() -> None:
    world, peers = quiet("ab")
    peers[0].backend.withdraw("a", 0.0)
    peers[0].backend.withdraw("b", 0.0)
    peers[0].finish(keep_alive(peers[0].session))
    assert "Announce" in peers[0].kinds
    assert world.state.lost == ()


def test_a_beat_after_a_failed_announcement_announces_again_for_two_minutes() -> None:
    world, peers = quiet("ab")
    peer = peers[0]
    peer.loses = {0: "answer", 3: "answer"}
    world.run(100.0)
    assert peer.kinds[3] == "Announce"
    assert peer.kinds.count("Announce") >= 19
    world.run(30.0)
    peer.forget()
    world.run(100.0)
    assert set(peer.kinds) == {"Beat"}
    confirmed = entry("a", running=world.state.round_id)
    assert peer.session.entry == replace(confirmed, port=peer.port)
