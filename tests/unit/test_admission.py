"""Who is admitted: to a run (rdzv.admission), and to a round (what a coordinator decides)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rdzv.admission import Admission, admit, closing, successor, without
from rdzv.machine import Act, Decision, Observer, decide_waiting
from rdzv.state import (
    REPLACED_INCARNATIONS_MAX,
    Closing,
    Listing,
    Node,
    Proposal,
    RosterEntry,
    State,
)

from .protocol_kit import (
    INTERVAL,
    NOW,
    RULES,
    WINDOW,
    document,
    entry,
    listing,
    node,
    nodes,
    round_id,
    runs,
    waits,
)

GRACE = RULES.closed_grace_seconds
OPEN, CLOSED = document("ab"), document("ab", closed=Closing("done"), replaces=("old",))
LEFT = round_id()
NEXT = round_id(2, "p")


def coordinate(state: State, seen: Listing | None, me: str = "d", **fields: Any) -> Decision:
    """What the coordinator decides at NOW; it was in no round, or has left round 1."""
    rules = fields.pop("rules", RULES)
    own = fields.pop("own", entry(me, LEFT if me in "abc" and state.round else None))
    fields = {"listing_is_current": True, "live_count": 9, **fields}
    state = replace(state, coordinator=me)
    return decide_waiting(state, seen, rules, Observer(own, "new", **fields), NOW)


def frozen(decision: Decision) -> tuple[Node, ...]:
    assert decision.act is Act.SWAP
    assert decision.state.proposal.nonce == "new"
    return decision.state.proposal.participants


# To a run


@pytest.mark.parametrize(
    ("state", "age", "watched", "expected"),
    [
        (None, None, 0.0, Admission.ENTER),
        (OPEN, 1e9, 1e9, Admission.ENTER),
        (CLOSED, GRACE - 0.1, 1e9, Admission.REFUSED),
        (CLOSED, GRACE, 0.0, Admission.REPLACE),
        (CLOSED, None, GRACE - 0.1, Admission.WATCH),
        (CLOSED, None, GRACE, Admission.REPLACE),
    ],
)
def test_how_a_new_node_meets_the_document(
    state: State | None, age: float | None, watched: float, expected: Admission
) -> None:
    assert admit(state, RULES, age, watched) is expected


def test_the_successor_of_a_closed_run_knows_whom_it_replaces_and_nothing_else() -> None:
    me = Observer(entry("d"), "new")
    assert successor(CLOSED, me) == State("new", coordinator="d", replaces=("i", "old"))
    long = replace(CLOSED, replaces=tuple("abcdefgh"))
    kept = successor(long, me).replaces
    assert (kept[0], kept[-1], len(kept)) == ("i", "g", REPLACED_INCARNATIONS_MAX)


def _finished(name: str, number: int = 1) -> RosterEntry:
    return entry(name, running=round_id(number), finished=True)


@pytest.mark.parametrize(
    ("state", "seen", "expected"),
    [
        (OPEN, listing(_finished("a"), _finished("b")), True),
        (OPEN, listing(_finished("a"), _finished("b"), *waits("d")), True),
        (OPEN, listing(_finished("a"), *runs("b")), False),
        (OPEN, listing(_finished("a"), _finished("b", 2)), False),
        (OPEN, listing(_finished("a")), False),
        (document(), listing(), False),
    ],
)
def test_a_run_ended_well_if_every_participant_had_finished(
    state: State, seen: Listing, expected: bool
) -> None:
    state = replace(state, proposal=Proposal("p", nodes("ab")))
    closed = closing(state, seen, RULES, "why")
    assert closed == replace(state, proposal=None, closed=Closing("why", expected))
    closed.check()


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (document("bc"), None),
        (document("ab"), document("ab", lost=("a",))),
        (document("abc", lost=("b",)), document("abc", lost=("a", "b"))),
        (document("ab", lost=("a",)), None),
        (document("ab", proposal=Proposal("p", nodes("bc"))), None),
        (document("bc", proposal=Proposal("p", nodes("ab"))), document("bc")),
        (document("ab", closed=Closing("done")), None),
        (document(), None),
    ],
)
def test_giving_up_voids_what_names_the_node(state: State, expected: State | None) -> None:
    if state.participants == nodes("ab") and state.proposal is not None:
        expected = replace(state, lost=("a",))
    assert without(state, RULES, Observer(entry("a"), "n")) == expected


def test_giving_up_does_not_make_a_published_reason_younger() -> None:
    state = document("abc", lost=("b",))
    voided = without(state, RULES, Observer(entry("a"), "n", notice_age_seconds=3.0))
    assert voided == replace(state, lost=("a", "b"), notice_age_seconds=3.0)


# To a round: when there are enough


def test_a_new_run_costs_no_listing_before_the_pulse_counts_enough() -> None:
    alone = coordinate(document(), None, live_count=1)
    assert (alone.act, alone.why) == (Act.WAIT, "1 of at least 2 nodes are here")
    assert coordinate(document(), None, live_count=2).act is Act.LIST
    # Whoever may still hold an older round is worth a look at any count.
    assert coordinate(document("abc"), None, live_count=1).act is Act.LIST
    proposed = document(proposal=Proposal("p", nodes("de")))
    own = entry("d", running=round_id(1, "p"))
    assert coordinate(proposed, None, live_count=1, own=own).act is Act.LIST


def test_an_outdated_listing_decides_nothing_but_keeps_the_count_of_time() -> None:
    seen = listing(*waits("de"))
    looked = coordinate(document(), seen, listing_is_current=False, minimum_since_seconds=900.0)
    assert (looked.act, looked.minimum_since_seconds) == (Act.LIST, 900.0)


def test_last_call_runs_from_the_minimum_and_ends_with_the_maximum() -> None:
    two, three = listing(*waits("de")), listing(*waits("def"))
    first = coordinate(document(), two)
    assert (first.act, first.wake_at_seconds) == (Act.WAIT, NOW + 30.0)
    assert first.minimum_since_seconds == NOW
    later = coordinate(document(), two, minimum_since_seconds=NOW - 29.9)
    assert (later.act, later.wake_at_seconds) == (Act.WAIT, NOW + 0.1)
    assert later.minimum_since_seconds == NOW - 29.9
    over = coordinate(document(), two, minimum_since_seconds=NOW - 30.0)
    assert frozen(over) == nodes("de")
    assert frozen(coordinate(document(), three)) == nodes("def")


def test_last_call_starts_again_when_too_few_are_left() -> None:
    fell = coordinate(document(), listing(*waits("d")), minimum_since_seconds=NOW - 29.0)
    assert (fell.act, fell.minimum_since_seconds) == (Act.WAIT, None)
    assert fell.why == "1 of at least 2 nodes are waiting (d)"
    again = coordinate(document(), listing(*waits("de")), minimum_since_seconds=None)
    assert again.wake_at_seconds == NOW + 30.0


def test_last_call_runs_while_the_last_round_is_still_held() -> None:
    held = listing(*runs("a"), *waits("bc", LEFT))
    waiting = coordinate(document("abc", waiting=2), held)
    assert (waiting.act, waiting.minimum_since_seconds) == (Act.WAIT, NOW)
    assert waiting.why == "a still in round 1"
    told = coordinate(document("abc"), held, minimum_since_seconds=900.0)
    assert (told.act, told.minimum_since_seconds) == (Act.SWAP, 900.0)
    # As soon as it is not held any more, the time has passed.
    released = coordinate(
        document("abc", waiting=2),
        listing(*waits("bc", LEFT), withdrawn="a"),
        minimum_since_seconds=NOW - 30.0,
    )
    assert frozen(released) == nodes("cb")


def test_nothing_is_completed_for_a_while_after_a_put_back() -> None:
    full = listing(*waits("def"))
    quiet = coordinate(document(), full, quiet_until_seconds=NOW + 7.0)
    assert (quiet.act, quiet.wake_at_seconds) == (Act.WAIT, NOW + 7.0)
    assert frozen(coordinate(document(), full, quiet_until_seconds=NOW)) == nodes("def")


def test_a_freeze_rests_on_a_young_listing() -> None:
    ready: dict[str, Any] = {"minimum_since_seconds": NOW - 60.0}
    young = listing(*waits("def"), age=INTERVAL)
    assert frozen(coordinate(document(), young, **ready)) == nodes("def")
    aged = coordinate(document(), listing(*waits("def"), age=INTERVAL + 0.01), **ready)
    assert (aged.act, aged.minimum_since_seconds) == (Act.LIST, NOW - 60.0)


# To a round: who is a candidate


@pytest.mark.parametrize(
    ("state", "seen", "why"),
    [
        (document("abc"), listing(*waits("de"), *waits("ab", LEFT), *runs("c")), "still in round"),
        (document("abc"), listing(*waits("de"), *waits("ab", LEFT), watched=9.0), "still in round"),
        (document("abc"), listing(*waits("deabc")), "still in round"),
        (document("ab"), listing(*waits("de", LEFT), *runs("x", NEXT), withdrawn="ab"), "later"),
        (document(), listing(*waits("de"), *runs("x")), "later"),
        (document(), listing(*waits("def"), unproven="f"), "not yet shown"),
        (document(), listing(*waits("d"), *waits("ef"), unproven="ef"), "not yet shown"),
    ],
)
def test_no_round_is_formed_while(state: State, seen: Listing, why: str) -> None:
    state = replace(state, waiting=1 if state.round else 0)
    roomy = replace(RULES, max_nodes=9)
    for since in (None, 0.0):
        decision = coordinate(state, seen, minimum_since_seconds=since, rules=roomy)
        assert (decision.act, decision.state) == (Act.WAIT, None)
        assert why in decision.why


def test_former_members_come_before_spares_then_the_order_of_arrival() -> None:
    members_last = listing(*waits("de"), *waits("cab", LEFT))
    decision = coordinate(document("abc"), members_last)
    assert sorted(n.id for n in frozen(decision)) == ["a", "b", "c"]
    one_gone = listing(*waits("de"), *waits("ca", LEFT), withdrawn="b")
    decision = coordinate(document("abc"), one_gone, "e")
    assert frozen(decision) == (node("a"), node("d"), node("c"))
    assert decision.state.lost == ("b",)
    assert decision.why == "3 nodes form round 2"


def test_spares_beyond_the_maximum_are_the_last_to_have_come() -> None:
    assert set(frozen(coordinate(document(), listing(*waits("gfed"))))) == set(nodes("gfe"))


def test_a_running_node_is_never_drafted() -> None:
    # "x" still runs round 1, out of which it was expelled; the document knows round 2.
    state, left = document("ab", 2), round_id(2)
    seen = listing(*runs("x", round_id(1)), *waits("ab", left))
    decision = coordinate(state, seen, "z", minimum_since_seconds=0.0)
    assert frozen(decision) == nodes("ab")


def test_ranks_follow_the_last_round_and_the_chosen_order() -> None:
    seen = listing(*waits("a"), *waits("bc", LEFT))
    ready: dict[str, Any] = {"minimum_since_seconds": 0.0}
    assert frozen(coordinate(document("zbc"), seen, "d", **ready)) == nodes("bac")
    natural = replace(RULES, rank_order="natural")
    by_name = coordinate(document("cb"), listing(*waits("bca", LEFT)), "d", rules=natural, **ready)
    assert frozen(by_name) == nodes("bac")


# A frozen round


PROPOSED = document("ab", proposal=Proposal("p", nodes("abc")), waiting=1)
DROPPED = replace(PROPOSED, proposal=None, coordinator="d")


def confirmed(names: str) -> list[RosterEntry]:
    return [entry(name, LEFT, NEXT) for name in names]


def test_a_round_is_final_when_all_have_confirmed_and_starts_clean() -> None:
    state = replace(
        PROPOSED,
        lost=("b",),
        notice_age_seconds=3.0,
        refill="r",
        replaces=("old",),
        proposal=Proposal("p", nodes("cab")),
    )
    decision = coordinate(state, listing(*waits("ed"), *confirmed("abc")))
    expected = State("i", 2, "p", nodes("cab"), coordinator="e", refill="r", replaces=("old",))
    assert (decision.act, decision.state) == (Act.SWAP, expected)
    assert coordinate(PROPOSED, listing(*confirmed("abc"))).state.coordinator == ""


def test_each_participant_is_waited_for() -> None:
    for late in "abc":
        rest = "abc".replace(late, "")
        slow = coordinate(PROPOSED, listing(*confirmed(rest), entry(late, LEFT)))
        assert (slow.act, slow.state, slow.wake_at_seconds) == (Act.WAIT, None, None)
        assert slow.why == "1 of 3 nodes have yet to confirm"


def test_a_participant_out_of_sight_is_waited_for_as_long_as_it_may_be_alive() -> None:
    seen = listing(*confirmed("ab"), watched=4.0)
    unseen = coordinate(PROPOSED, seen)
    assert (unseen.act, unseen.wake_at_seconds) == (Act.WAIT, NOW - 4.0 + WINDOW)


@pytest.mark.parametrize(
    "seen",
    [
        listing(*confirmed("ab")),
        listing(*confirmed("ab"), withdrawn="c", watched=0.0),
        listing(*confirmed("ab"), entry("c", left=NEXT)),
        listing(*confirmed("ab"), entry("c", running=round_id(2, "other"))),
        listing(*confirmed("ab"), entry("c", running=LEFT)),
        listing(*confirmed("ab"), entry("c", LEFT, finished=True)),
    ],
    ids=["expired", "withdrew", "left", "runs another", "runs the last", "finished"],
)
def test_a_round_that_cannot_be_completed_is_dropped(seen: Listing) -> None:
    decision = coordinate(PROPOSED, seen, minimum_since_seconds=900.0)
    assert (decision.act, decision.state) == (Act.SWAP, DROPPED)
    assert decision.minimum_since_seconds == 900.0
    assert "c " in decision.why


def test_an_occupant_that_turns_up_voids_even_a_confirmed_round() -> None:
    state = replace(PROPOSED, participants=nodes("abx"), lost=("x",))
    decision = coordinate(state, listing(*confirmed("abc"), *runs("x")))
    assert decision.state == replace(state, proposal=None, coordinator="d")
    assert decision.why == "x still holds the last round"


def test_a_round_is_not_completed_past_somebody_who_knows_a_later_one() -> None:
    decision = coordinate(PROPOSED, listing(*confirmed("abc"), *runs("x", round_id(5))))
    assert (decision.act, decision.state) == (Act.WAIT, None)
    assert decision.why.startswith("x knows a later round")


# After a write whose answer was lost: decide again over what was written


@pytest.mark.parametrize(
    ("state", "seen", "own", "then"),
    [
        (document(), listing(*waits("def")), entry("d"), Act.CONFIRM),
        (document("ab"), listing(*runs("ab"), *waits("d")), entry("d"), Act.WAIT),
        (document("abc"), listing(*runs("ab"), *waits("d")), entry("d"), Act.WAIT),
        (PROPOSED, listing(*confirmed("ab"), *waits("d")), entry("d"), Act.WAIT),
        (PROPOSED, listing(*confirmed("abc")), entry("c", LEFT, NEXT), Act.RETURN),
    ],
    ids=["freeze", "publish waiting", "publish lost", "drop", "final"],
)
def test_what_is_done_is_not_done_again(
    state: State, seen: Listing, own: RosterEntry, then: Act
) -> None:
    me = Observer(own, "new", live_count=9, listing_is_current=True)
    state = replace(state, coordinator=own.node.id)
    first = decide_waiting(state, seen, RULES, me, NOW)
    assert first.act is Act.SWAP
    again = decide_waiting(first.state, seen, RULES, replace(me, nonce="newer"), NOW)
    assert (again.act, again.state) == (then, None)


def test_a_document_made_or_a_claim_won_is_not_repeated() -> None:
    me = Observer(entry("d"), "new", live_count=1)
    made = decide_waiting(None, None, RULES, me, NOW).state
    assert decide_waiting(made, None, RULES, me, NOW).act is Act.WAIT
    claimed = decide_waiting(document("ab"), None, RULES, me, NOW).state
    assert decide_waiting(claimed, None, RULES, me, NOW).act is Act.LIST
