"""What must never be seen, whatever the scenario: the invariants of DESIGN.md, section 3.

The checkers know the truth of the simulated world: who was really in contact, who has really left.
Each is told of the events it has a method for, and raises :class:`Violation`.

*In contact* is this: less than a liveness window has passed since a request last kept the node's
entry alive (nearly: clocks are up to 5 % fast). The time for which the backend was down does not
count, unless the node was besides kept from asking.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sim.agent import Agent, Job
from sim.host import Host
from sim.world import World

from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from rdzv.state import RosterEntry, RoundId, State

CLOCK_ERROR = 0.05
TOLERANCE_SECONDS = 0.3
"""For messages on their way."""
DEADLINE_TOLERANCE_SECONDS = 5.0
"""A join may end this much after its deadline: one request and its timeout."""


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


def in_contact(world: World, host: Host) -> bool:
    """Whether nobody may take this host for dead now."""
    if not host.alive or world.now - host.returned_at < returning_seconds(world):
        return False
    silent = world.now - host.alive_at
    if host.undisturbed:
        silent -= world.down_seconds(host.alive_at)
    window = world.rules.liveness_window_seconds
    return silent < window * (1.0 - CLOCK_ERROR) - TOLERANCE_SECONDS


def returning_seconds(world: World) -> float:
    """For how long after its return a node may still be met by what was decided before: a freeze
    rests on a listing that was begun at most one keep-alive interval ago, and takes a request."""
    return 1.1 * world.rules.keep_alive_interval_seconds + 2.5


def told(state: State) -> object:
    """What the nodes that return from the barrier go by."""
    return state.participants, state.port


class Agreement:
    """Invariant 1, and of 2 that a round once final is what it is."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        self.finals: dict[RoundId, State] = {}
        self.nonces: dict[str, RoundId] = {}
        self.confirmed: dict[RoundId, set[str]] = defaultdict(set)
        self.returned: dict[str, RoundId] = {}

    def on_announce(self, host: Host, entry: RosterEntry) -> None:
        if entry.running is not None:
            self.confirmed[entry.running].add(host.name)

    def on_write(self, host: Host, before: State | None, after: State) -> None:
        round_id = after.round_id
        if round_id is None or round_id in self.finals:
            return
        rules = self.world.rules
        self.finals[round_id] = after
        known = self.nonces.setdefault(after.nonce, round_id)
        if known != round_id:
            raise Violation("1 agreement", f"{known} and {round_id} have the same nonce")
        ids = set(after.participant_ids)
        if not rules.min_nodes <= len(ids) <= rules.max_nodes:
            raise Violation("1 agreement", f"{round_id} has {len(ids)} participants")
        if before is not None and before.participants:
            self._check_rank_zero(before, after)
        unconfirmed = ids - self.confirmed[round_id]
        if unconfirmed:
            raise Violation("1 agreement", f"{sorted(unconfirmed)} never confirmed {round_id}")

    def _check_rank_zero(self, before: State, after: State) -> None:
        """A newcomer without a checkpoint must not broadcast its weights."""
        survivors = set(before.participant_ids) & set(after.participant_ids)
        if survivors and after.participants[0].id not in survivors:
            raise Violation("1 agreement", f"rank 0 of {after.round_id} is no survivor")

    def on_returned(self, agent: Agent, final: State | None, error: Exception | None) -> None:
        if final is None:
            return
        round_id = final.round_id
        assert round_id is not None
        first = self.finals.get(round_id)
        if first is None or told(first) != told(final):
            raise Violation("1 agreement", f"{agent.name} returned another {round_id}")
        if agent.name not in final.participant_ids:
            raise Violation("1 agreement", f"{agent.name} is not in the round it returned with")
        if self.returned.get(agent.name) == round_id:
            raise Violation("1 agreement", f"{agent.name} returned with {round_id} again")
        self.returned[agent.name] = round_id


