"""Records that cannot exist are told from those that can: see rdzv.state."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from rdzv.state import (
    NODES_MAX,
    REPLACED_INCARNATIONS_MAX,
    TEXT_CHARACTERS_MAX,
    Closing,
    Listing,
    Node,
    Present,
    Proposal,
    RecordError,
    RosterEntry,
    RoundId,
    State,
)

A, B, C = (Node(letter, f"{letter}.example") for letter in "abc")
RUNNING = State("5f2c", 3, "91ab", (A, B))
ENTRY = RosterEntry(A)
ROUND = RoundId("5f2c", 3, "91ab")
LONGEST = "x" * TEXT_CHARACTERS_MAX
LONG = LONGEST + "x"
CROWD = tuple(Node(f"n{number}", "host") for number in range(NODES_MAX + 1))
PROPOSAL = Proposal("c0de", (A, B))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": ""}, "no incarnation"),
        ({"incarnation": LONG}, "a text over"),
        ({"round": -1}, "a negative round"),
        ({"port": -1}, "an impossible port"),
        ({"port": 65536}, "an impossible port"),
        ({"round": 0, "participants": (), "nonce": "", "port": 1}, "a port without a round"),
        ({"round": 0, "nonce": ""}, "participants without a round"),
        ({"participants": ()}, "participants without a round"),
        ({"nonce": ""}, "a round without a nonce"),
        ({"round": 0, "participants": ()}, "a round without a nonce"),
        ({"nonce": LONG}, "a text over"),
        ({"participants": CROWD}, f"more than {NODES_MAX} participants"),
        ({"participants": (A, B, replace(A, address="elsewhere"))}, "a node twice"),
        ({"participants": (A, Node("", "host"))}, "a node without id or address"),
        ({"participants": (A, Node("d", ""))}, "a node without id or address"),
        ({"participants": (A, Node(LONG, "host"))}, "a text over"),
        ({"participants": (A, Node("d", LONG))}, "a text over"),
        ({"proposal": Proposal("", (A,))}, "a proposal without a nonce"),
        ({"proposal": Proposal(LONG, (A,))}, "a text over"),
        ({"proposal": Proposal("c0de", ())}, "an empty proposal"),
        ({"proposal": Proposal("c0de", (A, A))}, "a node twice"),
        ({"proposal": Proposal("c0de", CROWD)}, f"more than {NODES_MAX} participants"),
        ({"proposal": Proposal("c0de", (Node("", "host"),))}, "a node without id or address"),
        ({"proposal": Proposal("c0de", (Node("d", LONG),))}, "a text over"),
        ({"proposal": PROPOSAL, "closed": Closing("done")}, "a proposal in a closed run"),
        ({"lost": ("c",)}, "a lost node that was no participant"),
        ({"proposal": Proposal("c0de", (C,)), "lost": ("c",)}, "a lost node that was no"),
        ({"lost": ("b", "a")}, "lost nodes out of order"),
        ({"lost": ("a", "a")}, "lost nodes out of order"),
        ({"waiting": -1}, "an impossible number of waiting nodes"),
        ({"waiting": NODES_MAX + 1}, "an impossible number of waiting nodes"),
        ({"notice_age_seconds": -0.1}, "an impossible age"),
        ({"notice_age_seconds": float("inf")}, "an impossible age"),
        ({"notice_age_seconds": float("nan")}, "an impossible age"),
        ({"coordinator": LONG}, "a text over"),
        ({"closed": Closing(LONG)}, "a text over"),
        ({"refill": LONG}, "a text over"),
        ({"replaces": (LONG,)}, "a text over"),
        (
            {"replaces": tuple(str(number) for number in range(REPLACED_INCARNATIONS_MAX + 1))},
            "too many old incarnations",
        ),
        ({"replaces": ("0001", "5f2c")}, "an incarnation that replaces itself"),
        ({"coordinator": "\udc80"}, "no valid Unicode"),
        ({"participants": (A, Node("d", "\ud83d\ude00"))}, "no valid Unicode"),
    ],
)
def test_states_that_cannot_exist(changes: dict[str, Any], reason: str) -> None:
    RUNNING.check()
    with pytest.raises(RecordError, match=reason):
        replace(RUNNING, **changes).check()


@pytest.mark.parametrize(
    "state",
    [
        State("5f2c"),
        replace(RUNNING, port=65535),
        State("5f2c", proposal=PROPOSAL, coordinator="a", waiting=2),
        replace(RUNNING, participants=CROWD[1:]),
        replace(RUNNING, proposal=Proposal("c0de", (C,)), lost=("a", "b"), waiting=NODES_MAX),
        replace(RUNNING, closed=Closing(""), notice_age_seconds=1e12),
        replace(RUNNING, lost=("a", "b")),
        replace(RUNNING, coordinator=LONGEST, refill=LONGEST, replaces=(LONGEST,)),
        replace(RUNNING, replaces=tuple("01234567"[:REPLACED_INCARNATIONS_MAX])),
        replace(RUNNING, participants=(Node("😀", "fe80::1%eth0\0"),)),
    ],
)
def test_states_that_can_exist(state: State) -> None:
    state.check()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"port": 4711}, "a port without a round"),
        ({"running": ROUND, "port": 65536}, "an impossible port"),
        ({"node": Node("", "host")}, "a node without id or address"),
        ({"node": Node("a", "")}, "a node without id or address"),
        ({"node": Node(LONG, "host")}, "a text over"),
        ({"node": Node("a", LONG)}, "a text over"),
        ({"topology": LONG}, "a text over"),
        ({"topology": "\ud800"}, "no valid Unicode"),
        *(
            ({field: round_id}, reason)
            for field in ("left", "running")
            for round_id, reason in (
                (replace(ROUND, round=0), "an identity of no round"),
                (replace(ROUND, round=-1), "an identity of no round"),
                (replace(ROUND, incarnation=""), "half an identity"),
                (replace(ROUND, nonce=""), "half an identity"),
                (replace(ROUND, incarnation=LONG), "a text over"),
                (replace(ROUND, nonce=LONG), "a text over"),
            )
        ),
    ],
)
def test_entries_that_cannot_exist(changes: dict[str, Any], reason: str) -> None:
    ENTRY.check()
    with pytest.raises(RecordError, match=reason):
        replace(ENTRY, **changes).check()


@pytest.mark.parametrize(
    "entry",
    [
        replace(ENTRY, left=ROUND, running=replace(ROUND, round=4), finished=True),
        replace(ENTRY, topology=LONGEST, rank_hint=0),
        replace(ENTRY, running=ROUND, port=1),
        RosterEntry(Node(LONGEST, LONGEST)),
    ],
)
def test_entries_that_can_exist(entry: RosterEntry) -> None:
    entry.check()


def test_a_record_error_is_a_value_error() -> None:
    assert issubclass(RecordError, ValueError)


def test_records_are_immutable() -> None:
    for record, field in ((RUNNING, "round"), (ENTRY, "topology"), (ROUND, "nonce"), (A, "id")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, "x")


def test_labels_tell_rounds_apart() -> None:
    assert ROUND.label == "5f2c.3.91ab"
    others = [
        replace(ROUND, incarnation="5f2d"),
        replace(ROUND, round=31),
        replace(ROUND, nonce="91ac"),
        replace(ROUND, round=39, nonce="1ab"),
    ]
    assert len({ROUND.label, *(other.label for other in others)}) == 5


def test_round_identities_of_a_state() -> None:
    assert State("5f2c").round_id is None
    assert State("5f2c").proposal_id is None
    assert RUNNING.round_id == ROUND
    assert RUNNING.proposal_id is None
    frozen = replace(RUNNING, proposal=PROPOSAL)
    assert frozen.round_id == ROUND
    assert frozen.proposal_id == RoundId("5f2c", 4, "c0de")
    assert State("5f2c", proposal=PROPOSAL).proposal_id == RoundId("5f2c", 1, "c0de")


def test_ranks_of_a_state() -> None:
    state = replace(RUNNING, participants=(B, A), proposal=Proposal("c0de", (C,)))
    assert state.participant_ids == ("b", "a")
    assert [state.rank_of(node_id) for node_id in ("b", "a", "c", "", "b.example")] == [
        *(0, 1),
        *(None, None, None),
    ]
    assert State("5f2c").rank_of("a") is None


def test_entries_of_a_listing() -> None:
    waiting = RosterEntry(B, topology="rack")
    listing = Listing((Present(ENTRY), Present(waiting, proven=False)), frozenset({"c"}), 10.0, 5.0)
    assert listing.entry_of("a") is ENTRY
    assert listing.entry_of("b") is waiting
    assert listing.entry_of("c") is None, "a node that has withdrawn has no live entry"
    assert listing.entry_of("") is None
    assert Listing((), frozenset(), 0.0, 0.0).entry_of("a") is None


def test_listings_compare_by_what_was_seen() -> None:
    first = Listing((Present(ENTRY),), frozenset(), 10.0, 5.0)
    assert first == Listing((Present(ENTRY),), frozenset(), 10.0, 5.0)
    assert first != Listing((Present(ENTRY, proven=False),), frozenset(), 10.0, 5.0)
    assert first != Listing((Present(ENTRY),), frozenset({"a"}), 10.0, 5.0)
