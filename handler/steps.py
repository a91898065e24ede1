"""Single exchanges with the backend, and what a session learns from each. No I/O, no clock here.

Rules:

* Every step may be repeated after a lost answer: the next one reads again and decides again.
* ``Session.lose_contact()`` comes with every error, every silence longer than the liveness window,
  every listing or beat that lacks our own entry, and every document that was put back: what such a
  node has not seen proves nothing about anybody (invariant 4).
* An entry counts as announced from the answer on, and is announced again for a while after an
  announcement that failed, since that one may still arrive late.
"""

from __future__ import annotations

from rdzv.codec import encode_entry
from rdzv.effects import (
    Announce,
    Asking,
    Beat,
    Found,
    ListRoster,
    Read,
    Session,
    Steps,
    Swap,
    Wait,
)
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.machine import Observer, reasons_to_rejoin, restored
from rdzv.ports import Entry, Pulse, Question
from rdzv.state import Listing, RosterEntry, State

LISTING_RANKS = 3
"""How many of the lowest ranks list the roster at once when the pulse has changed."""
LISTING_GAP_SECONDS_PER_ENTRY = 0.0005
"""Between two listings of a growing crowd, so that a joining storm costs linear work."""
COUNTING_GAPS = 1 / 16
COUNTING_SECONDS_MIN = 0.005
"""So much of such a gap, and at least so long, between two looks at how many have confirmed, which
cost no listing."""
EXPIRY_MARGIN_SECONDS = 0.05
"""After an entry should have expired, to see that it has."""
BACK_OFF_FIRST_SECONDS = 0.1
BACK_OFF_MAX_SECONDS = 5.0
LATE_WRITE_SECONDS = 120.0
"""For so long after an announcement has failed it may still arrive, and overwrite later ones: a
node announces after every beat until then."""
SWAP_ATTEMPTS_MAX = 16
"""Of one step; every lost race means that somebody else has made progress."""


def read(session: Session, *, watches: bool = False) -> Steps:
    found = yield Read(watches)
    take(session, found)


def catch_up(session: Session) -> Steps:
    """Read a document that a pulse has told of. The watch gives it at once, and then knows from
    where on to watch: a node that goes on to wait need not look again."""
    pulse = session.pulse
    if session.announced and pulse is not None and pulse.token not in (None, session.token):
        seconds = max(0.0, session.next_beat - session.clock())
        found = yield Wait(session.token, None, seconds, session.why)
        if found is not None:
            take(session, found)
            return
    yield from read(session, watches=True)


def swap(session: Session, state: State) -> Asking:
    found: Found = yield Swap(state, session.token)
    take(session, found)
    return found.swapped


def announce(session: Session, entry: RosterEntry) -> Steps:
    session.entry = entry
    label = "" if entry.running is None else entry.running.label
    question = question_of(session)
    asked_at = session.clock()
    session.announced = False
    try:
        pulse = yield Announce(Entry(session.id, encode_entry(entry), label), question)
    except RendezvousConnectionError:
        session.doubt_until = session.clock() + LATE_WRITE_SECONDS
        raise
    session.announced = True
    take_pulse(session, pulse, asked_at)


def beat(session: Session) -> Steps:
    asked_at = session.clock()
    pulse: Pulse = yield Beat(session.id, question_of(session))
    if not pulse.present and session.announced:
        session.announced = False
        session.lose_contact()
    if session.clock() < session.doubt_until:
        session.announced = False
    take_pulse(session, pulse, asked_at)


def list_roster(session: Session) -> Steps:
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
    session.listed_key = None if session.pulse is None else key(session.pulse)


def put_back(session: Session) -> Asking:
    """Refill a backend that came back empty or older. Tells whether it tried to."""
    back = restored(session.state, session.latest, session.nonce())
    if back is None:
        if session.state is not None and session.state.round:
            session.latest = session.state
        return False
    session.lose_contact()
    session.touch()
    session.refills += 1
    session.quiet_until = session.clock() + session.rules.liveness_window_seconds
    session.why = f"the backend had lost round {back.round}, which this node puts back"
    yield from swap(session, back)
    return True


def note_failure(session: Session, error: RendezvousError) -> float:
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


def observer(session: Session) -> Observer:
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
        creates_at_seconds=session.creates_at,
        notice_age_seconds=max(0.0, age),
    )


def key(pulse: Pulse) -> object:
    """Equal for two pulses if nothing tells of a change of the roster between them."""
    return (pulse.revision, pulse.live)


def listing_gap(session: Session) -> float:
    listing = session.listing
    return 0.0 if listing is None else LISTING_GAP_SECONDS_PER_ENTRY * len(listing.present)


def counting_gap(session: Session) -> float:
    """Seconds between two looks at how many have confirmed; infinite where nobody is to."""
    if session.state is None or session.state.proposal is None:
        return float("inf")
    return max(COUNTING_SECONDS_MIN, COUNTING_GAPS * listing_gap(session))


def _listing_is_current(session: Session) -> bool:
    """Whether the coordinator may go by its last listing: nothing has changed since, or it is too
    soon to look again and the pulse shows nothing that would decide something."""
    listing, pulse, state = session.listing, session.pulse, session.state
    if listing is None or pulse is None or state is None:
        return False
    now = session.clock()
    if session.look_at is not None and now >= session.look_at:
        return False
    if key(pulse) == session.listed_key:
        return True
    if state.proposal is not None and pulse.confirmed >= len(state.proposal.participants):
        return False
    if len(listing.present) < session.rules.max_nodes <= pulse.live:
        return False
    return now < listing.started_at_seconds + listing_gap(session)


def take(session: Session, found: Found) -> None:
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


def is_undated(session: Session, state: State) -> bool:
    """Whether a reason to re-join is published and no pulse has told its age yet."""
    pulse = session.pulse
    return (
        reasons_to_rejoin(state, session.rules) > 0
        and pulse is not None
        and pulse.token != session.token
    )


def question_of(session: Session) -> Question:
    state = session.state
    peer = "" if state is None or state.coordinator == session.id else state.coordinator
    proposal_id = state.proposal_id if state is not None else None
    round_id = session.entry.running or proposal_id
    session.asked_peer = peer
    dates_nothing = (
        session.was_read
        and state is not None
        and state.closed is None
        and not reasons_to_rejoin(state, session.rules)
    )
    return Question(
        peer_id=peer,
        round_label="" if round_id is None else round_id.label,
        ageless=session.token if dates_nothing else None,
    )


def take_pulse(session: Session, pulse: Pulse, asked_at: float) -> None:
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
