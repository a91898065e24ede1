"""Tiny records for the tests of the rules, and a world of few nodes with one clock.

A :class:`Peer` performs protocol steps on a shared :class:`MemoryBackend`. Nothing sleeps: when
everybody waits, the world's clock moves on. Every peer's own clock shows another time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.driver import Driver
from rdzv.effects import Effect, Found, Pause, Prepare, Read, Session, Swap, Wait
from rdzv.errors import RendezvousConnectionError
from rdzv.machine import Rules
from rdzv.ports import Pulse, Question
from rdzv.protocol import join
from rdzv.running import keep_alive
from rdzv.state import Listing, Node, Present, RosterEntry, RoundId, State

RULES = Rules(min_nodes=2, max_nodes=3, last_call_seconds=30.0)
INTERVAL = RULES.keep_alive_interval_seconds
WINDOW = RULES.liveness_window_seconds
NOW = 1000.0
STEPS_WITHOUT_TIME_MAX = 1000
"""A world that does more at one moment is spinning."""


def node(name: str) -> Node:
    return Node(name, f"{name}.example")


def nodes(names: str) -> tuple[Node, ...]:
    return tuple(node(name) for name in names)


def round_id(number: int = 1, nonce: str = "", incarnation: str = "i") -> RoundId:
    return RoundId(incarnation, number, nonce or f"n{number}")


def document(participants: str = "", number: int = 1, **fields: Any) -> State:
    """The document of round ``number``, or of a new run if there are no participants."""
    fields = {"incarnation": "i", **fields}
    if not participants:
        return State(**fields)
    return State(round=number, nonce=f"n{number}", participants=nodes(participants), **fields)


def entry(
    name: str, left: RoundId | None = None, running: RoundId | None = None, finished: bool = False
) -> RosterEntry:
    return RosterEntry(node(name), left=left, running=running, settled=True, finished=finished)


def runs(names: str, running: RoundId | None = None) -> list[RosterEntry]:
    return [entry(name, running=running or round_id()) for name in names]


def waits(names: str, left: RoundId | None = None) -> list[RosterEntry]:
    return [entry(name, left=left) for name in names]


def listing(
    *entries: RosterEntry,
    withdrawn: str = "",
    unproven: str = "",
    age: float = 0.0,
    watched: float = WINDOW,
) -> Listing:
    """A listing begun ``age`` seconds before NOW, by one in contact since ``watched`` before."""
    present = tuple(Present(each, each.node.id not in unproven) for each in entries)
    return Listing(present, frozenset(withdrawn), NOW - age, NOW - age - watched)


class World:
    """Several nodes, one space, one true time."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.now = NOW
        self.rules = rules
        self.space = MemorySpace(clock=lambda: self.now)
        self.peers: list[Peer] = []
        self.written: list[State] = []
        """Every document that was ever written, oldest first."""
        self.is_down = False

    @property
    def state(self) -> State | None:
        found: Found = Peer(self, "reader").read()
        return found.state

    def put(self, state: State) -> None:
        """Write a document, whatever is there."""
        reader = Peer(self, "reader")
        assert reader.driver.perform(Swap(state, reader.read().token)).swapped

    def enter(self, names: str, join_seconds: float | None = None, **fields: Any) -> list[Peer]:
        """New nodes that call for the barrier."""
        entered = [Peer(self, name, **fields) for name in names]
        self.peers.extend(entered)
        for peer in entered:
            peer.join(join_seconds)
        return entered

    def form(self, names: str) -> list[Peer]:
        """New nodes that have formed a round, and run it."""
        peers = self.enter(names)
        self.run(200.0, until=lambda: all(peer.result is not None for peer in peers))
        assert all(peer.result is not None for peer in peers)
        for peer in peers:
            peer.runs = True
        return peers

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let so much time pass, or stop as soon as ``until`` holds."""
        end, idle_steps = self.now + seconds, 0
        while not until():
            moved = [peer.advance() for peer in self.peers]
            if any(moved):
                idle_steps += 1
                assert idle_steps < STEPS_WITHOUT_TIME_MAX, "the nodes are spinning"
                continue
            moment = min((peer.wakes_at for peer in self.peers), default=float("inf"))
            if moment > self.now + 1e-9:
                idle_steps = 0
            self.now = min(end, max(self.now, moment))
            if moment > end:
                return


class Peer:
    """A node: its session, and the steps that it performs one by one."""

    def __init__(self, world: World, name: str, *, has_clock: bool = True, **fields: Any) -> None:
        self.world = world
        self.offset = 1e4 * (1 + len(world.peers))
        self.has_clock = has_clock
        self.backend = MemoryBackend(world.space, "run")
        self.port = 4000 + len(world.peers)
        window_seconds = world.rules.liveness_window_seconds
        self.driver = Driver(self.backend, window_seconds, lambda _: self.port)
        fields = {"entry": entry(name), "jitter": lambda most: most, **fields}
        self.session = Session(world.rules, unique=name, clock=self.clock, **fields)
        self.log: list[Effect] = []
        self.logged_at: list[float] = []
        self.loses: dict[int, str] = {}
        """By the number of an effect, whether its "request" or its "answer" is lost."""
        self.runs = False
        self.result: Any = None
        self.error: Exception | None = None
        self._steps: Generator[Effect, Any, Any] | None = None
        self._pending: Effect | None = None
        self._pending_until = 0.0

    def clock(self) -> float:
        return self.world.now + self.offset

    @property
    def kinds(self) -> list[str]:
        """The effects performed so far, by name."""
        return [type(effect).__name__ for effect in self.log]

    @property
    def pace(self) -> str:
        """The same, without those that only wait."""
        return " ".join(kind for kind in self.kinds if kind not in ("Wait", "Pause", "Prepare"))

    def forget(self) -> None:
        self.log.clear()
        self.logged_at.clear()
        self.loses.clear()

    def read(self) -> Found:
        found: Found = self.driver.perform(Read())
        return found

    def join(self, join_seconds: float | None = None) -> None:
        self.runs, self.result = False, None
        self.start(
            join(self.session, None if join_seconds is None else self.clock() + join_seconds)
        )

    def start(self, steps: Generator[Effect, Any, Any]) -> None:
        self._steps, self.error = steps, None
        self._resume(None, None)

    def finish(self, steps: Generator[Effect, Any, Any]) -> Any:
        """Perform steps to their end, while nobody else does anything."""
        self.start(steps)
        while self._steps is not None:
            if not self.advance():
                self.world.now = self._pending_until
        if self.error is not None:
            raise self.error
        return self.result

    def die(self) -> None:
        self.world.peers.remove(self)

    @property
    def wakes_at(self) -> float:
        if self._steps is not None:
            return self._pending_until
        return self.session.next_beat - self.offset if self.runs else float("inf")

    def advance(self) -> bool:
        """Do one thing, if there is one to do now."""
        if self._steps is None:
            if not self.runs or self.world.now < self.wakes_at - 1e-9:
                return False
            self.start(keep_alive(self.session))
            return True
        effect = self._pending
        assert effect is not None
        if not self._may_go_on(effect):
            return False
        number = len(self.log)
        self.log.append(effect)
        self.logged_at.append(self.world.now)
        lost = RendezvousConnectionError("lost")
        loses = self.loses.get(number, "")
        is_local = isinstance(effect, Pause | Prepare)
        if (self.world.is_down and not is_local) or loses == "request":
            self._resume(None, lost)
            return True
        answer = None if isinstance(effect, Pause) else self._perform(effect)
        if isinstance(effect, Swap) and answer.swapped:
            self.world.written.append(effect.state)
        self._resume(answer, lost if loses else None)
        return True

    def _perform(self, effect: Effect) -> Any:
        if isinstance(effect, Wait):
            effect = replace(effect, timeout_seconds=0.0)
        answer = self.driver.perform(effect)
        if isinstance(answer, Pulse) and not self.has_clock:
            answer = replace(answer, state_age_seconds=None, next_expiry_seconds=None)
        return answer

    def _may_go_on(self, effect: Effect) -> bool:
        if self.world.now >= self._pending_until - 1e-9:
            return True
        if not isinstance(effect, Wait) or self.world.is_down:
            return isinstance(effect, Wait)
        pulse = self.backend.beat("reader", 1.0, Question())
        return pulse.token != effect.token or effect.revision not in (None, pulse.revision)

    def _resume(self, answer: Any, error: Exception | None) -> None:
        assert self._steps is not None
        try:
            effect = self._steps.throw(error) if error else self._steps.send(answer)
        except StopIteration as end:
            self._steps, self.result = None, self.result if self.runs else end.value
            return
        except Exception as raised:
            self._steps, self.error = None, raised
            return
        self._pending, self._pending_until = effect, self.world.now
        if isinstance(effect, Wait):
            self._pending_until += effect.timeout_seconds
        elif isinstance(effect, Pause):
            self._pending_until += effect.seconds
