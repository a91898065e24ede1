"""What a node does at the barrier, and how it leaves: generators of effects. No I/O here.

Rules:

* Every step may be repeated after a lost answer: the next one reads again and decides again.
* A node that waits beats at keep-alive pace and otherwise watches the document; only the
  coordinator looks at the roster.
* A node that gives up withdraws first and reads the document once more then: had it been chosen
  meanwhile, the round is void.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, TypeAlias

from rdzv import steps
from rdzv.admission import Admission, admit, closing, successor, without
from rdzv.effects import (
    Asking,
    Effect,
    Notice,
    Pause,
    Prepare,
    Session,
    Steps,
    Wait,
    Withdraw,
)
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from rdzv.machine import Act, Decision, decide_waiting, has_settled, is_bygone, is_parked
from rdzv.state import Closing, Listing, State

BEAT_PHASE = 0.618034
"""Of an interval between the beats of neighbouring ranks; the golden ratio fills gaps evenly."""
CREATION_PATIENCE_SECONDS = 1.0
"""For the first of many that start at once to write the run's first document: a thousand attempts
to do so would be a thousand writes to one key. It may have died."""

JoinSteps: TypeAlias = Generator[Effect, Any, State]
JoinStep: TypeAlias = Generator[Effect, Any, "State | None"]


def join(session: Session, deadline: float | None) -> JoinSteps:
    """The barrier: leave the last round, wait for the next one and return its document.

    Raises ``RendezvousClosedError``; ``RendezvousGracefulExitError`` in a node that was waiting
    when the run ended well; ``RendezvousTimeoutError`` at ``deadline`` on the session's clock (a
    parked spare has none until it is promoted); ``RendezvousConnectionError`` when the outage
    budget is spent; ``RendezvousStateError``. Let the node :func:`give_up` after any of them.
    """
    join_seconds = None if deadline is None else deadline - session.clock()
    session.deadline, session.parked = deadline, False
    _leave_round(session)
    while True:
        try:
            final = yield from _join_step(session, join_seconds)
            session.failures = 0
            if final is not None:
                return final
        except RendezvousConnectionError as error:
            back_off = steps.note_failure(session, error)
            if session.deadline is not None:
                back_off = min(back_off, session.deadline - session.clock())
            yield Pause(max(0.0, back_off))
        _check_deadline(session)


def finish(session: Session) -> Steps:
    """Tell the others that this node's agent has begun the exit barrier of its round."""
    session.entry = replace(session.entry, finished=True)
    if not session.run_closed:
        yield from steps.announce(session, session.entry)


def close(session: Session, reason: str, *, members_only: bool) -> Asking:
    """Close the run; with ``members_only``, only if this node is an occupant of its current round
    or has finished it. Tells whether the run is closed now."""
    for _ in range(steps.SWAP_ATTEMPTS_MAX):
        yield from steps.read(session)
        state = session.state
        if state is None and members_only:
            return False
        if state is None:
            closed = State(incarnation=session.nonce(), closed=Closing(reason))
        elif state.closed is not None:
            return True
        elif members_only and not _is_member(session, state):
            return False
        else:
            listing = Listing((), frozenset(), 0.0, 0.0)
            if session.entry.finished:
                yield from steps.list_roster(session)
                listing = session.listing or listing
            closed = closing(state, listing, session.rules, reason)
        if (yield from steps.swap(session, closed)):
            return True
    return False


def give_up(session: Session) -> Steps:
    """Leave the barrier for good: withdraw, and if this node was chosen meanwhile, void that."""
    session.announced = False
    left = session.entry.running or session.entry.left
    session.entry = replace(session.entry, left=left, running=None, port=0)
    yield Withdraw(session.id)
    for _ in range(steps.SWAP_ATTEMPTS_MAX):
        yield from steps.read(session)
        if session.state is None:
            return
        if steps.is_undated(session, session.state):
            yield from steps.beat(session)
            if not session.was_read:
                continue
        voided = without(session.state, session.rules, steps.observer(session))
        if voided is None or (yield from steps.swap(session, voided)):
            return


def _is_member(session: Session, state: State) -> bool:
    running = session.entry.running
    return running is not None and running == state.round_id and session.id not in state.lost


def _leave_round(session: Session) -> None:
    left = session.entry.running or session.entry.left
    session.entry = replace(session.entry, left=left, running=None, finished=False, port=0)
    session.notice = Notice()
    session.run_closed = session.overtaken = session.announced = session.entered = False
    session.suspect_since = session.look_at = session.minimum_since = None
    session.closed_seen_at = None
    session.listing = session.listed_key = None
    session.was_read = False


def _check_deadline(session: Session) -> None:
    if session.abandoned:
        raise RendezvousTimeoutError("Nobody waits for this rendezvous any more.")
    if session.deadline is not None and session.clock() >= session.deadline:
        raise RendezvousTimeoutError(
            "The rendezvous did not complete within the join timeout. "
            f"What was waited for: {session.why or 'the backend'}."
        )


def _join_step(session: Session, join_seconds: float | None) -> JoinStep:
    if not session.was_read:
        yield from steps.catch_up(session)
    if (yield from steps.put_back(session)):
        return None
    if not session.entered:
        session.entered = yield from _arrive(session)
        return None
    if not session.announced:
        yield from steps.announce(session, session.entry)
        return None
    if _is_settling(session) and session.clock() >= session.settles_at:
        yield from steps.announce(session, replace(session.entry, settled=True))
        return None
    if session.clock() >= session.next_beat:
        yield from steps.beat(session)
        return None
    _follow_parking(session, join_seconds)
    decision = decide_waiting(
        session.state, session.listing, session.rules, steps.observer(session), session.clock()
    )
    session.minimum_since = decision.minimum_since_seconds if session.coordinates else None
    return (yield from _act(session, decision))


