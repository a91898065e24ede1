"""The rules of the rendezvous: what a node does next, given what it knows. Pure.

Theory. Two records are all there is: the *state*, changed only by compare-and-set, and the
*roster*, one entry per node written only by that node. Everything else is derived here. Whoever
acts on an old view loses its compare-and-set and decides again, so any number of nodes may run
these rules at once, and every decision may be repeated after an answer was lost: it is then either
done already, or still right, or no longer possible.

* A node *has left* a round if its entry says so, or names a later round of the incarnation.
* An *occupant* is a participant that is here (or presumed here), has not left, has not finished.
* A participant without an entry and without a tombstone is presumed here until this observer has
  been in unbroken contact for a whole liveness window; one that the state names lost is not.
* While an occupant exists no round is formed: its workers may be running.
* While somebody is *ahead* (runs a round that the document does not know) no round is formed: the
  document is an older one, and that node is about to put its own back.
* Once there is a round, a *newcomer* (a node that has left none) counts for the next one only
  when it has *settled*, kept itself alive for a keep-alive interval: one that dies as it starts,
  again and again, must not stop the workers of the others or spoil their proposals.
* A round is *frozen* (a proposal under a new nonce), confirmed by each participant in its own
  entry, and made *final* by one compare-and-set; only then does anybody return from the barrier.
  A proposal that cannot be completed any more is dropped by compare-and-set; one of the two wins.
* A reason to re-join, once published, stands until the round ends, except that ``waiting`` may go
  back to nothing within ``keep_alive_interval``: nobody acts on it before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rdzv.ranks import assign_ranks
from rdzv.state import (
    Listing,
    Proposal,
    RosterEntry,
    RoundId,
    State,
)

SETTLING_MARGIN_SECONDS = 0.5
"""For a newcomer's word that it has settled to arrive."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The part of the settings that the rules depend on. The same on all nodes of a run."""

    min_nodes: int
    max_nodes: int
    last_call_seconds: float = 30.0
    keep_alive_interval_seconds: float = 5.0
    liveness_window_seconds: float = 15.0
    closed_grace_seconds: float = 60.0
    restart_on_node_loss: bool = True
    rank_order: str = "stable"


class Act(Enum):
    """What a node does next."""

    WAIT = "wait for a change"
    LIST = "list the roster, then decide again"
    SWAP = "write Decision.state by compare-and-set"
    CONFIRM = "confirm the proposal in the own entry"
    RETRACT = "leave a proposal that was dropped"
    LEAVE = "say that the current round was left"
    RETURN = "the round is final: return from the barrier"
    EXPELLED = "the run went on without this node: re-join"
    CLOSED = "the run is closed"
    ENDED_WELL = "the run is closed, and every participant had finished"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and until when it is certain that nothing else is to be done."""

    act: Act
    why: str = ""
    state: State | None = None
    wake_at_seconds: float | None = None
    """On this node's clock: decide again then, even if nothing has changed."""
    minimum_since_seconds: float | None = None
    """For the coordinator: since when there have been enough candidates without a gap."""


@dataclass(frozen=True, slots=True)
class Observer:
    """What a node knows of itself when it decides."""

    entry: RosterEntry
    nonce: str
    """Never used before by anybody; taken if this decision starts something."""
    coordinator_live: bool = True
    live_count: int = 0
    """Live entries by the last pulse."""
    listing_is_current: bool = False
    """Whether nothing in the last pulse tells of a change since the listing."""
    minimum_since_seconds: float | None = None
    quiet_until_seconds: float = 0.0
    """Complete nothing before: this node has put the document back."""
    creates_at_seconds: float = 0.0
    """Leave a run's first document to whoever was here first until then."""
    notice_age_seconds: float = 0.0
    """Age, now, of the published reason to re-join, as well as it is known."""

    @property
    def id(self) -> str:
        """This node's id."""
        return self.entry.node.id


