"""What many nodes that start at once do not do."""

from __future__ import annotations

import pytest

from rdzv import steps
from rdzv.machine import Rules
from rdzv.protocol import CREATION_PATIENCE_SECONDS

from .protocol_kit import NOW, Peer, World


def run_through(world: World, peers: list[Peer]) -> None:
    """Let everybody get a round."""
    world.run(10.0, until=lambda: all(peer.result is not None for peer in peers))
    assert all(peer.result == world.state for peer in peers)


def test_only_the_first_to_arrive_writes_the_first_document() -> None:
    world = World(Rules(min_nodes=3, max_nodes=3))
    peers = world.enter("abc")
    run_through(world, peers)
    assert [peer.kinds.count("Swap") for peer in peers] == [3, 0, 0]
    # What has been written meanwhile is told by the watch.
    assert all(peer.kinds.count("Read") == 1 for peer in peers[1:])


def test_the_second_writes_it_where_the_first_has_died() -> None:
    world = World(Rules(min_nodes=2, max_nodes=2))
    (first,) = world.enter("a")
    while "Announce" not in first.kinds:
        first.advance()
    first.die()
    (second,) = world.enter("b")
    started = world.now
    world.run(CREATION_PATIENCE_SECONDS / 2)
    assert world.written == []
    world.run(10.0, until=lambda: bool(world.written))
    assert world.now - started <= CREATION_PATIENCE_SECONDS
    assert world.written[0].coordinator == "b"
    assert second.kinds.count("Swap") == 1


def test_confirmations_are_counted_between_two_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LISTING_GAP_SECONDS_PER_ENTRY", 1.0)
    world = World(Rules(min_nodes=3, max_nodes=3))
    peers = world.enter("abc")
    run_through(world, peers)
    assert world.now - NOW <= 2 * 3.0 * steps.COUNTING_GAPS
    assert sum(peer.kinds.count("ListRoster") for peer in peers) == 2
