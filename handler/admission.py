"""The rules of entering a run, of closing it and of leaving it for good. Pure.

* A new node never announces itself in a closed run. While its ``closed_grace`` lasts it is refused;
  afterwards it begins the next incarnation of the run id by compare-and-set.
* A run ended well if every participant had finished when it was closed.
* A node that gives up voids what names it: the proposal that chose it is dropped, the round that
  counts it names it lost.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from rdzv.machine import Observer, Rules, has_finished, notice_age
from rdzv.state import REPLACED_INCARNATIONS_MAX, Closing, Listing, State


class Admission(Enum):
    """How a node that has not announced itself yet meets the document."""

    ENTER = "announce"
    REFUSED = "the run is closed, and too recently to be begun anew"
    WATCH = "the run is closed; without a clock, see whether it stays as it is"
    REPLACE = "the run is closed and over: begin a new incarnation"


def admit(
    state: State | None, rules: Rules, age_seconds: float | None, watched_seconds: float
) -> Admission:
    """What a new node does. ``age_seconds`` is the document's age on the backend's clock, None
    where there is no such clock; ``watched_seconds`` is how long this node has seen it unchanged.
    """
    if state is None or state.closed is None:
        return Admission.ENTER
    if age_seconds is None:
        over = watched_seconds >= rules.closed_grace_seconds
        return Admission.REPLACE if over else Admission.WATCH
    if age_seconds >= rules.closed_grace_seconds:
        return Admission.REPLACE
    return Admission.REFUSED


def successor(closed: State, me: Observer) -> State:
    """The first document of the incarnation that follows a closed one."""
    replaces = (closed.incarnation, *closed.replaces)[:REPLACED_INCARNATIONS_MAX]
    return State(incarnation=me.nonce, coordinator=me.id, replaces=replaces)


def closing(state: State, listing: Listing, rules: Rules, reason: str) -> State:
    """The document of a closed run. It ended well if every participant had finished."""
    ended_well = bool(state.participants) and all(
        (entry := listing.entry_of(node_id)) is not None and has_finished(entry, state)
        for node_id in state.participant_ids
    )
    return replace(state, proposal=None, closed=Closing(reason, ended_well))


def without(state: State, rules: Rules, me: Observer) -> State | None:
    """The document after this node has given up: its proposal dropped, or the node named lost;
    None when the document does not name it."""
    if state.closed is not None:
        return None
    age, proposal = notice_age(state, rules, me), state.proposal
    if proposal is not None and me.id in proposal.ranks:
        return replace(state, proposal=None, notice_age_seconds=age)
    if me.id in state.ranks and me.id not in state.lost:
        lost = tuple(sorted({*state.lost, me.id}))
        return replace(state, lost=lost, notice_age_seconds=age)
    return None
