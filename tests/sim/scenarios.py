"""Scenarios: what befalls a job, drawn from a seed, and whether it ends as it must.

A scenario is data: settings, arrivals and a list of mishaps with their moments. So it can be
printed, and its fingerprint tells whether a seed still means what it meant when it was kept.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from sim import checkers, conduct
from sim.agent import Agent, Job, JobSettings
from sim.checkers import Violation
from sim.host import Host
from sim.world import Stuck, Weather, World

from rdzv.machine import Rules
from rdzv.state import State

CHECK_EVERY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Mishap:
    """Something that happens at a moment of true time."""

    at: float
    what: str
    seconds: float = 0.0
    pick: float = 0.0
    """Which node, as a fraction of those there are."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a seed decides beforehand."""

    seed: int
    rules: Rules
    settings: JobSettings
    arrivals: tuple[float, ...]
    mishaps: tuple[Mishap, ...]
    weather: Weather
    kind: str
    calm_at: float
    """From here on nothing bad happens any more."""

    @property
    def fingerprint(self) -> str:
        """Changes when the same seed would draw another scenario."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    kind = rng.choices(["push", "poll", "ageless", "bare"], [7, 2, 1, 1])[0]
    nodes = rng.randint(2, 12 if kind != "bare" else 5)
    interval = rng.choice([1.0, 2.0, 5.0])
    low = rng.choice([1, min(2, nodes), rng.randint(1, nodes)])
    high = rng.randint(low, nodes + 2)
    rules = Rules(
        min_nodes=low,
        max_nodes=high,
        last_call_seconds=rng.choice([0.0, 0.5, 2.0, 8.0]),
        keep_alive_interval_seconds=interval,
        liveness_window_seconds=3 * interval,
        closed_grace_seconds=rng.choice([5.0, 20.0]),
        restart_on_node_loss=rng.random() < 0.8,
        rank_order=rng.choice(["stable", "stable", "natural", "topology"]),
    )
    settings = JobSettings(
        join_timeout_seconds=rng.choice([60.0, 300.0, 600.0]),
        outage_timeout_seconds=rng.choice([120.0, 600.0]),
        workers_die=rng.choice([0.0, 0.5, 1.0]) if rules.restart_on_node_loss else 1.0,
    )
    if rng.random() < 0.3:
        settings.work_seconds = rng.uniform(10.0, 60.0)
    spread = rng.choice([0.05, 3.0, 40.0])
    arrivals = tuple(sorted(rng.uniform(0.0, spread) for _ in range(nodes)))
    calm_at = rng.uniform(40.0, 200.0)
    weather = Weather(
        delay_seconds=rng.choice([0.001, 0.005, 0.03]),
        loss=rng.choice([0.0, 0.0, 0.0, 0.005, 0.05]),
        late=rng.choice([0.0, 0.0, 0.0, 0.01]),
        late_seconds=rng.choice([2.0, 20.0]),
    )
    scenario = Scenario(
        seed=seed,
        rules=rules,
        settings=settings,
        arrivals=arrivals,
        mishaps=_draw_mishaps(rng, rules, calm_at),
        weather=weather,
        kind=kind,
        calm_at=calm_at,
    )
    theme = rng.choices([None, _failover, _goodbye], [18, 1, 1])[0]
    return scenario if theme is None else theme(scenario, rng)


def _failover(scenario: Scenario, rng: random.Random) -> Scenario:
    """Theme: an older copy takes over while beats are rare and a newcomer would be let in at once.
    By chance these meet too seldom."""
    mishaps = [Mishap(rng.uniform(8.0, 20.0), "older copy")]
    mishaps += [_mishap(rng, "workers fail", 5.0, 60.0) for _ in range(3)]
    return replace(
        scenario,
        rules=_slow_rules(scenario.rules, max_nodes=rng.randint(2, 4)),
        settings=replace(scenario.settings, work_seconds=float("inf"), workers_die=1.0),
        arrivals=(0.1, rng.uniform(0.1, 8.0)),
        mishaps=tuple(sorted(mishaps, key=lambda mishap: mishap.at)),
        weather=replace(scenario.weather, loss=0.0, late=0.0),
        calm_at=70.0,
    )


def _goodbye(scenario: Scenario, rng: random.Random) -> Scenario:
    """Theme: a node says goodbye before anybody has been here for a whole liveness window."""
    nodes = rng.randint(3, 6)
    return replace(
        scenario,
        rules=replace(_slow_rules(scenario.rules, max_nodes=nodes), min_nodes=nodes - 1),
        settings=replace(scenario.settings, work_seconds=float("inf"), workers_die=0.0),
        arrivals=tuple(rng.uniform(0.0, 1.0) for _ in range(nodes)),
        mishaps=(Mishap(rng.uniform(1.5, 8.0), "exit", pick=rng.random()),),
        weather=replace(scenario.weather, loss=0.0, late=0.0),
        calm_at=40.0,
    )


def _slow_rules(rules: Rules, max_nodes: int) -> Rules:
    return replace(
        rules,
        min_nodes=1,
        max_nodes=max_nodes,
        last_call_seconds=0.2,
        keep_alive_interval_seconds=5.0,
        liveness_window_seconds=15.0,
        restart_on_node_loss=True,
    )


def _draw_mishaps(rng: random.Random, rules: Rules, calm_at: float) -> tuple[Mishap, ...]:
    window = rules.liveness_window_seconds
    kinds = ["crash", "exit", "pause", "cut", "arrive", "workers fail", "outage"]
    weights = [3, 1, 3, 2, 3, 2, 1]
    rare = {
        "wipe": 0.3, "restart": 0.3, "older copy": 0.2, "close": 0.03, "fail for good": 0.03,
        "reuse": 0.1,
    }  # fmt: skip
    mishaps = []
    for _ in range(rng.choice([0, 1, 2, 3, 5, 8])):
        what = rng.choices(kinds, weights)[0]
        mishaps.append(_mishap(rng, what, window, calm_at))
    for what, probability in rare.items():
        if rng.random() < probability:
            mishaps.append(_mishap(rng, what, window, calm_at))
    return tuple(sorted(mishaps, key=lambda mishap: mishap.at))


def _mishap(rng: random.Random, what: str, window: float, calm_at: float) -> Mishap:
    seconds = rng.choice([rng.uniform(0.05, 0.3), rng.uniform(0.3, 1.0), rng.uniform(1.0, 2.5)])
    latest = rng.choice([20.0, calm_at, calm_at])
    return Mishap(rng.uniform(0.5, latest), what, seconds * window, rng.random())


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
        if what != "arrive":
            self._disturb()
        if what in ("pause", "cut", "outage", "restart", "wipe"):
            world.after(mishap.seconds, self._disturb)
        if what in ("outage", "restart"):
            world.go_down()
            world.after(mishap.seconds, world.go_up)
        elif what == "wipe":
            world.go_down()
            world.wipe()
            world.after(mishap.seconds * mishap.pick, world.go_up)
        elif what == "older copy":
            self.copy = world.take_copy()
        elif what == "arrive":
            self.job.start_agent()
        elif what == "reuse":
            for _ in range(self.scenario.rules.min_nodes):
                world.after(world.rng.uniform(0.0, 3.0), self.job.start_agent)
        else:
            self._befall_agent(mishap)

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
            host.paused_until = min(host.paused_until, world.now)

    def _require_settled(self) -> None:
        """All live nodes are in one round, or parked, or too few, or finished."""
        rules, document = self.scenario.rules, self.world.document()
        live = [
            a for a in self.job.live_agents() if a.phase != "leaving" and not a.session.run_closed
        ]
        in_round = [agent for agent in live if agent.phase in ("running", "finishing")]
        joining = [agent for agent in live if agent.phase == "joining"]
        current = document.round_id if document is not None else None
        for agent in in_round:
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
