"""Planted faults: what a mistake in the code would do. The simulation must catch each of them.

A fault is a context manager that patches the product, never the simulation. Each is a mistake
that somebody could make, has made in a sketch of this protocol, or made while it was written.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from sim.host import Host
from sim.planting import always, fault

from rdzv import admission, machine, protocol, running, steps
from rdzv.backends.memory import MemoryBackend
from rdzv.effects import Beat, ListRoster, Notice, Session
from rdzv.ranks import assign_ranks
from rdzv.state import Listing, Node, Present, RosterEntry, State

WALL_CLOCK_ERROR_SECONDS = 40.0


@fault
def token_ignored() -> Any:
    """A write replaces whatever is there."""
    set_state = MemoryBackend.set_state

    def blind(self: MemoryBackend, state: bytes, token: Any = None) -> Any:
        found = self.get_state()
        return set_state(self, state, None if found is None else found[1])

    return patch.object(MemoryBackend, "set_state", blind)


@fault
def wall_clock_compared() -> Any:
    """Entries carry the time of their last beat, and readers compare it with their own."""
    stamps: dict[str, float] = {}
    beat, announce, list_roster = steps.beat, steps.announce, steps.list_roster

    def wall_clock(session: Session) -> float:
        host: Host = session.clock.__self__  # type: ignore[attr-defined]
        return host.world.now + host.clock_offset % WALL_CLOCK_ERROR_SECONDS

    def stamped(perform_step: Any) -> Any:
        def perform(session: Session, *arguments: Any) -> Any:
            yield from perform_step(session, *arguments)
            stamps[session.id] = wall_clock(session)

        return perform

    def judge(session: Session) -> Any:
        yield from list_roster(session)
        if session.listing is not None:
            oldest = wall_clock(session) - session.rules.liveness_window_seconds
            present = tuple(
                seen
                for seen in session.listing.present
                if stamps.get(seen.entry.node.id, oldest) >= oldest
            )
            session.listing = replace(session.listing, present=present)

    return patch.multiple(steps, beat=stamped(beat), announce=stamped(announce), list_roster=judge)


@fault
def occupant_rule_skipped() -> Any:
    """A round is formed although somebody still holds the last one."""
    return patch.object(machine, "is_occupant", always(False))


@fault
def eviction_after_an_outage() -> Any:
    """What was watched before an outage still counts after it."""
    return patch.object(Session, "lose_contact", always(None))


@fault
def confirm_phase_skipped() -> Any:
    """A proposal becomes final without its participants' word."""
    complete = machine._complete

    def at_once(state: State, listing: Listing, *rest: Any) -> Any:
        confirmed = tuple(
            Present(replace(seen.entry, running=state.proposal_id)) for seen in listing.present
        )
        return complete(state, replace(listing, present=confirmed), *rest)

    return patch.object(machine, "_complete", at_once)


@fault
def expels_on_first_sight() -> Any:
    """Who has no entry is dead, however short the observer has been here."""

    def presumed(node_id: str, state: State, listing: Listing, rules: Any) -> bool:
        return False

    return patch.object(machine, "is_presumed_here", presumed)


@fault
def nonce_left_out_of_left() -> Any:
    """To have left a round means its number only."""

    def has_left(entry: RosterEntry, state: State) -> bool:
        left = entry.left
        return left is not None and left.round >= state.round

    return patch.object(machine, "has_left", has_left)


@fault
def ahead_rule_skipped() -> Any:
    """A node that runs a round unknown to the document stops nobody."""
    return patch.object(machine, "is_ahead", always(False))


@fault
def running_nodes_are_drafted() -> Any:
    """Whoever is no occupant may be chosen, even if its workers run another round."""
    see = machine._see

    def careless(state: State, listing: Listing, rules: Any) -> Any:
        seen = see(state, listing, rules)
        others = tuple(
            p.entry for p in listing.present if p.entry.node.id not in seen.occupants and p.proven
        )
        return replace(seen, waiting=others)

    return patch.object(machine, "_see", careless)


@fault
def closing_by_anybody() -> Any:
    """A node that never got in closes the run when it gives up."""
    return patch.multiple(
        protocol, _is_member=always(True), give_up=lambda session: _close_and_leave(session)
    )


def _close_and_leave(session: Session) -> Any:
    yield from protocol.close(session, "gave up", members_only=True)


@fault
def tombstone_ignored() -> Any:
    """Who has said goodbye is waited for as if it had vanished."""
    list_roster = steps.list_roster

    def forget(session: Session) -> Any:
        yield from list_roster(session)
        if session.listing is not None:
            session.listing = replace(session.listing, withdrawn=frozenset())

    return patch.object(steps, "list_roster", forget)


