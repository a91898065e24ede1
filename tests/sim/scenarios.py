"""Scenarios: what befalls a job, drawn from a seed.

A scenario is data: settings, arrivals and a list of mishaps with their moments. So it can be
printed, and its fingerprint tells whether a seed still means what it meant when it was kept.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from sim.agent import JobSettings
from sim.world import Weather

from rdzv.machine import Rules


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
        settings.fails_at_the_end = rng.choice([0.0, 0.0, 0.2])
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
    theme = rng.choice(THEMES) if rng.random() < THEMED else None
    return scenario if theme is None else theme(scenario, rng)


def _draw_mishaps(rng: random.Random, rules: Rules, calm_at: float) -> tuple[Mishap, ...]:
    window = rules.liveness_window_seconds
    kinds = ["crash", "exit", "pause", "cut", "arrive", "workers fail", "outage"]
    weights = [3, 1, 3, 2, 3, 2, 1]
    rare = {
        "wipe": 0.25, "flush": 0.1, "restart": 0.3, "older copy": 0.2, "close": 0.03,
        "fail for good": 0.03, "reuse": 0.1,
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
    at = rng.uniform(0.5, rng.choice([20.0, calm_at, calm_at]))
    return Mishap(at, what, min(seconds * window, calm_at - at), rng.random())


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


def _wiped_early(scenario: Scenario, rng: random.Random) -> Scenario:
    """Theme: data is lost again and again while the first rounds are formed and little known."""
    wipes = [Mishap(rng.uniform(0.3, 1.5), "wipe", 0.5, rng.random()) for _ in range(2)]
    wipes += [
        _mishap(rng, rng.choice(["wipe", "flush", "workers fail"]), 1.0, 20.0) for _ in range(2)
    ]
    rules = replace(scenario.rules, last_call_seconds=0.0)
    if rng.random() < 0.6:
        rules = replace(rules, min_nodes=2, max_nodes=2)
        rules = replace(rules, keep_alive_interval_seconds=1.0, liveness_window_seconds=3.0)
    return replace(
        scenario,
        rules=rules,
        arrivals=tuple(rng.uniform(0.0, 0.5) for _ in range(rng.randint(3, 6))),
        mishaps=tuple(sorted(wipes, key=lambda mishap: mishap.at)),
        kind=rng.choice(["poll", "poll", "push"]),
        calm_at=30.0,
    )


def _hidden_outage(scenario: Scenario, rng: random.Random) -> Scenario:
    """Theme: a node sleeps through an outage and wakes before it has been missed."""
    began = rng.uniform(15.0, 25.0)
    return replace(
        scenario,
        rules=replace(_slow_rules(scenario.rules, max_nodes=12), min_nodes=2),
        arrivals=tuple(rng.uniform(0.0, 3.0) for _ in range(rng.randint(3, 6))),
        mishaps=(
            Mishap(began - rng.uniform(0.0, 2.0), "pause", rng.uniform(7.0, 14.0), rng.random()),
            Mishap(began, "outage", rng.uniform(3.0, 11.0)),
        ),
        weather=replace(scenario.weather, loss=0.0, late=0.0),
        calm_at=45.0,
    )


def _used_again(scenario: Scenario, rng: random.Random) -> Scenario:
    """Theme: a run is closed and its id used again, while some of its nodes linger."""
    interval = scenario.rules.keep_alive_interval_seconds
    again = rng.uniform(12.0, 16.0)
    mishaps = [Mishap(rng.uniform(4.0, 6.0), "close", pick=rng.random())]
    mishaps += [Mishap(again, "reuse"), Mishap(again + 4.0 * rng.random(), "arrive")]
    mishaps += [_mishap(rng, "workers fail", interval, 60.0) for _ in range(4)]
    if rng.random() < 0.5:
        mishaps.append(Mishap(rng.uniform(3.0, 10.0), "older copy"))
    return replace(
        scenario,
        rules=replace(scenario.rules, min_nodes=1, last_call_seconds=0.5, closed_grace_seconds=5.0),
        settings=replace(scenario.settings, work_seconds=float("inf"), workers_die=0.0),
        arrivals=tuple(rng.uniform(0.0, 1.0) for _ in range(rng.randint(2, 4))),
        mishaps=tuple(sorted(mishaps, key=lambda mishap: mishap.at)),
        calm_at=60.0,
    )


def _impatient(scenario: Scenario, rng: random.Random) -> Scenario:
    """Theme: nodes give up at about the moment at which enough of them have come."""
    nodes, patience = rng.randint(3, 6), rng.uniform(6.0, 10.0)
    late = [rng.gauss(patience, 0.1) for _ in range(2)]
    return replace(
        scenario,
        rules=replace(scenario.rules, min_nodes=2, max_nodes=nodes, last_call_seconds=0.0),
        settings=replace(scenario.settings, join_timeout_seconds=patience),
        arrivals=(*(rng.uniform(0.0, 0.2) for _ in range(nodes - 2)), *late),
        mishaps=(),
        weather=replace(scenario.weather, loss=rng.choice([0.02, 0.1])),
        calm_at=40.0,
    )


def _crash_loop(scenario: Scenario, rng: random.Random) -> Scenario:
    """Theme: a joiner dies as it starts, is started again at once, and never stops doing so. (It
    does so after the calm, too: to bear it is what is asked.)"""
    nodes = rng.randint(2, 4)
    loop, last, pause = [], rng.uniform(6.0, 10.0), rng.uniform(0.4, 0.8)
    while last < 90.0:
        loop.append(Mishap(last, "crash loop", rng.uniform(0.1, pause)))
        last += pause
    mishaps = [*loop, Mishap(rng.uniform(12.0, 16.0), rng.choice(["crash", "workers fail"]))]
    return replace(
        scenario,
        rules=replace(
            scenario.rules,
            min_nodes=nodes - 1,
            max_nodes=nodes + rng.randint(0, 2),
            last_call_seconds=0.5,
            keep_alive_interval_seconds=1.0,
            liveness_window_seconds=3.0,
            restart_on_node_loss=True,
        ),
        settings=replace(scenario.settings, work_seconds=float("inf"), workers_die=0.5),
        arrivals=tuple(rng.uniform(0.0, 1.0) for _ in range(nodes)),
        mishaps=tuple(sorted(mishaps, key=lambda mishap: mishap.at)),
        weather=replace(scenario.weather, loss=0.0, late=0.0),
        kind=rng.choice(["push", "poll", "ageless"]),
        calm_at=30.0,
    )


THEMES: tuple[Callable[[Scenario, random.Random], Scenario], ...] = (
    _failover,
    _goodbye,
    _wiped_early,
    _wiped_early,
    _hidden_outage,
    _used_again,
    _impatient,
    _impatient,
    _crash_loop,
)
THEMED = 0.4
"""Of all seeds: what by chance meets too seldom."""


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
