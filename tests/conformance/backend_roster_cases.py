"""The roster: who is here, by the backend's clock."""

from __future__ import annotations

import random
import time
from typing import Any

from rdzv.conformance.backend_kit import (
    DEADLINE_SECONDS,
    LONG_SECONDS,
    ODD_TEXTS,
    after_loss,
    announced,
    asked,
    live_ids,
    tombstones,
)
from rdzv.conformance.clauses import book
from rdzv.conformance.target import Target
from rdzv.ports import Entry, Question

case = book("roster", "roster", needs=("roster",))
clocked = book("roster", "roster", needs=("roster", "server_clock"))
wiping = book("roster", "roster", needs=("roster",), controls=("wipe",))


@case
def an_announced_node_is_listed(target: Target) -> None:
    mine, theirs = target.connect(), target.connect()
    entry = Entry("node", bytes(range(256)), "round 1")
    pulse = mine.announce(entry, LONG_SECONDS, Question())
    assert pulse.present
    assert pulse.live == 1
    [row] = theirs.entries()
    assert (row.entry, row.withdrawn, row.proven) == (entry, False, True)
    assert theirs.beat("node", LONG_SECONDS, Question()).present


@case
def node_ids_do_not_meet(target: Target) -> None:
    backend = target.connect()
    for text in ODD_TEXTS:
        announced(backend, text, label=text)
    assert live_ids(backend) == ODD_TEXTS
    for row in backend.entries():
        assert row.entry.round_label == row.entry.node_id
    for text in ODD_TEXTS:
        pulse = asked(backend, peer_id=text, label=text)
        assert (pulse.peer_live, pulse.confirmed) == (True, 1), repr(text)


@case
def nodes_are_listed_in_the_order_of_arrival(target: Target) -> None:
    backend = target.connect()
    names = [f"node{number}" for number in random.Random(7).sample(range(100), 30)]
    for name in names:
        announced(backend, name)
    assert live_ids(target.connect()) == names
    # A change keeps the place, whether by announcing or by a beat.
    announced(backend, names[0], label="another")
    backend.beat(names[1], LONG_SECONDS, Question())
    assert live_ids(backend) == names
    # Whoever had withdrawn arrives anew.
    backend.withdraw(names[2], LONG_SECONDS)
    announced(backend, names[2])
    assert live_ids(backend) == names[:2] + names[3:] + names[2:3]


@case
def an_entry_expires_unless_it_is_kept_alive(target: Target) -> None:
    backend = target.connect()
    announced(backend, "kept", ttl=target.short_ttl_seconds)
    announced(backend, "lost", ttl=target.short_ttl_seconds)
    announced(backend, "other", ttl=LONG_SECONDS)

    def lost_is_gone() -> bool:
        assert backend.beat("kept", target.short_ttl_seconds, Question()).present
        return not asked(backend, "lost").peer_live

    target.until(lost_is_gone)
    assert live_ids(backend) == ["kept", "other"]
    assert tombstones(backend) == []
    assert asked(backend).live == 2
    # It does not come back by a beat, but as one that arrives anew.
    assert not backend.beat("lost", LONG_SECONDS, Question()).present
    assert live_ids(backend) == ["kept", "other"]
    announced(backend, "lost")
    assert live_ids(backend)[-1] == "lost"


@case
def a_withdrawn_node_leaves_a_tombstone(target: Target) -> None:
    mine, theirs = target.connect(), target.connect()
    announced(mine, "stays")
    announced(mine, "leaves")
    mine.withdraw("leaves", target.short_ttl_seconds)
    mine.withdraw("never came", LONG_SECONDS)
    assert [row.withdrawn for row in theirs.entries()] == [False, True, True]
    assert live_ids(theirs) == ["stays"]
    assert sorted(tombstones(theirs)) == ["leaves", "never came"]
    pulse = asked(theirs, "leaves")
    assert (pulse.live, pulse.peer_live) == (1, False)
    assert not mine.beat("leaves", LONG_SECONDS, Question()).present
    assert sorted(tombstones(theirs)) == ["leaves", "never came"]
    target.until(lambda: tombstones(theirs) == ["never came"])
    announced(mine, "never came")
    assert tombstones(theirs) == []
    assert live_ids(theirs) == ["stays", "never came"]