def _act(session: Session, decision: Decision) -> JoinStep:
    state = session.state
    if decision.act is Act.RETURN:
        _spread_beats(session)
        return state
    if decision.act is Act.SWAP:
        assert decision.state is not None
        session.why = decision.why
        yield from steps.swap(session, decision.state)
    elif decision.act is Act.CONFIRM:
        assert state is not None
        assert state.proposal is not None
        port = 0
        if state.proposal.participants[0].id == session.id:
            port = yield Prepare(state)
        confirming = replace(session.entry, running=state.proposal_id, port=port)
        yield from steps.announce(session, confirming)
    elif decision.act is Act.RETRACT:
        running = session.entry.running
        retracting = replace(session.entry, left=running, running=None, port=0)
        yield from steps.announce(session, retracting)
    elif decision.act is Act.LEAVE:
        assert state is not None
        yield from steps.announce(session, replace(session.entry, left=state.round_id))
    elif decision.act is Act.LIST:
        yield from steps.list_roster(session)
    elif decision.act is Act.ENDED_WELL:
        raise RendezvousGracefulExitError(
            f"The run ended well while this node was waiting ({decision.why})."
        )
    elif decision.act is Act.CLOSED:
        raise RendezvousClosedError(f"The run was closed: {decision.why}.")
    else:
        session.look_at = decision.wake_at_seconds
        yield from _wait(session, decision)
    return None


def _spread_beats(session: Session) -> None:
    """Let the ranks beat at different times, though they have all confirmed at one: then one of
    the lowest soon looks after an entry has expired, and the backend has an even load."""
    rank = (session.state.rank_of(session.id) if session.state is not None else None) or 0
    interval = session.rules.keep_alive_interval_seconds
    spread = session.clock() + interval * (1.0 - rank * BEAT_PHASE % 1.0)
    session.next_beat = min(session.next_beat, spread)


def _arrive(session: Session) -> Asking:
    """Announce, unless the run is closed. A member of the closed incarnation is always refused; a
    new node begins the next incarnation once the grace is over. Tells whether it was admitted."""
    state = session.state
    if state is not None and is_bygone(session.entry, state):
        raise RendezvousClosedError("The run was closed, and its run id is in use anew.")
    if state is None or state.closed is None:
        if state is None:
            session.creates_at = session.clock() + CREATION_PATIENCE_SECONDS
        session.settles_at = session.clock() + session.rules.keep_alive_interval_seconds
        yield from steps.announce(session, session.entry)
        return True
    left = session.entry.left
    if left is not None and left.incarnation == state.incarnation:
        raise RendezvousClosedError(f"The run was closed: {state.closed.reason}.")
    yield from steps.beat(session)
    if not session.was_read:
        session.closed_seen_at = None
        return False
    if session.closed_seen_at is None:
        session.closed_seen_at = session.clock()
    watched = session.clock() - session.closed_seen_at
    age = session.pulse.state_age_seconds if session.pulse is not None else None
    admission = admit(state, session.rules, age, watched)
    grace = session.rules.closed_grace_seconds
    if admission is Admission.REFUSED:
        raise RendezvousClosedError(
            f"The run was closed ({state.closed.reason}). Its run id can be used again in "
            f"{max(0.1, grace - (age or 0.0)):.1f} s; to start at once, choose "
            "another --rdzv-id or a shorter closed_grace."
        )
    if admission is Admission.REPLACE:
        session.closed_seen_at = None
        yield from steps.swap(session, successor(state, steps.observer(session)))
        return False
    why = f"the run is closed; its run id can be used again in {grace - watched:.1f} s"
    session.why = why
    seconds = min(session.rules.keep_alive_interval_seconds, max(0.0, grace - watched))
    found = yield Wait(session.token, None, seconds, why)
    if found is not None:
        steps.take(session, found)
        session.closed_seen_at = None
    return False


def _is_settling(session: Session) -> bool:
    return session.state is not None and not has_settled(session.entry, session.state)


def _follow_parking(session: Session, join_seconds: float | None) -> None:
    if join_seconds is None or session.state is None:
        return
    session.parked = is_parked(session.state, session.id, session.rules)
    if session.parked:
        session.deadline = None
    elif session.deadline is None:
        session.deadline = session.clock() + join_seconds


def _wait(session: Session, decision: Decision) -> Steps:
    now = session.clock()
    session.why = decision.why
    moments = [session.next_beat, session.deadline, decision.wake_at_seconds]
    if _is_settling(session):
        moments.append(session.settles_at)
    pulse, revision = session.pulse, None
    if session.coordinates and pulse is not None:
        revision = pulse.revision
        if session.listing is not None and steps.key(pulse) != session.listed_key:
            look_at = session.listing.started_at_seconds + steps.listing_gap(session)
            if look_at > now:
                moments.append(look_at)
                revision = None
                count_at = now + steps.counting_gap(session)
                if count_at < look_at:
                    session.next_beat = min(session.next_beat, count_at)
                    moments.append(session.next_beat)
    until = min(moment for moment in moments if moment is not None)
    found = yield Wait(session.token, revision, max(0.0, until - now), decision.why)
    if found is not None:
        steps.take(session, found)
    elif session.clock() < until:
        session.next_beat = session.clock()
