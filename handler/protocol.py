"""What a node does over its life, as generators of effects. No I/O, no clock, no thread here.

Rules:

* Every step may be repeated after a lost answer: the next one reads again and decides again.
* ``Session.lose_contact()`` comes with every error, every silence longer than the liveness window,
  and every listing or beat that lacks our own entry: what such a node has not seen proves nothing
  about anybody (invariant 4).
* A node that waits beats at keep-alive pace and otherwise watches the document; only the
  coordinator looks at the roster.
* A node that runs beats; when the pulse differs, the three lowest ranks list the roster, the
  others only if nothing was published for one more window.
* All participants act on a published change at one age of it, by the backend's clock
  (invariant 11), and look once more just before.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, TypeAlias

from rdzv.codec import encode_entry
from rdzv.effects import (
    Announce,
    Asking,
    Beat,
    Effect,
    Found,
    ListRoster,
    Notice,
    Pause,
    Read,
    Session,
    Steps,
    Swap,
    Wait,
    Withdraw,
)
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rdzv.machine import (
    Act,
    Admission,
    Decision,
    Observer,
    admit,
    closing,
    decide_running,
    decide_waiting,
    is_bygone,
    is_parked,
    reasons_to_rejoin,
    restored,
    successor,
    without,
)
from rdzv.ports import Entry, Pulse, Question
from rdzv.state import Closing, Listing, RosterEntry, State

NOTICE_MARGIN_SECONDS = 1.0
"""Without push, a change is acted on when it is this much older than the keep-alive interval."""
NOTICE_CHECK_SECONDS = 0.2
"""This long before acting on a change, a node looks whether it still stands."""
LISTING_RANKS = 3
"""How many of the lowest ranks list the roster at once when the pulse has changed."""
LISTING_GAP_SECONDS_PER_ENTRY = 0.0005
"""Between two listings of a growing crowd, so that a joining storm costs linear work."""
BEAT_PHASE = 0.618034
"""Of an interval between the beats of neighbouring ranks; the golden ratio fills gaps evenly."""
EXPIRY_MARGIN_SECONDS = 0.05
"""After an entry should have expired, to see that it has."""
BACK_OFF_FIRST_SECONDS = 0.1
BACK_OFF_MAX_SECONDS = 5.0
LATE_WRITE_SECONDS = 120.0
"""For so long after an announcement has failed it may still arrive, and overwrite later ones: a
node announces after every beat until then."""
SWAP_ATTEMPTS_MAX = 16
"""Of one step; every lost race means that somebody else has made progress."""

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
            back_off = _note_failure(session, error)
            if session.deadline is not None:
                back_off = min(back_off, session.deadline - session.clock())
            yield Pause(max(0.0, back_off))
        _check_deadline(session)


def keep_alive(session: Session) -> Steps:
    """One beat of a node that runs, and all that follows from it. Sets ``session.next_beat``,
    ``notice``, ``overtaken`` and ``run_closed``.

    Raises ``RendezvousConnectionError`` or ``RendezvousStateError`` when the outage budget is
    spent, and only then.
    """
    if session.run_closed:
        session.next_beat = float("inf")
        return
    try:
        yield from _keep_alive_step(session)
        session.failures = 0
    except (RendezvousConnectionError, RendezvousStateError) as error:
        session.next_beat = session.clock() + _note_failure(session, error)


def finish(session: Session) -> Steps:
    """Tell the others that this node's agent has begun the exit barrier of its round."""
    session.entry = replace(session.entry, finished=True)
    if not session.run_closed:
        yield from _announce(session, session.entry)


def close(session: Session, reason: str, *, members_only: bool) -> Asking:
    """Close the run; with ``members_only``, only if this node is an occupant of its current round
    or has finished it. Tells whether the run is closed now."""
    for _ in range(SWAP_ATTEMPTS_MAX):
        yield from _read(session)
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
                yield from _list(session)
                listing = session.listing or listing
            closed = closing(state, listing, session.rules, reason)
        if (yield from _swap(session, closed)):
            return True
    return False


def give_up(session: Session) -> Steps:
    """Leave the barrier for good: withdraw, and if this node was chosen meanwhile, void that."""
    session.announced = False
    yield Withdraw(session.id)
    for _ in range(SWAP_ATTEMPTS_MAX):
        yield from _read(session)
        voided = None if session.state is None else without(session.state, session.id)
        if voided is None or (yield from _swap(session, voided)):
            return


