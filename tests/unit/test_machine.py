"""What a node does next: see rdzv.machine. One observer, one document, one listing at a time.

How a coordinator forms a round is in test_admission.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rdzv.machine import (
    Act,
    Decision,
    Observer,
    decide_running,
    decide_waiting,
    expels,
    has_finished,
    has_left,
    is_ahead,
    is_bygone,
    is_occupant,
    is_parked,
    reasons_to_rejoin,
    restored,
)
from rdzv.state import Closing, Listing, Proposal, RosterEntry, RoundId, State

from .protocol_kit import (
    INTERVAL,
    NOW,
    RULES,
    WINDOW,
    document,
    entry,
    listing,
    nodes,
    round_id,
    runs,
    waits,
)

NEXT = round_id(2, "p")
"""The identity of the proposal of ``FROZEN``."""
FROZEN = document("ab", proposal=Proposal("p", nodes("cd")), coordinator="c")
CLOSED = Closing("done")


def decide(
    state: State | None, seen: Listing | None, entry_of_me: RosterEntry, **fields: Any
) -> Decision:
    """What a coordinator with a current listing does at NOW, unless told otherwise."""
    rules = fields.pop("rules", RULES)
    fields = {"nonce": "new", "listing_is_current": True, "live_count": 9, **fields}
    return decide_waiting(state, seen, rules, Observer(entry_of_me, **fields), NOW)


def coordinate(state: State, seen: Listing | None, name: str = "d", **fields: Any) -> Decision:
    """The same for a newcomer that coordinates."""
    return decide(replace(state, coordinator=name), seen, entry(name), **fields)


def run_on(
    state: State, seen: Listing | None, name: str = "a", *, rules: Any = RULES, age: float = 0.0
) -> Decision:
    """What a participant of round 1 does."""
    me = Observer(entry(name, running=round_id()), "new", notice_age_seconds=age)
    return decide_running(state, seen, rules, me)


# What follows from the two records


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (None, False),
        (round_id(2), True),
        (round_id(2, "other"), False),
        (round_id(3), True),
        (round_id(1), False),
        (round_id(3, incarnation="other"), False),
        (round_id(2, incarnation="other"), False),
    ],
)
def test_a_round_is_left_by_its_identity_or_by_naming_a_later_one(
    left: RoundId | None, expected: bool
) -> None:
    assert has_left(entry("a", left), document("ab", 2)) is expected


@pytest.mark.parametrize(
    ("running", "finished", "expected"),
    [
        (round_id(), True, True),
        (round_id(), False, False),
        (round_id(1, "other"), True, False),
        (None, True, False),
    ],
)
def test_finished_means_this_very_round(
    running: RoundId | None, finished: bool, expected: bool
) -> None:
    assert has_finished(entry("a", None, running, finished), document("ab")) is expected


@pytest.mark.parametrize(
    ("state", "seen", "expected"),
    [
        (document("ab"), listing(entry("a", running=round_id())), True),
        (document("ab"), listing(entry("a")), True),  # chosen, and has not noticed
        (document("ab"), listing(entry("a", left=round_id())), False),
        (document("ab"), listing(entry("a", running=round_id(), finished=True)), False),
        (document("ab"), listing(), False),
        (document("ab"), listing(watched=WINDOW - 0.01), True),
        (document("ab"), listing(watched=0.0, withdrawn="a"), False),
        (document("ab", lost=("a",)), listing(watched=0.0), False),
        (document("ab", lost=("a",)), listing(entry("a", running=round_id())), True),
    ],
)
def test_who_holds_the_round(state: State, seen: Listing, expected: bool) -> None:
    assert is_occupant("a", state, seen, RULES) is expected


@pytest.mark.parametrize(
    ("running", "state", "expected"),
    [
        (None, document("ab", 2), False),
        (round_id(1), document("ab", 2), False),
        (round_id(2), document("ab", 2), False),
        (round_id(2, "other"), document("ab", 2), True),
        (round_id(3), document("ab", 2), True),
        (NEXT, FROZEN, False),
        (round_id(2, "other"), FROZEN, True),
        (round_id(1), document(), True),
        (round_id(1, incarnation="other"), document(), True),
        (round_id(1, incarnation="other"), document("ab", 2), True),
        (round_id(9, incarnation="old"), document(replaces=("older", "old")), False),
    ],
)
def test_who_is_ahead(running: RoundId | None, state: State, expected: bool) -> None:
    assert is_ahead(entry("x", running=running), state) is expected
    assert not is_ahead(entry("x", running=running, finished=True), state)


def test_a_member_of_a_replaced_incarnation_is_bygone() -> None:
    state = document(replaces=("older", "old"))
    for gone in ("old", "older"):
        assert is_bygone(entry("x", left=round_id(incarnation=gone)), state)
        assert is_bygone(entry("x", running=round_id(incarnation=gone)), state)
    assert not is_bygone(entry("x", left=round_id(), running=round_id(2)), state)
    assert not is_bygone(entry("x", left=round_id(incarnation="another")), state)
    assert not is_bygone(entry("x"), state)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (document("abc"), 0),
        (document("abc", waiting=2), 2),
        (document("abc", lost=("c",)), 1),
        (document("abc", lost=("b", "c")), 0),  # too few remain
        (document("abc", lost=("b", "c"), waiting=1), 1),
        (document("abc", waiting=2, lost=("c",), closed=CLOSED), 0),
        (document(waiting=2), 0),
    ],
)
def test_reasons_to_rejoin(state: State, expected: int) -> None:
    assert reasons_to_rejoin(state, RULES) == expected


def test_loss_is_no_reason_where_the_user_does_not_want_it() -> None:
    rules = replace(RULES, restart_on_node_loss=False)
    assert reasons_to_rejoin(document("abc", lost=("c",)), rules) == 0
    assert reasons_to_rejoin(document("abc", lost=("c",), waiting=1), rules) == 1


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (document("abc"), True),
        (document("ab"), False),
        (document("abd"), False),
        (document("abc", lost=("c",)), False),
        (document("abc", waiting=1), False),
        (document("abc", closed=CLOSED), False),
        (document(), False),
        (document("ab", proposal=Proposal("p", nodes("abc"))), True),
        (document("ab", proposal=Proposal("p", nodes("abd"))), False),
        (document("abc", proposal=Proposal("p", nodes("ab"))), False),
    ],
)
def test_a_spare_of_a_full_run_is_parked(state: State, expected: bool) -> None:
    assert is_parked(state, "d", RULES) is expected


MINE = document("ab", 3, coordinator="a", proposal=Proposal("p", nodes("ab")), replaces=("old",))
BACK = replace(MINE, coordinator="", proposal=None, refill="new")


@pytest.mark.parametrize(
    ("found", "mine", "expected"),
    [
        (None, None, None),
        (None, document(), None),
        (None, replace(MINE, proposal=None, closed=CLOSED), None),
        (None, MINE, BACK),
        (document("abc", 2), MINE, BACK),
        (document("ab", 3), MINE, None),
        (document("ab", 4), MINE, None),
        (document("abc", 2, closed=CLOSED), MINE, None),
        (document(incarnation="other"), MINE, BACK),
        (document("ab", incarnation="other"), MINE, None),
        (document(incarnation="next", replaces=("i",)), MINE, None),
        (document("ab", 9, incarnation="old"), MINE, BACK),
        (document("ab", 9, incarnation="old", closed=CLOSED), MINE, BACK),
    ],
)
def test_what_is_put_back(found: State | None, mine: State | None, expected: State | None) -> None:
    assert restored(found, mine, "new") == expected


def test_another_round_expels_but_not_another_job() -> None:
    assert not expels(document("ab"), round_id())
    assert expels(document("ab", 2), round_id())
    assert expels(document("ab"), round_id(1, "other"))
    assert expels(document("ab", incarnation="other"), round_id())
    assert not expels(document(incarnation="next", replaces=("i",)), round_id())


# A participant whose workers run


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (document("abc"), Act.WAIT),
        (document("abc", closed=CLOSED), Act.CLOSED),
        (document("abc", 2), Act.EXPELLED),
        (document("abc", lost=("a",)), Act.EXPELLED),
        (document("xy", 4, incarnation="next", replaces=("i",)), Act.CLOSED),
        (document("abc", lost=("b",), waiting=1), Act.WAIT),
    ],
)
def test_a_runner_reads_its_fate_in_the_document(state: State, expected: Act) -> None:
    assert run_on(state, None).act is expected


def test_a_node_that_runs_nothing_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="decide_running"):
        decide_running(document("ab"), None, RULES, Observer(entry("a"), "new"))


@pytest.mark.parametrize(
    ("state", "seen", "waiting", "lost"),
    [
        # Spares of a full run do not disturb it, however many.
        (document("abc"), listing(*runs("abc"), *waits("de")), None, None),
        (document("ab"), listing(*runs("ab"), *waits("de")), 1, ()),
        (document("ab"), listing(*runs("ab")), None, None),
        # A vanished node makes room, a withdrawn one at once.
        (document("abc"), listing(*runs("ab"), *waits("de")), 1, ("c",)),
        (document("abc"), listing(*runs("ab"), watched=0.0, withdrawn="c"), 0, ("c",)),
        (document("abc"), listing(*runs("ab"), watched=WINDOW - 0.1), None, None),
        (document("abc", lost=("b",)), listing(*runs("a")), 0, ("b", "c")),
        # Once told, a loss stands, though the node is back.
        (document("abc", lost=("b",)), listing(*runs("abc")), None, None),
        (document("abc", lost=("b",)), listing(*runs("ab")), 0, ("b", "c")),
        # Who has left waits to come in again.
        (document("abc"), listing(*runs("ab"), *waits("c", round_id())), 1, ()),
        # A number that is a reason already does not change with every arrival.
        (document("a", waiting=1), listing(*runs("a"), *waits("de")), None, None),
        # Runners of something else and unproven entries are not waiting.
        (document("ab"), listing(*runs("ab"), *runs("d", NEXT)), None, None),
        (document("ab"), listing(*runs("ab"), *waits("d"), unproven="d"), None, None),
    ],
)
def test_what_is_published(
    state: State, seen: Listing, waiting: int | None, lost: tuple[str, ...] | None
) -> None:
    expected = None if waiting is None else replace(state, waiting=waiting, lost=lost)
    for decision in (run_on(state, seen), coordinate(state, seen, "z")):
        assert decision.act is (Act.WAIT if expected is None else Act.SWAP)
        written = decision.state
        assert written is None or replace(written, coordinator="") == expected


def test_an_ending_job_is_not_scaled_up() -> None:
    done = entry("b", running=round_id(), finished=True)
    assert run_on(document("ab"), listing(*runs("a"), done, *waits("de"))).act is Act.WAIT
    former = run_on(document("abc"), listing(*runs("a"), done, *waits("c", round_id())))
    assert former.state == document("abc", waiting=1)
    # Someone who finished another round ends nothing.
    other = entry("x", running=round_id(7), finished=True)
    assert run_on(document("ab"), listing(*runs("ab"), other, *waits("d"))).act is Act.SWAP


def test_a_finished_node_is_neither_lost_nor_a_candidate() -> None:
    done = entry("b", running=round_id(), finished=True)
    assert run_on(document("ab"), listing(*runs("a"), done)).act is Act.WAIT
    decision = coordinate(document("ab"), listing(*waits("a", round_id()), done, *waits("d")))
    assert decision.minimum_since_seconds == NOW
    frozen = coordinate(
        document("ab"),
        listing(*waits("a", round_id()), done, *waits("d")),
        minimum_since_seconds=NOW - 30.0,
    ).state
    assert frozen.proposal.participants == nodes("ad")
    assert frozen.lost == ()


@pytest.mark.parametrize(("age", "waiting"), [(0.0, 0), (INTERVAL, 0), (INTERVAL + 0.1, None)])
def test_waiting_is_taken_back_only_before_anybody_acts_on_it(
    age: float, waiting: int | None
) -> None:
    decision = run_on(document("ab", waiting=1), listing(*runs("ab")), age=age)
    assert (None if decision.state is None else decision.state.waiting) == waiting


def test_a_loss_is_told_however_late_though_waiting_stands() -> None:
    decision = run_on(document("abc", waiting=1), listing(*runs("ab")), age=60.0)
    assert decision.state == document("abc", waiting=1, lost=("c",), notice_age_seconds=60.0)


def test_whoever_watches_too_short_looks_again_when_the_window_is_over() -> None:
    seen = listing(*runs("a"), watched=4.0)
    for decision in (run_on(document("ab"), seen), coordinate(document("ab"), seen)):
        assert decision.act is Act.WAIT
        assert decision.wake_at_seconds == NOW - 4.0 + WINDOW
    assert run_on(document("a"), seen).wake_at_seconds is None


# The age of a notice goes with every kind of write


def test_every_write_carries_the_age_of_a_reason_that_stands() -> None:
    held = document("abc", waiting=1)
    left = waits("abc", round_id())
    proposed = replace(held, proposal=Proposal("p", nodes("ab")))
    ready: dict[str, Any] = {"notice_age_seconds": 7.0, "minimum_since_seconds": NOW - 60.0}
    claimed = decide(held, None, entry("d"), **ready)
    frozen = coordinate(held, listing(*left), **ready)
    dropped = coordinate(proposed, listing(*runs("abc")), **ready)
    published = coordinate(held, listing(*runs("ab"), *waits("d")), **ready)
    for decision in (claimed, frozen, dropped, published):
        assert decision.act is Act.SWAP
        assert decision.state.notice_age_seconds == 7.0
    # Where there is no reason, or none any more, an age is nobody's.
    calm = replace(held, waiting=0)
    assert coordinate(calm, listing(*left), **ready).state.notice_age_seconds == 0.0
    assert run_on(calm, listing(*runs("ab")), age=7.0).state.notice_age_seconds == 0.0
    confirmed = [entry(name, round_id(), round_id(2, "p")) for name in "ab"]
    assert coordinate(proposed, listing(*confirmed), **ready).state.notice_age_seconds == 0.0


# A node at the barrier, whoever coordinates


@pytest.mark.parametrize(
    ("state", "me", "expected"),
    [
        (document(closed=CLOSED), entry("d"), Act.CLOSED),
        (document(closed=Closing("done", ended_well=True)), entry("d"), Act.ENDED_WELL),
        (document(replaces=("old",)), entry("d", round_id(incarnation="old")), Act.CLOSED),
        (document("abd"), entry("d", running=round_id()), Act.RETURN),
        (document("abd", lost=("d",)), entry("d", running=round_id()), Act.RETRACT),
        (document("abc"), entry("d", running=NEXT), Act.RETRACT),
        (replace(FROZEN, proposal=Proposal("q", nodes("cd"))), entry("d", None, NEXT), Act.RETRACT),
        (document("abd"), entry("d"), Act.LEAVE),
        (document("abd"), entry("d", left=round_id(1, "other")), Act.LEAVE),
        (document("abd", coordinator="x"), entry("d", left=round_id()), Act.WAIT),
        (FROZEN, entry("d"), Act.CONFIRM),
        (FROZEN, entry("d", running=NEXT), Act.WAIT),
        (FROZEN, entry("x"), Act.WAIT),
    ],
)
def test_what_the_document_tells_a_node_at_the_barrier(
    state: State, me: RosterEntry, expected: Act
) -> None:
    assert decide(state, None, me).act is expected


def test_the_first_node_makes_the_document_and_coordinates() -> None:
    created = decide(None, None, entry("d"))
    assert (created.act, created.state) == (Act.SWAP, State("new", coordinator="d"))


def test_coordination_is_taken_over_from_nobody_and_from_the_dead() -> None:
    state = document("abc", lost=("c",))
    for coordinator, live in (("", True), ("", False), ("x", False)):
        held = replace(state, coordinator=coordinator)
        claimed = decide(held, None, entry("d"), coordinator_live=live)
        assert claimed.state == replace(state, coordinator="d")
    waits_for = decide(replace(state, coordinator="x"), None, entry("d"))
    assert (waits_for.act, "x forms the round" in waits_for.why) == (Act.WAIT, True)
