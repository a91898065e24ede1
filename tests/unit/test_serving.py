"""Rank 0 serves before it confirms, and the document tells where: see rdzv.protocol."""

from __future__ import annotations

import pytest

from rdzv.effects import Prepare
from rdzv.machine import Rules
from rdzv.protocol import give_up

from .protocol_kit import Peer, World

PAIR = Rules(min_nodes=2, max_nodes=2)


def rejoin(peers: list[Peer]) -> None:
    for peer in peers:
        peer.runs, peer.result = False, None
        peer.join()


def test_rank_0_prepares_the_round_before_it_confirms_and_nobody_else_does() -> None:
    world = World(PAIR)
    peers = world.form("ab")
    assert world.state.participant_ids == ("a", "b")
    first, second = peers
    told = first.kinds.index("Prepare")
    prepared = first.log[told]
    assert isinstance(prepared, Prepare)
    assert prepared.state.proposal_id == world.state.round_id
    assert first.kinds[told + 1] == "Announce"
    assert "Prepare" not in second.kinds
    assert world.state.port == first.port, "the document tells where rank 0 serves"
    assert (first.session.entry.port, second.session.entry.port) == (first.port, 0)


@pytest.mark.parametrize("port", [0, 4711])
def test_each_round_has_the_port_that_its_own_rank_0_has_told(port: int) -> None:
    world = World(PAIR)
    first, second = world.form("ab")
    assert world.state.port == first.port
    first.port = port
    rejoin([first, second])
    world.run(10.0, until=lambda: first.result is not None and second.result is not None)
    assert (world.state.round, world.state.port) == (2, port)
    first.finish(give_up(first.session))
    assert first.session.entry.port == 0, "it serves nothing any more"
