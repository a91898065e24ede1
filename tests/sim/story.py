"""A scenario as it happens: the world, the job, the mishaps, and how it must end.

Checkers judge every event; in the end, some time after the last mishap, all live nodes must be in
one round, or parked, or too few.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sim import checkers, conduct
from sim.agent import Agent, Job
from sim.checkers import Violation
from sim.host import Host
from sim.scenarios import Mishap, Scenario, draw
from sim.world import Stuck, Weather, World

from rdzv.machine import Rules
from rdzv.state import State

CHECK_EVERY_SECONDS = 2.0


class Run:
    """One scenario as it happens."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(f"world {scenario.seed}", scenario.rules, scenario.kind)
        self.world.weather = Weather(**asdict(scenario.weather))
        self.job = Job(self.world, scenario.settings)
        self.checkers = [checker(self.world, self.job) for checker in checkers.ALL + conduct.ALL]
        self.world.watchers = [*self.checkers, self]
        self.copy: Any = None
        self.over = False

    def go(self) -> None:
        """Run it to its end. Raises :class:`Violation`."""
        scenario, world = self.scenario, self.world
        for moment in scenario.arrivals:
            world.at(moment, self.job.start_agent)
        for mishap in scenario.mishaps:
            world.at(mishap.at, functools.partial(self._befall, mishap))
        world.at(scenario.calm_at, self._calm)
        world.at(CHECK_EVERY_SECONDS, self._check)
        bound = settling_seconds(scenario.rules)
        try:
            world.run(scenario.calm_at + bound, lambda: self.over)
        except Stuck as stuck:
            raise Violation("liveness", str(stuck)) from stuck
        if not self.over:
            self._require_settled()

    def _check(self) -> None:
        past = self.world.now > max([*self.scenario.arrivals, self.scenario.calm_at])
        self.over = past and not self.job.live_agents()
        for checker in self.checkers:
            check_now = getattr(checker, "check_now", None)
            if check_now is not None:
                check_now()
        self.world.after(CHECK_EVERY_SECONDS, self._check)

    def _pick(self, mishap: Mishap, suits: Callable[[Agent], bool]) -> Agent | None:
        agents = [agent for agent in self.job.live_agents() if suits(agent)]
        return agents[int(mishap.pick * len(agents))] if agents else None

    def on_write(self, host: Host, before: State | None, after: State) -> None:
        """An older copy takes over soon after the next round was completed."""
        if self.copy is None or before is None or before.round_id == after.round_id:
            return
        rng, older, self.copy = self.world.rng, self.copy, None
        with_roster = rng.random() < 0.3

        def fail_over() -> None:
            self._disturb()
            self.world.fail_over(older, with_roster=with_roster)
            for _ in range(rng.choice([0, 1, self.scenario.rules.min_nodes])):
                self.world.after(rng.uniform(0.0, 0.3), self.job.start_agent)

        if self.world.now < self.scenario.calm_at - 5.0:
            self.world.after(rng.uniform(0.01, 3.0), fail_over)

    def _disturb(self) -> None:
        self.world.disturbed_at = self.world.now

    def _befall(self, mishap: Mishap) -> None:
        world, what = self.world, mishap.what
        if what not in ("arrive", "crash loop"):
            self._disturb()
        if what in ("pause", "cut", "outage", "restart", "wipe"):
            world.after(mishap.seconds, self._disturb)
        if what in ("outage", "restart"):
            world.go_down()
            world.after(mishap.seconds, world.go_up)
        elif what == "wipe":
            self.copy = None
            world.go_down()
            world.wipe()
            world.after(mishap.seconds * mishap.pick, world.go_up)
        elif what == "flush":
            self.copy = None
            world.wipe()
        elif what == "older copy":
            self.copy = world.take_copy()
        elif what == "arrive":
            self.job.start_agent()
        elif what == "crash loop":
            self._start_and_crash(mishap)
        elif what == "reuse":
            for _ in range(self.scenario.rules.min_nodes):
                world.after(world.rng.uniform(0.0, 3.0), self.job.start_agent)
        else:
            self._befall_agent(mishap)

    def _start_and_crash(self, mishap: Mishap) -> None:
        agent, world = self.job.start_agent(), self.world
        world.after(mishap.seconds, lambda: agent.crash() if agent.host.alive else None)

    def _befall_agent(self, mishap: Mishap) -> None:
        what, world = mishap.what, self.world
        running = what in ("workers fail", "close", "fail for good")
        agent = self._pick(mishap, lambda a: a.phase == "running" or not running)
        if agent is None:
            return
        host = agent.host
        if what == "crash":
            agent.crash()
        elif what == "exit":
            agent.exit_gracefully()
        elif what == "pause":
            world.note(host.name, lambda: f"PAUSED for {mishap.seconds:.1f} s")
            host.paused_until = max(host.paused_until, world.now + mishap.seconds)
            host.undisturbed = False
        elif what == "cut":
            world.note(host.name, lambda: f"CUT OFF for {mishap.seconds:.1f} s")
            host.cut, host.undisturbed = True, False
            world.after(mishap.seconds, lambda: setattr(host, "cut", False))
        elif what == "workers fail":
            agent.workers_fail(agent.round_id)
        elif what == "fail for good":
            agent.workers_fail_for_good()
        else:
            agent.set_closed()

    def _calm(self) -> None:
        world = self.world
        world.note("world", lambda: "CALM")
        self._disturb()
        world.weather = Weather(delay_seconds=min(0.005, self.scenario.weather.delay_seconds))
        world.go_up()
        for host in world.hosts.values():
            host.cut = False

    def _require_settled(self) -> None:
        """All live nodes are in one round, or parked, or too few, or finished."""
        rules, document = self.scenario.rules, self.world.document()
        live = [
            a for a in self.job.live_agents() if a.phase != "leaving" and not a.session.run_closed
        ]
        in_round = [agent for agent in live if agent.phase in ("running", "finishing")]
        patience = 0.5 * settling_seconds(rules)
        joining = [
            agent
            for agent in live
            if agent.phase == "joining" and agent.join_began_at < self.world.now - patience
        ]
        current = document.round_id if document is not None else None
        for agent in in_round:
            if agent.phase == "finishing":
                continue
            closed = document is not None and document.closed is not None
            if agent.round_id != current and not closed and not agent.session.run_closed:
                raise Violation("liveness", f"{agent.name} still runs {agent.round_id}")
        if not joining:
            return
        if document is not None and document.closed is not None:
            raise Violation("liveness", f"{joining[0].name} still waits in a closed run")
        finishing = any(agent.phase == "finishing" for agent in in_round)
        if len(in_round) >= rules.max_nodes or len(live) < rules.min_nodes or finishing:
            return
        speaker = next((a for a in joining if a.session.coordinates), joining[0])
        raise Violation(
            "liveness",
            f"{len(joining)} of {len(live)} nodes still wait, {speaker.name} for "
            f"{speaker.session.why!r}",
        )


def settling_seconds(rules: Rules) -> float:
    """How long after the last mishap everything must be in order."""
    window, interval = rules.liveness_window_seconds, rules.keep_alive_interval_seconds
    return 6.0 * window + 2.0 * (interval + 2.0 + rules.last_call_seconds) + 15.0


def run_seed(seed: int, trace: bool = False) -> tuple[Violation | None, Run]:
    """Run one seed; the violation it ended with, if any."""
    run = Run(draw(seed))
    if trace:
        run.world.trace = []
    try:
        run.go()
    except Violation as violation:
        return violation, run
    return None, run
