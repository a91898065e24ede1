"""A newcomer counts for a next round once it has stayed: see rdzv.machine and rdzv.protocol."""

from __future__ import annotations

import itertools
from dataclasses import replace

from rdzv.effects import Announce, Beat, Read
from rdzv.machine import Rules
from rdzv.state import Closing

from .protocol_kit import INTERVAL, WINDOW, Peer, World, document, entry, nodes

PAIR = Rules(min_nodes=2, max_nodes=2)


def newcomer(world: World, name: str) -> Peer:
    (peer,) = world.enter(name, entry=replace(entry(name), settled=False))
    return peer


def test_a_newcomer_counts_once_it_has_stayed_for_an_interval() -> None:
    world = World(replace(PAIR, max_nodes=3))
    world.form("ab")
    began = world.now
    joiner = newcomer(world, "c")

    def is_noticed() -> bool:
        return bool(world.state and world.state.waiting)

    world.run(60.0, until=is_noticed)
    assert is_noticed()
    assert INTERVAL <= world.now - began <= INTERVAL + 1.0
    assert joiner.session.entry.settled


def test_in_a_first_rendezvous_everybody_counts_at_once() -> None:
    world = World(replace(PAIR, last_call_seconds=0.0))
    began, peers = world.now, [newcomer(world, name) for name in "ab"]
    world.run(60.0, until=lambda: all(peer.result for peer in peers))
    assert world.now < began + 0.1
    assert [peer.error for peer in peers] == [None, None]


def test_joiners_that_die_as_they_start_disturb_nobody() -> None:
    world = World(replace(PAIR, max_nodes=4, last_call_seconds=0.0))
    members = world.form("ab")
    names = (f"joiner{number}" for number in itertools.count())

    def start_and_die(seconds: float) -> None:
        until = world.now + seconds
        while world.now < until:
            joiner = Peer(world, next(names))
            joiner.session.entry = replace(joiner.session.entry, settled=False)
            world.peers.append(joiner)
            joiner.join()
            world.run(0.4)
            joiner.die()

    start_and_die(2 * WINDOW)
    assert all(peer.session.notice.count == 0 for peer in members)
    assert world.state.round == 1
    for peer in members:
        peer.join()
    start_and_die(INTERVAL + 2.0)
    assert [peer.result for peer in members] == [world.state, world.state]
    assert world.state is not None
    assert set(world.state.participants) == set(nodes("ab"))


def test_a_newcomer_that_comes_with_the_others_is_waited_for() -> None:
    world = World(replace(PAIR, max_nodes=3, last_call_seconds=0.0))
    members = world.form("ab")
    began = world.now
    joiner = newcomer(world, "c")
    for peer in members:
        peer.join()
    world.run(60.0, until=lambda: all(peer.result for peer in world.peers))
    assert INTERVAL <= world.now - began <= INTERVAL + 1.0
    assert world.state.round == 2
    assert set(world.state.participants) == set(nodes("abc"))
    assert joiner.result == world.state


def test_the_age_of_a_document_is_asked_for_only_where_it_decides_something() -> None:
    world = World(PAIR)
    world.put(document("ab", waiting=1))
    (joiner,) = world.enter("c")
    world.run(1.0, until=lambda: joiner.session.announced)
    assert joiner.log[0] == Read(watches=True)
    asked = [effect.question.ageless for effect in joiner.log if isinstance(effect, Announce)]
    assert asked == [None], "it tells when the participants are to act"
    world = World(PAIR)
    world.put(document())
    (joiner,) = world.enter("c")
    world.run(1.0, until=lambda: joiner.session.announced)
    (announced,) = (effect for effect in joiner.log if isinstance(effect, Announce))
    assert announced.question.ageless == joiner.read().token


def test_a_closed_runs_age_is_asked_for() -> None:
    world = World(PAIR)
    world.put(document("ab", closed=Closing("done")))
    (joiner,) = world.enter("c")
    world.run(1.0, until=lambda: joiner.error is not None)
    (beat,) = (effect for effect in joiner.log if isinstance(effect, Beat))
    assert beat.question.ageless is None
