"""A torchrun agent as the simulation runs it: join, work, look at the notice, join again, finish.

The workers are only as real as the protocol needs: a round works while all its participants do;
when one of them stops, the others' workers die of it or hang, as the scenario says; when a round
has worked for long enough in one piece, the job is done.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

from sim.host import Host
from sim.world import World

from rdzv.effects import Session, Withdraw
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.protocol import close, finish, give_up, join
from rdzv.running import keep_alive
from rdzv.state import Node, RosterEntry, RoundId, State

POLL_SECONDS = 0.1
BARRIER_TIMEOUT_SECONDS = 60.0
CLOSE_TIMEOUT_SECONDS = 10.0
RETRY_SECONDS = 0.2


@dataclass(slots=True)
class JobSettings:
    """What the agents of a job have in common."""

    join_timeout_seconds: float = 600.0
    outage_timeout_seconds: float = 600.0
    work_seconds: float = float("inf")
    """How long a round has to work in one piece until the job is done."""
    workers_die: float = 0.5
    """Probability that workers die when a peer's have stopped, instead of hanging."""
    fails_at_the_end: float = 0.0
    """Probability that workers fail when those of their peers have just succeeded."""


@dataclass(slots=True)
class Round:
    """What is true of one round, whoever knows it."""

    final: State
    running: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    whole_at: float | None = None


class Job:
    """All agents of a run, and the rounds they work in."""

    def __init__(self, world: World, settings: JobSettings) -> None:
        self.world = world
        self.settings = settings
        self.agents: dict[str, Agent] = {}
        self.rounds: dict[RoundId, Round] = {}
        self._names = itertools.count()

    def start_agent(self, address: str = "") -> Agent:
        """A new agent process on a new machine (or on an old one, by its address)."""
        rng, number = self.world.rng, next(self._names)
        offset, rate = rng.uniform(1e3, 1e5), rng.uniform(0.95, 1.05)
        backend = self.world.connect(lambda: offset + rate * self.world.now)
        timeout = min(2.0, self.world.rules.keep_alive_interval_seconds)
        host = Host(self.world, f"n{number}", offset, rate, backend, timeout)
        agent = Agent(self, host, address or f"node{number}")
        self.world.hosts[host.name] = host
        self.agents[host.name] = agent
        agent.begin_join()
        return agent

    def live_agents(self) -> list[Agent]:
        """Those whose process is there and has a part in the run."""
        return [a for a in self.agents.values() if a.host.alive and a.phase != "done"]

    def entered(self, agent: Agent, final: State) -> None:
        """An agent has returned from the barrier and starts its workers."""
        round_id = final.round_id
        assert round_id is not None
        this = self.rounds.setdefault(round_id, Round(final))
        this.running.add(agent.name)
        if this.running == set(final.participant_ids) and not this.stopped:
            this.whole_at = self.world.now
            self.world.after(self.settings.work_seconds, lambda: self._work_done(this))
        elif this.stopped:
            self._die_with_peers(agent, this)

    def stopped(self, agent: Agent) -> None:
        """An agent's workers have stopped before their work was done."""
        this = self.rounds.get(agent.round_id) if agent.round_id is not None else None
        if this is None or agent.name in this.stopped | this.finished:
            return
        this.stopped.add(agent.name)
        this.whole_at = None
        for name in sorted(this.running - this.stopped - this.finished):
            self._die_with_peers(self.agents[name], this)

    def _die_with_peers(self, agent: Agent, this: Round) -> None:
        rng = self.world.rng
        if rng.random() < self.settings.workers_die:
            round_id = this.final.round_id
            agent.host.after(rng.uniform(0.02, 1.0), lambda: agent.workers_fail(round_id))

    def _work_done(self, this: Round) -> None:
        if this.whole_at is None or this.stopped:
            return
        for name in sorted(this.running):
            agent, rng = self.agents[name], self.world.rng
            fails = rng.random() < self.settings.fails_at_the_end
            end = agent.workers_fail if fails else agent.workers_succeed
            seconds = rng.uniform(0.0, 1.5)
            agent.host.after(seconds, functools.partial(end, this.final.round_id))

    def succeeded(self, agent: Agent) -> None:
        """An agent's workers have done their work."""
        assert agent.round_id is not None
        self.rounds[agent.round_id].finished.add(agent.name)

    def barrier_is_over(self, agent: Agent) -> bool:
        """Whether all participants of the agent's round have reached the exit barrier."""
        assert agent.round_id is not None
        this = self.rounds[agent.round_id]
        return this.finished == set(this.final.participant_ids)