def _is_member(session: Session, state: State) -> bool:
    running = session.entry.running
    return running is not None and running == state.round_id and session.id not in state.lost


def _leave_round(session: Session) -> None:
    left = session.entry.running or session.entry.left
    session.entry = replace(session.entry, left=left, running=None, finished=False)
    session.notice = Notice()
    session.run_closed = session.overtaken = session.announced = session.entered = False
    session.suspect_since = session.look_at = session.minimum_since = None
    session.closed_seen_at = None
    session.listing = session.listed_key = None
    session.was_read = False


def _note_failure(session: Session, error: RendezvousError) -> float:
    """Seconds to wait before the next try. Raises the error when the budget is spent."""
    if session.last_contact is None:
        session.last_contact = session.clock()
    session.lose_contact()
    session.failures += 1
    session.was_read = False
    session.next_beat = session.clock()
    session.why = str(error)
    if session.outage_seconds() > session.outage_timeout_seconds:
        raise error
    most = BACK_OFF_FIRST_SECONDS * 2 ** min(session.failures, 16)
    interval = session.rules.keep_alive_interval_seconds
    return session.jitter(min(most, interval, BACK_OFF_MAX_SECONDS))


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
        yield from _read(session)
    if (yield from _put_back(session)):
        return None
    if not session.entered:
        session.entered = yield from _arrive(session)
        return None
    if not session.announced:
        yield from _announce(session, session.entry)
        return None
    if session.clock() >= session.next_beat:
        yield from _beat(session)
        return None
    _follow_parking(session, join_seconds)
    decision = decide_waiting(
        session.state, session.listing, session.rules, _observer(session), session.clock()
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
        yield from _swap(session, decision.state)
    elif decision.act is Act.CONFIRM:
        assert state is not None
        yield from _announce(session, replace(session.entry, running=state.proposal_id))
    elif decision.act is Act.RETRACT:
        running = session.entry.running
        yield from _announce(session, replace(session.entry, left=running, running=None))
    elif decision.act is Act.LIST:
        yield from _list(session)
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
        yield from _announce(session, session.entry)
        return True
    left = session.entry.left
    if left is not None and left.incarnation == state.incarnation:
        raise RendezvousClosedError(f"The run was closed: {state.closed.reason}.")
    yield from _beat(session)
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
            f"{grace - (age or 0.0):.1f} s; to start at once, choose another --rdzv-id."
        )
    if admission is Admission.REPLACE:
        session.closed_seen_at = None
        yield from _swap(session, successor(state, _observer(session)))
        return False
    why = f"the run is closed; its run id can be used again in {grace - watched:.1f} s"
    session.why = why
    seconds = min(session.rules.keep_alive_interval_seconds, max(0.0, grace - watched))
    found = yield Wait(session.token, None, seconds, why)
    if found is not None:
        _take(session, found)
        session.closed_seen_at = None
    return False


def _put_back(session: Session) -> Asking:
    """Refill a backend that came back empty or older. Tells whether it tried to."""
    back = restored(session.state, session.latest, session.nonce())
    if back is None:
        if session.state is not None and session.state.round:
            session.latest = session.state
        return False
    session.lose_contact()
    session.touch()
    session.quiet_until = session.clock() + session.rules.liveness_window_seconds
    session.why = f"the backend had lost round {back.round}, which this node puts back"
    yield from _swap(session, back)
    return True


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
    pulse, revision = session.pulse, None
    if session.coordinates and pulse is not None:
        revision = pulse.revision
        if session.listing is not None and _key(pulse) != session.listed_key:
            look_at = session.listing.started_at_seconds + _listing_gap(session)
            if look_at > now:
                moments.append(look_at)
                revision = None
    until = min(moment for moment in moments if moment is not None)
    found = yield Wait(session.token, revision, max(0.0, until - now), decision.why)
    if found is not None:
        _take(session, found)
    elif session.clock() < until:
        session.next_beat = session.clock()