def has_left(entry: RosterEntry, state: State) -> bool:
    """Whether the node has left the state's current round."""
    left = entry.left
    if left is None or left.incarnation != state.incarnation:
        return False
    return left.round > state.round or left == state.round_id


def has_finished(entry: RosterEntry, state: State) -> bool:
    """Whether the node's agent has begun the exit barrier of the current round."""
    return entry.finished and entry.running is not None and entry.running == state.round_id


def is_presumed_here(node_id: str, state: State, listing: Listing, rules: Rules) -> bool:
    """Whether a participant that the listing lacks must still be taken for alive."""
    if node_id in state.lost or node_id in listing.withdrawn:
        return False
    watched = listing.started_at_seconds - listing.contact_since_seconds
    return watched < rules.liveness_window_seconds


def is_occupant(node_id: str, state: State, listing: Listing, rules: Rules) -> bool:
    """Whether a participant still holds the current round."""
    entry = listing.entry_of(node_id)
    if entry is None:
        return is_presumed_here(node_id, state, listing, rules)
    return not has_left(entry, state) and not has_finished(entry, state)


def has_settled(entry: RosterEntry, state: State) -> bool:
    """Whether a node that waits counts for the next round."""
    return not state.round or entry.settled or entry.left is not None


def is_ahead(entry: RosterEntry, state: State) -> bool:
    """Whether the node runs a round that the document does not know yet."""
    running = entry.running
    if running is None or entry.finished or running == state.proposal_id:
        return False
    if running.incarnation != state.incarnation:
        return running.incarnation not in state.replaces
    if running.round == state.round:
        return running.nonce != state.nonce
    return running.round > state.round