class Exclusivity:
    """Invariants 2 and 4: nobody in contact is passed over, expelled or called dead."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        self.withdrawn: set[str] = set()
        self.named: set[tuple[RoundId, str]] = set()
        self.rounds: set[RoundId | None] = set()

    def on_withdraw(self, host: Host, effect: Any) -> None:
        self.withdrawn.add(host.name)

    def on_write(self, host: Host, before: State | None, after: State) -> None:
        """The stated gap: what was right when it was sent may be overtaken on a long way."""
        for node_id in after.lost:
            assert after.round_id is not None
            if (after.round_id, node_id) not in self.named and not host.is_late:
                self._require_gone(node_id, f"{host.name} named {node_id} lost")
            self.named.add((after.round_id, node_id))
        is_new = after.round_id is not None and after.round_id not in self.rounds
        self.rounds.add(after.round_id)
        if is_new and not host.is_late:
            self._check_nobody_is_passed_over(after)

    def _require_gone(self, node_id: str, what: str) -> None:
        agent = self.job.agents[node_id]
        if node_id in self.withdrawn or agent.phase in ("leaving", "done"):
            return
        if in_contact(self.world, agent.host):
            silent = self.world.now - agent.host.alive_at
            raise Violation("4 nobody is expelled", f"{what}, which was silent for {silent:.2f} s")

    def _check_nobody_is_passed_over(self, after: State) -> None:
        for agent in self.job.agents.values():
            running = agent.session.entry.running
            runs = agent.phase == "running" and running is not None
            if not runs or agent.round_id == after.round_id or agent.name in self.withdrawn:
                continue
            if agent.session.overtaken or agent.session.run_closed:
                continue
            if not in_contact(self.world, agent.host):
                continue
            if self._is_stated_gap(after):
                continue
            raise Violation(
                "2 exclusivity", f"{agent.name} runs {running} while {after.round_id} was formed"
            )

    def _is_stated_gap(self, after: State) -> bool:
        """Brand-new nodes alone on an empty backend, or an older copy of the roster too, until the
        others' next beat finds out."""
        interval = self.world.rules.keep_alive_interval_seconds
        soon = self.world.now - 2.0 * interval - 4.0
        if self.world.recently_rolled_back():
            return True
        is_new = all(self.job.agents[name].round_id is None for name in after.participant_ids)
        if is_new and any(moment > soon for moment in self.world.emptied_at):
            self.world.gap_incarnations.add(after.incarnation)
        return after.incarnation in self.world.gap_incarnations