@fault
def notice_without_a_common_age() -> Any:
    """Everybody acts on a change as soon as it has seen it."""
    set_notice = running._set_notice

    def at_once(session: Session) -> None:
        set_notice(session)
        session.notice = Notice(session.notice.count, session.clock())

    return patch.object(running, "_set_notice", at_once)


@fault
def nothing_is_put_back() -> Any:
    """A backend that came back empty stays so."""
    return patch.object(steps, "restored", always(None))


@fault
def survivors_have_no_precedence() -> Any:
    """Ranks are given as if everybody were new."""

    def assign(entries: Any, previous: Any, rank_order: str) -> tuple[Node, ...]:
        return assign_ranks(entries, (), rank_order)

    return patch.object(machine, "assign_ranks", assign)


@fault
def lost_announcement_is_believed() -> Any:
    """An announcement without an answer counts as made."""
    announce = steps.announce

    def believe(session: Session, entry: RosterEntry) -> Any:
        known = session.announced
        try:
            yield from announce(session, entry)
        except Exception:
            session.announced = known
            session.doubt_until = 0.0
            raise

    return patch.object(steps, "announce", believe)


@fault
def late_announcement_is_not_feared() -> Any:
    """An announcement that failed is taken not to come any more."""
    return patch.object(steps, "LATE_WRITE_SECONDS", 0.0)


@fault
def dropped_proposal_is_not_left() -> Any:
    """Who has confirmed a proposal that was dropped goes on as if it stood."""
    act = protocol._act

    def stay(session: Session, decision: Any) -> Any:
        if decision.act is machine.Act.RETRACT:
            decision = replace(decision, act=machine.Act.WAIT)
        return (yield from act(session, decision))

    return patch.object(protocol, "_act", stay)


@fault
def dead_candidates_are_waited_for() -> Any:
    """A proposal is never dropped."""
    complete = machine._complete

    def patient(state: State, *rest: Any) -> Any:
        decision = complete(state, *rest)
        if decision.state is not None and decision.state.round == state.round:
            return machine.Decision(machine.Act.WAIT, "for ever")
        return decision

    return patch.object(machine, "_complete", patient)


@fault
def grace_of_a_closed_run_ignored() -> Any:
    """Whoever comes to a closed run begins it anew at once."""

    def admit(state: State | None, *_: Any) -> admission.Admission:
        over = state is not None and state.closed is not None
        return admission.Admission.REPLACE if over else admission.Admission.ENTER

    return patch.object(protocol, "admit", admit)


@fault
def spares_time_out() -> Any:
    """A spare of a full run has a deadline like everybody else."""
    return patch.object(protocol, "is_parked", always(False))


@fault
def spares_disturb_a_full_run() -> Any:
    """Nodes that could not be admitted are published as waiting."""
    published = machine._published

    def publish(state: State, seen: Any, rules: Any, me: Any) -> State | None:
        roomy = replace(rules, max_nodes=rules.max_nodes + len(seen.waiting))
        return published(state, seen, roomy, me)

    return patch.object(machine, "_published", publish)


@fault
def loss_is_not_told() -> Any:
    """Participants that were lost are no reason to re-join."""
    reasons = machine.reasons_to_rejoin

    def count(state: State, rules: Any) -> int:
        return reasons(state, rules) if state.waiting else 0

    both = contextlib.ExitStack()
    for module in (steps, running):
        both.enter_context(patch.object(module, "reasons_to_rejoin", count))
    return both


@fault
def only_rank_zero_looks() -> Any:
    """Nobody lists the roster in its place."""
    should_list = running._should_list

    def first_only(session: Session, state: State) -> bool:
        return state.rank_of(session.id) == 0 and should_list(session, state)

    return patch.object(running, "_should_list", first_only)


@fault
def own_absence_is_not_noticed() -> Any:
    """A listing without the observer's own entry counts like any other."""

    def blind(session: Session) -> Any:
        started_at = session.clock()
        present, withdrawn = yield ListRoster()
        session.touch()
        session.look_at = None
        since = session.contact_since or 0.0
        session.listing = Listing(present, withdrawn, started_at, since)
        session.listed_key = None if session.pulse is None else steps.key(session.pulse)

    def beat(session: Session) -> Any:
        asked_at = session.clock()
        pulse = yield Beat(session.id, steps.question_of(session))
        session.announced = session.announced and pulse.present
        steps.take_pulse(session, pulse, asked_at)

    return patch.multiple(steps, list_roster=blind, beat=beat)


@fault
def expelled_nodes_are_not_told() -> Any:
    """A node that the run has passed over goes on with its old round."""
    return patch.object(machine, "expels", always(False))
