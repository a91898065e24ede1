"""What a node does while its workers run: the keep-alive and all that follows from it.

Rules:

* A node that runs beats; when the pulse differs, the three lowest ranks list the roster, the
  others only if nothing was published for one more window. The three look at once when an entry
  that has missed a beat should have expired.
* All participants act on a published change at one age of it, by the backend's clock
  (invariant 11), and look once more just before.
* Nothing here ends a run that the backend merely does not answer for, before the outage budget is
  spent (invariant 5).
"""

from __future__ import annotations

from rdzv import steps
from rdzv.effects import Notice, Session, Steps, Withdraw
from rdzv.errors import RendezvousConnectionError, RendezvousStateError
from rdzv.machine import Act, decide_running, reasons_to_rejoin
from rdzv.state import State

NOTICE_MARGIN_SECONDS = 1.0
"""Without push, a change is acted on when it is this much older than the keep-alive interval."""
NOTICE_CHECK_SECONDS = 0.2
"""This long before acting on a change, a node looks whether it still stands."""


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
        session.next_beat = session.clock() + steps.note_failure(session, error)


def _keep_alive_step(session: Session) -> Steps:
    session.forget_listing()
    yield from steps.beat(session)
    for _ in range(steps.SWAP_ATTEMPTS_MAX):
        if not session.was_read:
            yield from steps.read(session)
        if (yield from steps.put_back(session)):
            continue
        state = session.state
        if state is None:
            break
        decision = decide_running(state, session.listing, session.rules, steps.observer(session))
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
            yield from steps.swap(session, decision.state)
            yield from steps.beat(session)
        elif not session.announced:
            yield from steps.announce(session, session.entry)
        elif steps.is_undated(session, state):
            yield from steps.beat(session)
        elif session.listing is None and _should_list(session, state):
            yield from steps.list_roster(session)
        else:
            break
    _set_notice(session)


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
    if steps.key(pulse) == session.listed_key and not due:
        session.suspect_since = None
        return False
    rank = state.rank_of(session.id) or 0
    if rank < steps.LISTING_RANKS:
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