def _observer(session: Session) -> Observer:
    state, pulse = session.state, session.pulse
    asked = state is not None and session.asked_peer == state.coordinator
    age = 0.0 if session.changed_at is None else session.clock() - session.changed_at
    return Observer(
        entry=session.entry,
        nonce=session.nonce(),
        coordinator_live=pulse is None or pulse.peer_live or not asked,
        live_count=0 if pulse is None else pulse.live,
        listing_is_current=_listing_is_current(session),
        minimum_since_seconds=session.minimum_since,
        quiet_until_seconds=session.quiet_until,
        notice_age_seconds=max(0.0, age),
    )


def _key(pulse: Pulse) -> object:
    """Equal for two pulses if nothing tells of a change of the roster between them."""
    return (pulse.revision, pulse.live)


def _listing_gap(session: Session) -> float:
    listing = session.listing
    return 0.0 if listing is None else LISTING_GAP_SECONDS_PER_ENTRY * len(listing.present)


def _listing_is_current(session: Session) -> bool:
    """Whether the coordinator may go by its last listing: nothing has changed since, or it is too
    soon to look again and the pulse shows nothing that would decide something."""
    listing, pulse, state = session.listing, session.pulse, session.state
    if listing is None or pulse is None or state is None:
        return False
    now = session.clock()
    if session.look_at is not None and now >= session.look_at:
        return False
    if _key(pulse) == session.listed_key:
        return True
    if state.proposal is not None and pulse.confirmed >= len(state.proposal.participants):
        return False
    if len(listing.present) < session.rules.max_nodes <= pulse.live:
        return False
    return now < listing.started_at_seconds + _listing_gap(session)


def _keep_alive_step(session: Session) -> Steps:
    session.forget_listing()
    yield from _beat(session)
    for _ in range(SWAP_ATTEMPTS_MAX):
        if not session.was_read:
            yield from _read(session)
        if (yield from _put_back(session)):
            continue
        state = session.state
        if state is None:
            break
        decision = decide_running(state, session.listing, session.rules, _observer(session))
        if session.listing is not None:
            session.look_at = decision.wake_at_seconds
        if decision.act is Act.CLOSED:
            yield from _end_beats(session)
            return
        if decision.act is Act.EXPELLED:
            session.overtaken = True
            session.why = decision.why
            session.notice = Notice(0 if session.entry.finished else 1, session.clock())
            return
        if decision.act is Act.SWAP:
            assert decision.state is not None
            session.forget_listing()
            yield from _swap(session, decision.state)
            yield from _beat(session)
        elif not session.announced:
            yield from _announce(session, session.entry)
        elif session.listing is None and _should_list(session, state):
            yield from _list(session)
        elif _is_undated(session, state):
            yield from _beat(session)
        else:
            break
    _set_notice(session)


def _is_undated(session: Session, state: State) -> bool:
    """Whether a reason to re-join is published and no pulse has told its age yet."""
    pulse = session.pulse
    return (
        reasons_to_rejoin(state, session.rules) > 0
        and pulse is not None
        and pulse.token != session.token
    )


def _end_beats(session: Session) -> Steps:
    """The run was closed: this node goes on, but means nothing to a next incarnation."""
    session.run_closed = True
    session.notice = Notice()
    session.next_beat = float("inf")
    session.announced = False
    yield Withdraw(session.id)


def _should_list(session: Session, state: State) -> bool:
    pulse, now = session.pulse, session.clock()
    if pulse is None:
        return False
    due = session.look_at is not None and now >= session.look_at
    if _key(pulse) == session.listed_key and not due:
        session.suspect_since = None
        return False
    rank = state.rank_of(session.id) or 0
    if rank < LISTING_RANKS:
        return True
    if pulse.confirmed == pulse.live == len(state.participants):
        session.suspect_since = None
        return False
    if session.suspect_since is None:
        most = session.rules.keep_alive_interval_seconds
        session.suspect_since = now + session.jitter(most)
    return now - session.suspect_since >= session.rules.liveness_window_seconds


def _set_notice(session: Session) -> None:
    state, now, rules = session.state, session.clock(), session.rules
    count = 0 if state is None else reasons_to_rejoin(state, rules)
    if not count:
        session.notice = Notice()
        return
    at = now
    pulse = session.pulse
    if pulse is not None and pulse.state_age_seconds is not None and session.changed_at is not None:
        at = session.changed_at + rules.keep_alive_interval_seconds + NOTICE_MARGIN_SECONDS
    session.notice = Notice(count, at)
    if now < at - NOTICE_CHECK_SECONDS:
        session.next_beat = min(session.next_beat, at - NOTICE_CHECK_SECONDS)