class Closings:
    """Invariants 6 and 7: who closes, and what is left of a closed incarnation."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        self.may_close: set[str] = set()
        self.closed_at: dict[str, float] = {}
        self.members: dict[str, set[str]] = defaultdict(set)

    def on_data_lost(self) -> None:
        """That the run was closed may be forgotten with everything else."""
        self.closed_at.clear()

    def on_set_closed(self, agent: Agent) -> None:
        self.may_close.add(agent.name)

    def on_announce(self, host: Host, entry: RosterEntry) -> None:
        """A node that arrives in a closed run never announces."""
        document = self.world.document()
        if document is None or document.closed is None or host.is_late:
            return
        agent = self.job.agents[host.name]
        closed_at = self.closed_at.get(document.incarnation, self.world.now)
        if agent.phase == "joining" and agent.join_began_at > closed_at:
            raise Violation("7 run id again", f"{agent.name} announced itself in a closed run")

    def on_write(self, host: Host, before: State | None, after: State) -> None:
        if before is not None and before.closed is not None:
            self._check_successor(host, before, after)
        if after.closed is not None and (before is None or before.closed is None):
            self.closed_at[after.incarnation] = self.world.now
            self._check_closer(host, before, after)
        if after.round_id is not None:
            self.members[after.incarnation] |= set(after.participant_ids)

    def _check_closer(self, host: Host, before: State | None, after: State) -> None:
        if host.name in self.may_close:
            return
        ids = before.participant_ids if before is not None else ()
        agent = self.job.agents[host.name]
        is_member = before is not None and agent.round_id == before.round_id
        if host.name not in ids or not is_member:
            raise Violation("6 closing is for members", f"{host.name} closed {after.incarnation}")
        assert after.closed is not None
        this = self.job.rounds[agent.round_id] if agent.round_id is not None else None
        if after.closed.ended_well and (this is None or this.finished != set(ids)):
            raise Violation("6 closing is for members", "a run ended well that has not")

    def _check_successor(self, host: Host, before: State, after: State) -> None:
        if after.incarnation == before.incarnation:
            raise Violation("7 run id again", f"{host.name} changed a closed document")
        grace = self.world.rules.closed_grace_seconds
        age = self.world.now - self.closed_at.get(before.incarnation, -1e9)
        least = grace if self.world.kind not in ("ageless", "bare") else grace * (1.0 - CLOCK_ERROR)
        if age < least - 1e-6:
            raise Violation("7 run id again", f"a closed run was replaced after {age:.2f} s")

    def on_returned(self, agent: Agent, final: State | None, error: Exception | None) -> None:
        if final is None:
            return
        assert final.round_id is not None
        if final.incarnation in self.closed_at:
            first = self.job.rounds.get(final.round_id)
            if first is None and self.world.now - self.closed_at[final.incarnation] > 30:
                raise Violation("7 run id again", f"{agent.name} entered a closed incarnation")
        for incarnation in final.replaces:
            if agent.name in self.members[incarnation]:
                raise Violation("7 run id again", f"{agent.name} came from {incarnation}")


class Deadlines:
    """Invariant 8, and that a join fails only with what is true."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        self.parked_since: dict[str, float] = {}

    def on_returned(self, agent: Agent, final: State | None, error: Exception | None) -> None:
        if error is None:
            return
        world, host = self.world, agent.host
        if isinstance(error, RendezvousTimeoutError):
            least = host.true_seconds(agent.job.settings.join_timeout_seconds)
            if world.now - agent.join_began_at < least - 0.01:
                raise Violation("8 deadlines", f"{agent.name} timed out too early")
            if self.parked_since.get(agent.name, world.now) < world.now - 10.0:
                raise Violation("8 deadlines", f"{agent.name} timed out although it was parked")
        elif isinstance(error, RendezvousGracefulExitError):
            if not _was_closed(world, ended_well=True):
                raise Violation("8 deadlines", f"{agent.name}: {error}")
        elif isinstance(error, RendezvousClosedError):
            if not _was_closed(world):
                raise Violation("8 deadlines", f"{agent.name}: {error}")
        elif isinstance(error, RendezvousConnectionError):
            budget = host.true_seconds(agent.job.settings.outage_timeout_seconds)
            if world.now - max(host.alive_at, agent.join_began_at) < budget * 0.9:
                raise Violation("8 deadlines", f"{agent.name} gave up early: {error}")
        else:
            raise Violation("8 deadlines", f"{agent.name} failed: {error!r}") from error

    def check_now(self) -> None:
        """Called every few seconds: nobody sits in a join beyond its deadline."""
        self._see_who_is_parked()
        for agent in self.job.live_agents():
            session, host = agent.session, agent.host
            if agent.phase != "joining" or host.paused_until > self.world.now - 1.0:
                continue
            if session.parked or session.deadline is None:
                continue
            limit = agent.job.settings.join_timeout_seconds
            late = host.true_seconds(host.clock() - session.deadline)
            late = min(late, self.world.now - agent.join_began_at - host.true_seconds(limit))
            if late > DEADLINE_TOLERANCE_SECONDS:
                raise Violation("8 deadlines", f"{agent.name} is {late:.1f} s over its deadline")

    def _see_who_is_parked(self) -> None:
        """Who has been surplus to a full run without a break since when."""
        document, rules = self.world.document(), self.world.rules
        full = (
            document is not None
            and self.world.now - self.world.disturbed_at > 2.0 * rules.liveness_window_seconds
            and document.closed is None
            and not document.waiting
            and not document.lost
            and len(document.participants) == rules.max_nodes
        )
        for agent in self.job.live_agents():
            if full and document is not None and agent.name not in document.participant_ids:
                self.parked_since.setdefault(agent.name, self.world.now)
            else:
                self.parked_since.pop(agent.name, None)


def _was_closed(world: World, *, ended_well: bool = False) -> bool:
    document = world.document()
    if document is None or document.closed is None:
        return bool(document is not None and document.replaces)
    return document.closed.ended_well or not ended_well


ALL = (Agreement, Exclusivity, Closings, Deadlines)
