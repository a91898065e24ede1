"""A job in rough weather, as in the simulation, but with real threads and clocks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousInfo

from rdzv.errors import RendezvousError

from .handler_kit import (
    LIVENESS_WINDOW_SECONDS,
    Job,
    Node,
    Stopwatch,
    backend_of,
    bootstrap_of,
    in_thread,
    troubled,
    wait_until,
)

SEEDS = (1, 2, 3)
WEATHER_SECONDS = 60.0
SETTLE_SECONDS = 40.0
AGENTS_MAX = 7
AGENTS_MIN = 3
POLL_SECONDS = 0.05


class Rounds:
    """What all agents were told of each round, and who runs which."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[str, tuple[int, tuple[str, int]]] = {}
        self._ranks: dict[str, dict[int, str]] = {}
        self.problems: list[str] = []

    def enter(self, node_id: str, label: str, info: RendezvousInfo) -> None:
        told = (info.world_size, bootstrap_of(info))
        with self._lock:
            if self._told.setdefault(label, told) != told:
                self.problems.append(f"{label} was {self._told[label]} and {told}")
            if self._ranks.setdefault(label, {}).setdefault(info.rank, node_id) != node_id:
                self.problems.append(f"rank {info.rank} of {label} was given twice")

    def __len__(self) -> int:
        return len(self._told)


class Agent:
    """Does what torchrun's agent does, until it is told to die."""

    def __init__(self, node: Node, rounds: Rounds) -> None:
        self.node = node
        self.running = ""
        self.is_alive = True
        self.restart = threading.Event()
        self._rounds = rounds
        self._life = in_thread(self._live)

    def end(self, how: Callable[[], None]) -> None:
        self.is_alive = False
        self.running = ""
        how()

    @property
    def error(self) -> BaseException | None:
        """Why it ended without being told to."""
        return self._life.exception() if self.is_alive and self._life.done() else None

    def _live(self) -> None:
        try:
            while self.is_alive:
                info = self.node.handler.next_rendezvous()
                label = str(self.node.state.round_id)
                self._rounds.enter(self.node.id, label, info)
                self.running = label if self.is_alive else ""
                while self.is_alive and not self.node.noticed:
                    if self.restart.wait(POLL_SECONDS):
                        break
                self.running = ""
                self.restart.clear()
        except RendezvousError:
            if self.is_alive:
                raise


class Weather:
    """Does something to a random agent, again and again."""

    def __init__(self, seed: int, job: Job, rounds: Rounds) -> None:
        self._random = random.Random(seed)
        self._job = job
        self._rounds = rounds
        self._timers: list[threading.Timer] = []
        self.agents: list[Agent] = []
        for _ in range(AGENTS_MIN):
            self.arrive()

    @property
    def alive(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.is_alive]

    def blow(self) -> None:
        self._random.choice(
            [self.arrive, self.arrive, self.vanish, self.exit, self.restart, self.hang, self.fail]
        )()

    def clear(self) -> None:
        for timer in self._timers:
            timer.join()

    def arrive(self) -> None:
        if len(self.alive) < AGENTS_MAX:
            self.agents.append(Agent(self._job.node(troubled(self._job)), self._rounds))

    def vanish(self) -> None:
        if len(self.alive) > AGENTS_MIN:
            agent = self._random.choice(self.alive)
            agent.end(agent.node.vanish)

    def exit(self) -> None:
        if len(self.alive) > AGENTS_MIN:
            agent = self._random.choice(self.alive)
            agent.end(agent.node.exit)

    def restart(self) -> None:
        self._random.choice(self.alive).restart.set()

    def hang(self) -> None:
        backend = backend_of(self._random.choice(self.alive).node)
        backend.hang()
        self._later(self._random.uniform(0.5, 1.8) * LIVENESS_WINDOW_SECONDS, backend.resume)

    def fail(self) -> None:
        backends = [backend_of(agent.node) for agent in self.alive]

        def set_down(is_down: bool) -> None:
            for backend in backends:
                backend.is_down = is_down

        set_down(True)
        self._later(self._random.uniform(0.2, 3.0), lambda: set_down(False))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        timer.start()
        self._timers.append(timer)


@contextmanager
def weather(seed: int, rounds: Rounds) -> Iterator[Weather]:
    with Job("2:4", join_timeout=60.0, last_call_timeout=0.5) as job:
        yield Weather(seed, job, rounds)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_in_rough_weather_agrees_and_settles(seed: int) -> None:
    rounds = Rounds()
    with weather(seed, rounds) as sky:
        watch, pause, pauses = Stopwatch(), threading.Event(), random.Random(seed)
        while watch.seconds < WEATHER_SECONDS:
            pause.wait(pauses.uniform(0.1, 2.5))
            sky.blow()
        sky.clear()

        def is_settled() -> bool:
            running = [agent.running for agent in sky.alive if agent.running]
            return (
                len(running) == min(len(sky.alive), 4)
                and len(set(running)) == 1
                and not any(agent.node.noticed for agent in sky.alive if agent.running)
            )

        wait_until("one world of as many as there is room for", is_settled, SETTLE_SECONDS)
        assert rounds.problems == []
        assert [agent.error for agent in sky.agents if agent.error] == []
        assert len(rounds) > 3, "the weather was rough"
        for agent in sky.alive:
            agent.end(agent.node.vanish)