@case
def the_revision_moves_with_changes_only(target: Target) -> None:
    backend = target.connect()
    seen = [asked(backend).revision, announced(backend, "a").revision]
    seen.append(announced(backend, "b").revision)
    seen.append(announced(backend, "a", label="round").revision)
    backend.withdraw("b", LONG_SECONDS)
    seen.append(asked(backend).revision)
    announced(backend, "b")
    seen.append(asked(backend).revision)
    assert len(seen) == len({repr(revision) for revision in seen})
    for _ in range(3):
        backend.beat("a", LONG_SECONDS, Question())
        backend.beat("nobody", LONG_SECONDS, Question())
        announced(backend, "a", label="round")
        backend.set_state(b"x")
        backend.entries()
    assert target.connect().beat("a", LONG_SECONDS, Question()).revision == seen[-1]


@case
def a_pulse_is_exact(target: Target) -> None:
    backend = target.connect()
    pulse = asked(backend, "node0", "blue")
    assert (pulse.token, pulse.live, pulse.present) == (None, 0, False)
    assert (pulse.peer_live, pulse.confirmed, pulse.state_age_seconds) == (False, 0, None)
    for number in range(20):
        announced(backend, f"node{number}", label=("blue", "blue ", "")[number % 3])
    backend.withdraw("node0", LONG_SECONDS)
    announced(backend, "short", "blue", target.short_ttl_seconds)
    pulse = asked(backend, "short", "blue")
    assert (pulse.live, pulse.peer_live, pulse.confirmed) == (20, True, 7)
    target.until(lambda: not asked(backend, "short").peer_live)
    pulse = backend.beat("node1", LONG_SECONDS, Question("node0", "blue"))
    assert (pulse.live, pulse.present, pulse.peer_live, pulse.confirmed) == (19, True, False, 6)
    assert asked(backend, "node1", "").confirmed == 0
    assert asked(backend, "", "blue ").confirmed == 7
    assert not asked(backend, "").peer_live
    _, token, _ = backend.set_state(b"x")
    assert asked(backend).token == token == announced(backend, "node1").token
    _, token, _ = backend.set_state(b"x", token)
    assert asked(target.connect()).token == token


@clocked
def a_beat_leaves_the_document_alone(target: Target) -> None:
    backend = target.connect()
    announced(backend, "node")
    before = backend.set_state(b"document")[:2]
    started = time.monotonic()
    assert 0 <= age_seconds(backend) < DEADLINE_SECONDS
    target.until(lambda: age_seconds(backend) >= target.short_ttl_seconds)
    assert backend.get_state() == before
    backend.set_state(b"document", before[1])
    # The age counts from the last write, by a clock that may tick in milliseconds.
    age = age_seconds(backend)
    assert age <= time.monotonic() - started + 0.002
    assert age < target.short_ttl_seconds


def age_seconds(backend: Any) -> float:
    """How old the document is, by the answer to a node's beat."""
    age: float = backend.beat("node", LONG_SECONDS, Question()).state_age_seconds
    return age


@wiping
def a_wiped_roster_is_empty(target: Target) -> None:
    backend = target.connect()
    before = announced(backend, "node").revision
    backend.set_state(b"x")
    target.wipe()
    after_loss(backend)
    pulse = backend.beat("node", LONG_SECONDS, Question())
    assert (pulse.present, pulse.live, pulse.token) == (False, 0, None)
    assert pulse.revision != before
    assert list(backend.entries()) == []
    assert announced(backend, "node").revision != before
    assert live_ids(target.connect()) == ["node"]