def _read(session: Session) -> Steps:
    found = yield Read()
    _take(session, found)


def _swap(session: Session, state: State) -> Asking:
    found: Found = yield Swap(state, session.token)
    _take(session, found)
    return found.swapped


def _take(session: Session, found: Found) -> None:
    session.touch()
    before = "" if session.state is None else session.state.coordinator
    coordinator = "" if found.state is None else found.state.coordinator
    if session.proves_life_by_beats and coordinator not in ("", before, session.id):
        session.next_beat = session.clock()
    session.state, session.token, session.was_read = found.state, found.token, True
    if found.state is not None and found.state.refill != session.refill:
        session.refill = found.state.refill
        session.lose_contact()
        session.touch()
    _date_change(session)


def _date_change(session: Session) -> None:
    """When the published reason to re-join came up: exactly where a pulse tells the age of this
    very document, else as if it had been written just now."""
    state, pulse = session.state, session.pulse
    if state is None or not reasons_to_rejoin(state, session.rules):
        session.changed_at = None
        return
    written_at = session.clock()
    if pulse is not None and pulse.token == session.token and pulse.state_age_seconds is not None:
        written_at = session.pulse_at - pulse.state_age_seconds
    session.changed_at = written_at - state.notice_age_seconds


def _question(session: Session) -> Question:
    state = session.state
    peer = "" if state is None or state.coordinator == session.id else state.coordinator
    proposal_id = state.proposal_id if state is not None else None
    round_id = session.entry.running or proposal_id
    session.asked_peer = peer
    return Question(peer_id=peer, round_label="" if round_id is None else round_id.label)


def _announce(session: Session, entry: RosterEntry) -> Steps:
    session.entry = entry
    label = "" if entry.running is None else entry.running.label
    question = _question(session)
    asked_at = session.clock()
    session.announced = False
    try:
        pulse = yield Announce(Entry(session.id, encode_entry(entry), label), question)
    except RendezvousConnectionError:
        session.doubt_until = session.clock() + LATE_WRITE_SECONDS
        raise
    session.announced = True
    _take_pulse(session, pulse, asked_at)


def _beat(session: Session) -> Steps:
    asked_at = session.clock()
    pulse: Pulse = yield Beat(session.id, _question(session))
    if not pulse.present and session.announced:
        session.announced = False
        session.lose_contact()
    if session.clock() < session.doubt_until:
        session.announced = False
    _take_pulse(session, pulse, asked_at)


def _take_pulse(session: Session, pulse: Pulse, asked_at: float) -> None:
    session.touch()
    session.pulse = pulse
    session.next_beat = asked_at + session.rules.keep_alive_interval_seconds
    if _watches_the_roster(session) and _somebody_is_late(session, pulse):
        expires_at = session.clock() + (pulse.next_expiry_seconds or 0.0)
        session.next_beat = min(session.next_beat, expires_at + EXPIRY_MARGIN_SECONDS)
    session.pulse_at = session.clock()
    if pulse.token != session.token:
        session.was_read = False
    elif session.was_read:
        _date_change(session)


def _watches_the_roster(session: Session) -> bool:
    """Whether it falls to this node to notice a loss at once."""
    state = session.state
    if state is None:
        return False
    if session.entry.running is None:
        return session.coordinates
    rank = state.rank_of(session.id)
    return rank is not None and rank < LISTING_RANKS


def _somebody_is_late(session: Session, pulse: Pulse) -> bool:
    """Whether a live entry has missed a beat: it is worth looking when it will have expired."""
    rules, expiry = session.rules, pulse.next_expiry_seconds
    healthy = rules.liveness_window_seconds - 1.5 * rules.keep_alive_interval_seconds
    return expiry is not None and expiry < healthy


def _list(session: Session) -> Steps:
    started_at = session.clock()
    present, withdrawn = yield ListRoster()
    session.touch()
    assert session.contact_since is not None
    if all(seen.entry.node.id != session.id for seen in present):
        session.announced = False
        session.lose_contact()
        return
    session.look_at = None
    session.listing = Listing(present, withdrawn, started_at, session.contact_since)
    session.listed_key = None if session.pulse is None else _key(session.pulse)
