"""How nodes must conduct themselves: when they disturb their workers, and what they may cost.

As in ``sim.checkers``, each checker is told of the events it has a method for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from sim.agent import Agent, Job
from sim.checkers import Violation, in_contact
from sim.host import Host
from sim.world import World

from rdzv.errors import RendezvousConnectionError
from rdzv.machine import reasons_to_rejoin
from rdzv.state import RosterEntry, RoundId, State

NOTICE_TOLERANCE_SECONDS = 0.05
ATTEMPTS_MAX_PER_ROUND = 25
"""Of one node, lost races and takeovers included."""
WAITS_MAX = 300
"""Of one node between two checks."""
DATED = ("push", "poll")
"""The kinds of backends that know the age of the document."""


class Notices:
    """Invariant 5: a reason to stop is a true one."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        self.positive: dict[str, bool] = {}
        self.rounds: list[RoundId] = []
        self.lost: set[tuple[RoundId | None, str]] = set()
        self.ghost_at = -1e9

    def on_announce(self, host: Host, entry: RosterEntry) -> None:
        """The stated gap: what a node has said before it left may arrive after it has."""
        if host.is_late:
            self.ghost_at = self.world.now

    def on_write(self, host: Host, before: State | None, after: State) -> None:
        if after.round_id is not None and after.round_id not in self.rounds:
            self.rounds.append(after.round_id)
        self.lost |= {(after.round_id, node_id) for node_id in after.lost}

    def on_join(self, agent: Agent) -> None:
        self.positive[agent.name] = False

    def on_notice(self, agent: Agent) -> None:
        session = agent.session
        if session.run_closed and session.notice.count:
            raise Violation("7 run id again", f"{agent.name} is disturbed in a closed run")
        assert agent.round_id is not None
        in_gap = agent.round_id.incarnation in self.world.gap_incarnations
        is_newest = agent.round_id == self.rounds[-1] and not in_gap
        if session.overtaken and is_newest and (agent.round_id, agent.name) not in self.lost:
            raise Violation(
                "5 running workers outlive the backend",
                f"{agent.name} is expelled, and {agent.round_id} is the newest round",
            )
        if not session.notice.count:
            self.positive[agent.name] = False
            return
        if session.overtaken or self.positive.get(agent.name):
            return
        self.positive[agent.name] = True
        assert agent.round_id is not None
        if not self._has_cause(agent):
            raise Violation(
                "5 running workers outlive the backend",
                f"{agent.name} is told to re-join {agent.round_id} for no reason: "
                f"{session.state and session.state.waiting} waiting, "
                f"lost {session.state and session.state.lost}",
            )

    def _has_cause(self, agent: Agent) -> bool:
        """Somebody of the round has gone or stopped, or somebody new would be admitted."""
        assert agent.round_id is not None
        this, now = self.job.rounds[agent.round_id], self.world.now
        for node_id in this.final.participant_ids:
            peer = self.job.agents[node_id]
            if peer.round_id != agent.round_id or peer.phase != "running":
                return True
            if not in_contact(self.world, peer.host) or peer.session.run_closed:
                return True
        if len(this.final.participants) >= self.world.rules.max_nodes:
            return False
        recent = 2.0 * self.world.rules.keep_alive_interval_seconds + 5.0
        if now - self.ghost_at < self.world.rules.liveness_window_seconds + recent:
            return True
        return any(
            peer.phase == "joining" or now - peer.left_barrier_at < recent
            for peer in self.job.agents.values()
            if peer.name not in this.final.participant_ids
        )

    def on_fatal(self, agent: Agent, error: Exception) -> None:
        host, world = agent.host, self.world
        budget = host.true_seconds(agent.job.settings.outage_timeout_seconds)
        if not isinstance(error, RendezvousConnectionError):
            raise Violation("5 running workers outlive the backend", f"{agent.name}: {error!r}")
        if world.now - host.alive_at < budget * 0.9:
            raise Violation(
                "5 running workers outlive the backend",
                f"{agent.name} fails after {world.now - host.alive_at:.1f} s without an answer",
            )