def is_bygone(entry: RosterEntry, state: State) -> bool:
    """Whether the node was in a round of a closed incarnation that this document has replaced: it
    belongs to the job before, and has no part in this one."""
    return any(
        round_id is not None and round_id.incarnation in state.replaces
        for round_id in (entry.left, entry.running)
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """A listing read against a state."""

    occupants: tuple[str, ...]
    presumed: tuple[str, ...]
    lost: tuple[str, ...]
    waiting: tuple[RosterEntry, ...]
    settling: bool
    """Somebody waits who does not count yet."""
    unproven: bool
    ahead: tuple[str, ...]
    somebody_finished: bool


def _see(state: State, listing: Listing, rules: Rules) -> _Seen:
    here = {present.entry.node.id: present.entry for present in listing.present}
    participants = set(state.participant_ids)
    occupants, presumed, lost = [], [], set(state.lost)
    for node_id in state.participant_ids:
        if is_occupant(node_id, state, listing, rules):
            occupants.append(node_id)
            if node_id not in here:
                presumed.append(node_id)
        elif node_id not in here:
            lost.add(node_id)
    held = set(occupants)
    here_and_free = [
        present.entry
        for present in listing.present
        if present.entry.running is None
        and not present.entry.finished
        and present.entry.node.id not in held
        and present.proven
    ]
    waiting = tuple(entry for entry in here_and_free if has_settled(entry, state))
    return _Seen(
        occupants=tuple(occupants),
        presumed=tuple(presumed),
        lost=tuple(sorted(lost)),
        waiting=waiting,
        settling=len(waiting) < len(here_and_free),
        unproven=any(not present.proven for present in listing.present),
        ahead=tuple(node_id for node_id, entry in here.items() if is_ahead(entry, state)),
        somebody_finished=any(
            node_id in participants and has_finished(entry, state)
            for node_id, entry in here.items()
        ),
    )


def reasons_to_rejoin(state: State, rules: Rules) -> int:
    """What ``num_nodes_waiting()`` is to show a participant of the current round: how many nodes
    make it worth forming a new one; 0 when it should go on.

    Lost participants count while enough nodes remain to go on, unless ``restart_on_node_loss`` is
    off: the workers of the others are blocked in a collective that will not return.
    """
    if state.closed is not None or not state.round:
        return 0
    if state.waiting:
        return state.waiting
    remaining = len(state.participants) - len(state.lost)
    if rules.restart_on_node_loss and state.lost and remaining >= rules.min_nodes:
        return len(state.lost)
    return 0


def is_parked(state: State, node_id: str, rules: Rules) -> bool:
    """Whether a waiting node is a spare of a full run: it has no join deadline."""
    if state.closed is not None or state.waiting or node_id in state.ranks:
        return False
    if state.proposal is not None:
        chosen = state.proposal.ranks
        return len(chosen) >= rules.max_nodes and node_id not in chosen
    return len(state.participants) - len(state.lost) >= rules.max_nodes


def restored(state: State | None, mine: State | None, refill: str) -> State | None:
    """The document to put back in place of ``state``, or None if nothing is to be put back.

    ``mine`` is the latest document that this node has read. A backend that came back empty or
    older is refilled by whoever knows better; anything else in it is newer than what we know.
    """
    if mine is None or not mine.round or mine.closed is not None:
        return None
    if state is not None and state.incarnation not in mine.replaces:
        if state.closed is not None or mine.incarnation in state.replaces:
            return None
        if state.incarnation == mine.incarnation:
            if state.round >= mine.round:
                return None
        elif state.round:
            return None
    return replace(mine, proposal=None, coordinator="", refill=refill)


def expels(state: State, running: RoundId) -> bool:
    """Whether the document tells a node that its round is over. (Not while ``restored`` gives
    something: then the document is the older one.)"""
    return state.round_id != running and running.incarnation not in state.replaces


def decide_running(state: State, listing: Listing | None, rules: Rules, me: Observer) -> Decision:
    """What a participant does that has returned from the barrier."""
    running = me.entry.running
    if running is None:
        raise ValueError("decide_running() is for nodes that run a round")
    if state.closed is not None or running.incarnation in state.replaces:
        return Decision(Act.CLOSED, "the run was closed; its participants go on")
    if expels(state, running):
        return Decision(Act.EXPELLED, "the run has gone on to another round")
    if me.id in state.lost:
        return Decision(Act.EXPELLED, "the others took this node for dead")
    if listing is None:
        return Decision(Act.WAIT)
    seen = _see(state, listing, rules)
    published = _published(state, seen, rules, me)
    wake_at = _presumption_ends(seen, listing, rules)
    if published is not None:
        return Decision(Act.SWAP, "the roster has changed", published, wake_at)
    return Decision(Act.WAIT, wake_at_seconds=wake_at)


def decide_waiting(
    state: State | None, listing: Listing | None, rules: Rules, me: Observer, now: float
) -> Decision:
    """What an announced node does inside the barrier."""
    if state is None:
        if me.live_count > 1 and now < me.creates_at_seconds:
            why = "the node that was here first writes the run's first document"
            return Decision(Act.WAIT, why, wake_at_seconds=me.creates_at_seconds)
        created = State(incarnation=me.nonce, coordinator=me.id)
        return Decision(Act.SWAP, "the run has no document yet", created)
    if state.closed is not None:
        if state.closed.ended_well:
            return Decision(Act.ENDED_WELL, state.closed.reason)
        return Decision(Act.CLOSED, state.closed.reason)
    if is_bygone(me.entry, state):
        return Decision(Act.CLOSED, "its run id is in use anew")
    running = me.entry.running
    if running is not None and running == state.round_id and me.id not in state.lost:
        return Decision(Act.RETURN, "the round is final")
    if running is not None and running != state.proposal_id:
        return Decision(Act.RETRACT, "the proposed round was dropped")
    if state.rank_of(me.id) is not None and not has_left(me.entry, state):
        return Decision(Act.LEAVE, "this node has left the round that the document has again")
    if running is None and state.proposal is not None and me.id in state.proposal.ranks:
        return Decision(Act.CONFIRM, "this node was chosen")
    if state.coordinator != me.id:
        if state.coordinator and me.coordinator_live:
            why = f"{me.live_count} nodes are here, and {state.coordinator} forms the round"
            return Decision(Act.WAIT, why)
        if not has_settled(me.entry, state):
            interval = rules.keep_alive_interval_seconds
            why = (
                f"round {state.round} runs; a newcomer counts once it has waited for {interval:g} s"
            )
            return Decision(Act.WAIT, why)
        claimed = replace(state, coordinator=me.id, notice_age_seconds=notice_age(state, rules, me))
        return Decision(Act.SWAP, "nobody forms the round", claimed)
    return _coordinate(state, listing, rules, me, now)


def _coordinate(
    state: State, listing: Listing | None, rules: Rules, me: Observer, now: float
) -> Decision:
    if not state.round and state.proposal is None and me.live_count < rules.min_nodes:
        return Decision(Act.WAIT, f"{me.live_count} of at least {rules.min_nodes} nodes are here")
    if listing is None or not me.listing_is_current:
        return Decision(Act.LIST, minimum_since_seconds=me.minimum_since_seconds)
    seen = _see(state, listing, rules)
    if state.proposal is not None:
        return _complete(state, listing, seen, rules, me)
    enough = len(seen.waiting) >= rules.min_nodes
    since = (
        (now if me.minimum_since_seconds is None else me.minimum_since_seconds) if enough else None
    )
    wake_at = _presumption_ends(seen, listing, rules)
    if seen.occupants:
        published = _published(state, seen, rules, me)
        if published is not None:
            return Decision(Act.SWAP, "the roster has changed", published, wake_at, since)
        held = f"{_names(seen.occupants)} still in round {state.round}"
        return Decision(Act.WAIT, held, None, wake_at, since)
    if seen.ahead:
        why = f"{seen.ahead[0]} knows a later round and will tell it"
        return Decision(Act.WAIT, why, None, wake_at, since)
    if seen.unproven:
        why = "some nodes have not yet shown that they are alive"
        return Decision(Act.WAIT, why, None, wake_at, since)
    if since is None:
        here = _names([entry.node.id for entry in seen.waiting])
        why = f"{len(seen.waiting)} of at least {rules.min_nodes} nodes are waiting ({here})"
        return Decision(Act.WAIT, why)
    return _freeze(state, listing, seen, rules, me, now, since)


def _freeze(
    state: State,
    listing: Listing,
    seen: _Seen,
    rules: Rules,
    me: Observer,
    now: float,
    since: float,
) -> Decision:
    """Nobody holds the last round, and there are enough nodes: fix the next one's participants
    once nobody more can be admitted, or the last call is over.

    The last call runs from when the minimum was reached, even while the last round was still
    held: whoever held it was a former member and is here now, or is lost. It lasts long enough for
    a newcomer that came with the others to settle, or the next round would be formed without it.
    """
    former = set(state.participant_ids)
    candidates = sorted(seen.waiting, key=lambda entry: entry.node.id not in former)
    last_call = rules.last_call_seconds
    if seen.settling:
        last_call = max(last_call, rules.keep_alive_interval_seconds + SETTLING_MARGIN_SECONDS)
    freeze_at = since if len(candidates) >= rules.max_nodes else since + last_call
    freeze_at = max(freeze_at, me.quiet_until_seconds)
    if now < freeze_at:
        count = f"last call: {len(candidates)} of at most {rules.max_nodes} nodes are waiting"
        return Decision(Act.WAIT, count, wake_at_seconds=freeze_at, minimum_since_seconds=since)
    if now - listing.started_at_seconds > rules.keep_alive_interval_seconds:
        return Decision(Act.LIST, minimum_since_seconds=since)
    chosen = candidates[: rules.max_nodes]
    ranked = assign_ranks(chosen, state.participants, rules.rank_order)
    frozen = replace(
        state,
        proposal=Proposal(me.nonce, ranked),
        lost=seen.lost,
        notice_age_seconds=notice_age(state, rules, me),
    )
    why = f"{len(chosen)} nodes form round {state.round + 1}"
    return Decision(Act.SWAP, why, frozen, minimum_since_seconds=since)


def _complete(state: State, listing: Listing, seen: _Seen, rules: Rules, me: Observer) -> Decision:
    """A round is frozen: make it final, or drop it."""
    proposal, proposal_id = state.proposal, state.proposal_id
    assert proposal is not None
    assert proposal_id is not None
    since = me.minimum_since_seconds
    dropped = replace(state, proposal=None, notice_age_seconds=notice_age(state, rules, me))
    if seen.occupants:
        why = f"{seen.occupants[0]} still holds the last round"
        return Decision(Act.SWAP, why, dropped)
    missing = []
    for node in proposal.participants:
        entry = listing.entry_of(node.id)
        if entry is None:
            if not is_presumed_here(node.id, state, listing, rules):
                why = f"{node.id} was gone before the round was complete"
                return Decision(Act.SWAP, why, dropped, minimum_since_seconds=since)
            missing.append(node.id)
        elif entry.running != proposal_id:
            if entry.running is not None or entry.left == proposal_id or entry.finished:
                why = f"{node.id} has left the proposal"
                return Decision(Act.SWAP, why, dropped, minimum_since_seconds=since)
            missing.append(node.id)
    if missing:
        wake_at = listing.contact_since_seconds + rules.liveness_window_seconds
        unconfirmed = any(listing.entry_of(node_id) is None for node_id in missing)
        return Decision(
            Act.WAIT,
            f"{len(missing)} of {len(proposal.participants)} nodes have yet to confirm",
            wake_at_seconds=wake_at if unconfirmed else None,
            minimum_since_seconds=since,
        )
    if seen.ahead:
        return Decision(Act.WAIT, f"{seen.ahead[0]} knows a later round and will tell it")
    chosen = {node.id for node in proposal.participants}
    spares = [entry.node.id for entry in seen.waiting if entry.node.id not in chosen]
    server = listing.entry_of(proposal.participants[0].id)
    final = State(
        incarnation=state.incarnation,
        round=state.round + 1,
        nonce=proposal.nonce,
        participants=proposal.participants,
        port=server.port if server is not None else 0,
        coordinator=spares[0] if spares else "",
        refill=state.refill,
        replaces=state.replaces,
    )
    return Decision(Act.SWAP, f"all {len(chosen)} nodes have confirmed", final)


def _names(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:4])
    return shown if len(ids) <= 4 else f"{shown} and {len(ids) - 4} more"


def _published(state: State, seen: _Seen, rules: Rules, me: Observer) -> State | None:
    """The document as it should read while the round is held; None if it reads so already."""
    waiting = seen.waiting
    if seen.somebody_finished:
        former = set(state.participant_ids)
        waiting = tuple(entry for entry in waiting if entry.node.id in former)
    count = max(0, min(len(waiting), rules.max_nodes - len(seen.occupants)))
    age = notice_age(state, rules, me)
    too_late_to_retract = not count and age > rules.keep_alive_interval_seconds
    if (count > 0) == (state.waiting > 0) or too_late_to_retract:
        count = state.waiting
    if count == state.waiting and seen.lost == state.lost:
        return None
    return replace(state, waiting=count, lost=seen.lost, notice_age_seconds=age)


def notice_age(state: State, rules: Rules, me: Observer) -> float:
    """``notice_age_seconds`` for a document written now over ``state``."""
    return me.notice_age_seconds if reasons_to_rejoin(state, rules) else 0.0


def _presumption_ends(seen: _Seen, listing: Listing, rules: Rules) -> float | None:
    if not seen.presumed:
        return None
    return listing.contact_since_seconds + rules.liveness_window_seconds