class Agent:
    """One agent process. ``phase`` is one of joining, running, finishing, leaving, done."""

    def __init__(self, job: Job, host: Host, address: str) -> None:
        self.job, self.host, self.world = job, host, job.world
        rng = self.world.rng
        self.session = Session(
            rules=self.world.rules,
            entry=RosterEntry(Node(host.name, address)),
            unique=f"u{host.name}",
            clock=host.clock,
            jitter=lambda most: rng.uniform(most / 2, most),
            outage_timeout_seconds=job.settings.outage_timeout_seconds,
            proves_life_by_beats=self.world.kind == "bare",
        )
        self.phase = "joining"
        self.round_id: RoundId | None = None
        self.joins = 0
        self.join_began_at = 0.0
        self.left_barrier_at = -1e9
        self.entered_at = 0.0
        self.outcome = ""
        self._beat_timer = 0

    @property
    def name(self) -> str:
        """Of its host, and its node id."""
        return self.host.name

    def begin_join(self) -> None:
        """Enter the barrier, from nothing or from a round."""
        self.job.stopped(self)
        self.phase = "joining"
        self.joins += 1
        self.join_began_at = self.world.now
        self._beat_timer += 1
        self.world.note(self.name, lambda: "JOIN")
        self.world.tell("on_join", self)
        seconds = self.job.settings.join_timeout_seconds

        def steps() -> Any:
            return join(self.session, self.host.clock() + seconds)

        self.host.perform(steps, self._joined)

    def _joined(self, final: State | None, error: Exception | None) -> None:
        self.left_barrier_at = self.world.now
        self.world.tell("on_returned", self, final, error)
        if error is not None:
            self._fail(error)
            return
        assert final is not None
        self.world.note(self.name, lambda: f"RUNS {final.round_id} as {final.rank_of(self.name)}")
        self.round_id = final.round_id
        self.phase = "running"
        self.entered_at = self.world.now
        self.job.entered(self, final)
        self._set_beat_timer()

    # ---------------------------------------------------------------- while it runs

    def _set_beat_timer(self) -> None:
        self._beat_timer += 1
        number, seconds = self._beat_timer, self.session.next_beat - self.host.clock()
        if seconds < float("inf"):
            self.host.after(max(0.0, seconds), lambda: self._beat(number))

    def _beat(self, number: int) -> None:
        if number == self._beat_timer and self.phase in ("running", "finishing"):
            if self.host.busy:
                self.host.after(0.05, lambda: self._beat(number))
            else:
                self.host.perform(lambda: keep_alive(self.session), self._beaten)

    def _beaten(self, _: None, error: Exception | None) -> None:
        if self.phase not in ("running", "finishing"):
            return
        if error is not None:
            self.world.tell("on_fatal", self, error)
            if not isinstance(error, RendezvousError):
                raise error
            if self.phase == "running":
                self._fail(error)
            return
        notice = self.session.notice
        if self.phase == "running":
            self.world.tell("on_notice", self)
        if notice.count and self.phase == "running":
            rest = max(0.0, notice.at_seconds - self.host.clock())
            self.host.after(
                rest + self.world.rng.uniform(0.0, POLL_SECONDS), lambda: self._poll(self.round_id)
            )
        if self.session.overtaken and self.phase == "finishing":
            self._shut_down("overtaken in the exit barrier")
            return
        self._set_beat_timer()

    def _poll(self, round_id: RoundId | None) -> None:
        notice = self.session.notice
        acts = notice.count and self.host.clock() >= notice.at_seconds
        if self.phase == "running" and self.round_id == round_id and acts:
            self.world.note(self.name, lambda: f"ACTS on a notice of {notice.count}")
            self.world.tell("on_act", self)
            self.begin_join()

    def workers_fail(self, round_id: RoundId | None) -> None:
        """The workers of that round have failed; the agent restarts them."""
        if self.phase == "running" and self.round_id == round_id:
            self.world.note(self.name, lambda: "WORKERS FAILED")
            self.begin_join()

    def workers_succeed(self, round_id: RoundId | None) -> None:
        """The workers of that round have done all their work."""
        if self.phase != "running" or self.round_id != round_id:
            return
        self.world.note(self.name, lambda: "WORK DONE")
        self.phase = "finishing"
        self.job.succeeded(self)
        self.host.perform(
            lambda: finish(self.session), lambda *_: self._in_barrier(self.host.clock())
        )

    def _in_barrier(self, since: float) -> None:
        if self.phase != "finishing":
            return
        if self.job.barrier_is_over(self):
            self._shut_down("finished")
        elif self.host.clock() - since > BARRIER_TIMEOUT_SECONDS:
            self._shut_down("waited in the exit barrier for too long")
        else:
            self.host.after(POLL_SECONDS, lambda: self._in_barrier(since))

    # ---------------------------------------------------------------- the end

    def _fail(self, error: Exception) -> None:
        """torch's agent: workers are stopped, the handler is shut down, the error raised."""
        self.world.note(self.name, lambda: f"FAILS {type(error).__name__}: {error}")
        self.job.stopped(self)
        was_joining = self.phase == "joining"
        self.phase = "leaving"
        if was_joining:
            self._give_up(lambda: self._shut_down(type(error).__name__))
        else:
            self._shut_down(type(error).__name__)

    def workers_fail_for_good(self) -> None:
        """The workers have failed and no restart is left: the agent ends the run."""
        if self.phase == "running":
            self.job.stopped(self)
            self._shut_down("workers failed for good")

    def _shut_down(self, outcome: str) -> None:
        self.phase = "leaving"
        self.outcome = self.outcome or outcome
        if self.session.entry.running is None:
            self._give_up(self._end)
            return
        self._try(
            lambda: close(self.session, self.outcome, members_only=True),
            lambda: self._give_up(self._end),
            self.host.clock() + CLOSE_TIMEOUT_SECONDS,
        )

    def _give_up(self, then: Any) -> None:
        until = self.host.clock() + 1.0
        self._try(lambda: give_up(self.session), then, until)

    def _try(self, steps: Any, then: Any, until: float) -> None:
        def done(_: Any, error: Exception | None) -> None:
            if error is None or self.host.clock() >= until:
                then()
            elif isinstance(error, RendezvousConnectionError):
                self.host.after(RETRY_SECONDS, lambda: self._try(steps, then, until))
            else:
                raise error

        self.host.perform(steps, done)

    def exit_gracefully(self) -> None:
        """SIGTERM: the process withdraws its entry and ends."""
        if self.phase == "done":
            return
        self.world.note(self.name, lambda: "SIGTERM")
        self.world.tell("on_exit", self)
        self._leave_barrier()
        self.job.stopped(self)
        self.host.drop_steps()
        self.phase = "leaving"

        def steps() -> Any:
            yield Withdraw(self.name)

        self.host.perform(steps, lambda *_: self._end())

    def _leave_barrier(self) -> None:
        if self.phase == "joining":
            self.left_barrier_at = self.world.now

    def crash(self) -> None:
        """The machine vanishes."""
        self.world.note(self.name, lambda: "CRASH")
        self.world.tell("on_crash", self)
        self._leave_barrier()
        self.host.die()
        self.job.stopped(self)

    def set_closed(self) -> None:
        """Somebody calls the handler's set_closed()."""
        self.world.note(self.name, lambda: "set_closed()")
        self.world.tell("on_set_closed", self)
        self.host.perform(
            lambda: close(self.session, "set_closed", members_only=False), lambda *_: None
        )

    def _end(self) -> None:
        self.world.note(self.name, lambda: f"ENDS: {self.outcome}")
        self.phase = "done"
        self.host.drop_steps()