class Together:
    """Invariant 11: all runners of a round hear of a change at the same moment."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        self.moments: dict[tuple[RoundId | None, str], float] = {}
        self.judged: set[RoundId | None] = set()

    def on_notice(self, agent: Agent) -> None:
        notice = agent.session.notice
        key = (agent.round_id, agent.name)
        if notice.count:
            self.moments[key] = agent.host.true_moment(notice.at_seconds)
        else:
            self.moments.pop(key, None)

    def on_act(self, agent: Agent) -> None:
        world, round_id = self.world, agent.round_id
        if world.kind not in DATED or world.weather.loss or world.weather.late:
            return
        calm = world.now - world.disturbed_at > 2.0 * world.rules.liveness_window_seconds
        if agent.session.overtaken or round_id in self.judged or not calm:
            return
        self.judged.add(round_id)
        first = self.moments[round_id, agent.name]
        peers = [p for p in self.job.agents.values() if p.round_id == round_id]
        runners = [p for p in peers if p.phase == "running" and p is not agent]
        tolerance = NOTICE_TOLERANCE_SECONDS + 10.0 * world.weather.delay_seconds
        world.after(tolerance, lambda: self._judge(round_id, first, runners, tolerance))

    def _judge(
        self, round_id: RoundId | None, first: float, runners: list[Agent], tolerance: float
    ) -> None:
        for peer in runners:
            moment = self.moments.get((round_id, peer.name))
            still = peer.phase == "running" and peer.round_id == round_id
            if not in_contact(self.world, peer.host) or (moment is None and not still):
                continue
            if moment is None or abs(moment - first) > tolerance:
                late = "never" if moment is None else f"{moment - first:+.3f} s later"
                raise Violation("11 agents hear together", f"{peer.name} hears it {late}")


class Recovery:
    """Survivors re-join in time after a peer is lost, although their workers hang; and a backend
    that came back empty or older is refilled."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job

    def on_crash(self, agent: Agent) -> None:
        self._watch_survivors(agent, self.world.rules.liveness_window_seconds)

    def on_exit(self, agent: Agent) -> None:
        """Who says goodbye is missed at once."""
        self._watch_survivors(agent, 0.0)

    def _watch_survivors(self, agent: Agent, window: float) -> None:
        world, rules = self.world, self.world.rules
        if agent.phase != "running" or world.weather.loss or world.weather.late:
            return
        if not rules.restart_on_node_loss or agent.round_id not in self.job.rounds:
            return
        this = self.job.rounds[agent.round_id]
        others = [name for name in this.final.participant_ids if name != agent.name]
        if sum(self._runs(name, agent) for name in others) < rules.min_nodes:
            return
        listers = this.final.participant_ids[:3]
        listens = [name for name in listers if name != agent.name and self._runs(name, agent)]
        seconds = window + 2.0 * rules.keep_alive_interval_seconds + 1.0
        if not listens:
            seconds += rules.liveness_window_seconds + rules.keep_alive_interval_seconds
        crashed_at = world.now
        world.after(1.06 * seconds + 0.5, lambda: self._judge(agent.round_id, crashed_at, seconds))

    def _runs(self, name: str, with_agent: Agent) -> bool:
        peer = self.job.agents[name]
        runs = peer.phase == "running" and peer.round_id == with_agent.round_id
        return runs and in_contact(self.world, peer.host)

    def _judge(self, round_id: RoundId | None, crashed_at: float, seconds: float) -> None:
        if self.world.disturbed_at > crashed_at or self.world.down_seconds(crashed_at - 1.0):
            return
        for peer in self.job.live_agents():
            if peer.session.run_closed or not in_contact(self.world, peer.host):
                continue
            if peer.phase == "running" and peer.round_id == round_id:
                raise Violation(
                    "recovery", f"{peer.name} still runs {round_id} {seconds:.1f} s after a loss"
                )

    def check_now(self) -> None:
        world, interval = self.world, self.world.rules.keep_alive_interval_seconds
        patience = 3.0 * interval + 8.0
        if not world.up or world.now - world.disturbed_at < patience:
            return
        document = world.document()
        for agent in self.job.live_agents():
            running = agent.session.entry.running
            session = agent.session
            if agent.phase != "running" or running is None:
                continue
            if session.overtaken or session.run_closed:
                continue
            if not in_contact(world, agent.host) or agent.entered_at > world.now - patience:
                continue
            older = document is None or (not document.round and document.closed is None)
            if document is not None and document.incarnation == running.incarnation:
                older = document.round < running.round
            if older and running.incarnation not in (document.replaces if document else ()):
                raise Violation("5 a backend is refilled", f"{agent.name} runs {running}")


class Costs:
    """Invariant 10: every write has its reason, a published reason stands, nobody asks often."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        self.attempts: dict[str, int] = defaultdict(int)
        self.writes = 0
        self.told_at: dict[RoundId | None, float] = {}
        self.changed_at = 0.0
        self.requests: dict[str, tuple[float, int]] = {}
        self.waits: dict[str, int] = {}

    def on_join(self, agent: Agent) -> None:
        self.changed_at = self.world.now

    def on_attempt(self, host: Host, swapped: bool) -> None:
        self.attempts[host.name] += 1
        if self.attempts[host.name] > ATTEMPTS_MAX_PER_ROUND:
            raise Violation("10 cost", f"{host.name} tried to write too often")

    def on_data_lost(self) -> None:
        self.told_at.clear()

    def on_announce(self, host: Host, *_: object) -> None:
        self.changed_at = self.world.now

    def on_withdraw(self, host: Host, *_: object) -> None:
        self.changed_at = self.world.now

    def on_write(self, host: Host, before: State | None, after: State) -> None:
        self.writes += 1
        self.changed_at = self.world.now
        if before is None or before.round_id != after.round_id:
            self.attempts.clear()
            self.told_at[after.round_id] = self.world.now
        if before is None or before.closed is not None or after.closed is not None:
            return
        if replace(before, notice_age_seconds=0.0) == replace(after, notice_age_seconds=0.0):
            raise Violation("10 cost", f"{host.name} wrote what was there")
        if before.round_id != after.round_id or before.proposal != after.proposal:
            return
        if before.coordinator != after.coordinator:
            self._check_claim(host, before)
        elif before.waiting and after.waiting and before.lost == after.lost:
            raise Violation("10 cost", f"{host.name} published a number that says nothing new")
        self._check_that_reasons_stand(host, before, after)

    def _check_claim(self, host: Host, before: State) -> None:
        peer = self.job.agents.get(before.coordinator)
        if peer is None or peer.phase != "joining" or host.is_late:
            return
        is_new = peer.host.arrived_at > self.world.now - 5.0
        is_here = in_contact(self.world, peer.host) and not is_new
        if is_here and not self.world.recently_troubled():
            raise Violation("10 cost", f"{host.name} took over from {peer.name}, which was here")

    def _check_that_reasons_stand(self, host: Host, before: State, after: State) -> None:
        rules, now, round_id = self.world.rules, self.world.now, after.round_id
        told, tells = reasons_to_rejoin(before, rules), reasons_to_rejoin(after, rules)
        if not set(before.lost) <= set(after.lost):
            raise Violation("11 agents hear together", f"{host.name} took back who is lost")
        if tells and not told:
            self.told_at[round_id] = now
        elif told and not tells and before.lost == after.lost and self.world.kind in DATED:
            if host.is_late:
                return
            age = now - self.told_at.get(round_id, now)
            if age > 1.05 * rules.keep_alive_interval_seconds + 0.8:
                raise Violation("11 agents hear together", f"taken back after {age:.1f} s")

    def check_now(self) -> None:
        """When nothing has changed for long, everybody only beats. Nobody ever spins."""
        for agent in self.job.live_agents():
            waits = agent.host.waits - self.waits.get(agent.name, 0)
            self.waits[agent.name] = agent.host.waits
            if waits > WAITS_MAX:
                raise Violation("10 cost", f"{agent.name} waits in a loop: {waits} times")
        world, window = self.world, self.world.rules.liveness_window_seconds
        quiet = world.now - max(world.disturbed_at, self.changed_at) > 3.0 * window
        if not quiet or world.kind == "bare" or world.weather.loss or world.weather.late:
            self.requests.clear()
            return
        for agent in self.job.live_agents():
            if agent.phase not in ("joining", "running"):
                continue
            began, count = self.requests.setdefault(agent.name, (world.now, agent.host.requests))
            seconds = (world.now - began) * agent.host.clock_rate
            most = seconds / world.rules.keep_alive_interval_seconds + 1.0
            if agent.host.requests - count > most:
                raise Violation("10 cost", f"{agent.name} asks more than once an interval")


ALL = (Notices, Together, Recovery, Costs)
