"""A simulated machine: a clock of its own, and protocol steps performed over the network.

An effect is a request that travels, an atomic step on the backend, and an answer that travels. A
machine that is paused performs nothing; what arrives meanwhile queues up. One that is cut off
hears nothing. One that dies is gone, but what it has sent still arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from sim.world import Pending, World, describe

from rdzv.effects import Effect, Pause, Prepare, Wait
from rdzv.errors import RendezvousConnectionError

TIMER_SECONDS = 1e-4
"""How exact a timer is; without it a rounded-off moment would never come."""


@dataclass
class Host:
    """A machine with one agent process: a clock, and protocol steps run one after another."""

    world: World
    name: str
    clock_offset: float
    clock_rate: float
    backend: Any
    read_timeout_seconds: float
    alive: bool = True
    cut: bool = False
    paused_until: float = 0.0
    alive_at: float = -1e9
    """When a request was last performed that left the entry alive."""
    returned_at: float = -1e9
    """When it was last heard of after a silence in which others may have taken it for dead."""
    arrived_at: float = -1e9
    """When its entry came into the roster."""
    undisturbed: bool = True
    """Whether nothing but the backend itself has kept it from asking since then."""
    is_late: bool = False
    """Whether the request of this node in hand is one that its sender has given up."""
    requests: int = 0
    """Sent so far, those that only wait for a change left out."""
    waits: int = 0
    _jobs: deque[tuple[Callable[[], Generator[Effect, Any, Any]], Callable[..., None]]] = field(
        default_factory=deque
    )
    _steps: Generator[Effect, Any, Any] | None = None
    _done: Callable[..., None] | None = None
    _pending: Pending | None = None

    def was_kept_alive(self) -> None:
        """The backend has performed what keeps this node's entry alive."""
        now = self.world.now
        silent = now - self.alive_at
        if self.alive_at >= 0.0 and silent > 0.9 * self.world.rules.liveness_window_seconds:
            self.returned_at = now
        if not 0.0 <= silent <= self.world.rules.liveness_window_seconds:
            self.arrived_at = now
        self.alive_at = now
        self.undisturbed = not (self.cut or self.paused_until > now)

    def clock(self) -> float:
        """This machine's monotonic clock."""
        return self.clock_offset + self.clock_rate * self.world.now

    def true_moment(self, own_seconds: float) -> float:
        """The true time at which this machine's clock shows that."""
        return (own_seconds - self.clock_offset) / self.clock_rate

    def true_seconds(self, own_seconds: float) -> float:
        """How long it really takes until this machine's clock has moved so far."""
        return own_seconds / self.clock_rate

    def after(self, own_seconds: float, call: Callable[[], object]) -> None:
        """A timer of this machine: stands still with it, ends with it."""
        seconds = self.true_seconds(own_seconds) + TIMER_SECONDS
        self.world.after(seconds, lambda: self._when_awake(call))

    def _when_awake(self, call: Callable[[], object]) -> None:
        if not self.alive:
            return
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until, lambda: self._when_awake(call))
        else:
            call()

    @property
    def busy(self) -> bool:
        """Whether steps are being performed."""
        return self._steps is not None

    def perform(
        self, steps: Callable[[], Generator[Effect, Any, Any]], done: Callable[..., None]
    ) -> None:
        """Run protocol steps after those in hand; ``done(result, error)`` follows."""
        self._jobs.append((steps, done))
        if self._steps is None:
            self._next_job()

    def drop_steps(self) -> None:
        """Forget all steps, as a process does that is ending."""
        self._jobs.clear()
        if self._steps is not None:
            self._steps.close()
        if self._pending is not None:
            self._pending.open = False
        self._steps = self._done = self._pending = None

    def die(self) -> None:
        """Vanish. Requests on their way still arrive."""
        self.alive = False
        self.drop_steps()

    def _next_job(self) -> None:
        if self._jobs:
            steps, self._done = self._jobs.popleft()
            self._steps = steps()
            self._go_on(None, None)

    def _go_on(self, answer: Any, error: RendezvousConnectionError | None) -> None:
        steps, done = self._steps, self._done
        assert steps is not None
        assert done is not None
        self._pending = None
        try:
            effect = steps.throw(error) if error is not None else steps.send(answer)
        except StopIteration as end:
            result, failure = end.value, None
        except Exception as raised:
            result, failure = None, raised
        else:
            self._send(effect)
            return
        self._steps = self._done = None
        done(result, failure)
        if self._steps is None and self.alive:
            self._next_job()

    def _send(self, effect: Effect) -> None:
        world = self.world
        pending = self._pending = Pending(effect, world.now)
        if isinstance(effect, Pause):
            self.after(effect.seconds, lambda: self.answer_now(pending, None))
            return
        if isinstance(effect, Prepare):
            # Another port for each round that a node prepares, and sometimes none.
            self.answer_now(pending, int(world.now * 1000) % 65535)
            return
        if isinstance(effect, Wait):
            self.waits += 1
            self.after(effect.timeout_seconds, lambda: self._wait_ends(pending))
        else:
            self.requests += 1
        weather, rng = world.weather, world.rng
        if self.cut or rng.random() < weather.loss:
            world.note(self.name, lambda: f"{describe(effect)}  LOST")
            self._is_lost(pending)
            return
        seconds = world.travel_seconds()
        if weather.late and rng.random() < weather.late:
            self._is_lost(pending)
            seconds += self.read_timeout_seconds + rng.uniform(0.0, weather.late_seconds)
        world.after(seconds, lambda: self._arrive(pending))

    def _is_lost(self, pending: Pending) -> None:
        """There will be no answer in time."""
        self.undisturbed = False
        if not isinstance(pending.effect, Wait):
            seconds = self.read_timeout_seconds - (self.world.now - pending.sent_at)
            message = "the backend did not answer in time"
            self.after(seconds, lambda: self._fail_now(pending, message))

    def _wait_ends(self, pending: Pending) -> None:
        """Some clients notice at the end of a wait that nobody was there, some do not."""
        if self.cut and self.world.rng.random() < 0.5:
            self._fail_now(pending, "the connection had been lost")
        else:
            self.answer_now(pending, None)

    def _arrive(self, pending: Pending) -> None:
        world, effect = self.world, pending.effect
        if isinstance(effect, Wait) and not pending.open:
            return
        if self.cut:
            self._is_lost(pending)
            return
        if not world.up:
            self.fail_soon(pending, "the connection was refused")
            return
        has_answer, answer = world.arrive(self, pending)
        lost = world.rng.random() < world.weather.loss
        if not isinstance(effect, Wait):
            late = "" if pending.open else "  (LATE)"
            gone = "  ANSWER LOST" if lost else ""
            world.note(self.name, lambda: f"{describe(effect)} -> {describe(answer)}{gone}{late}")
        if has_answer and lost:
            self._is_lost(pending)
        elif has_answer:
            self.answer(pending, answer)

    def answer(self, pending: Pending, answer: Any) -> None:
        """Send an answer on its way."""
        if self.cut:
            self._is_lost(pending)
        else:
            self.world.after(
                self.world.travel_seconds(),
                lambda: self._when_awake(lambda: self.answer_now(pending, answer)),
            )

    def fail_soon(self, pending: Pending, message: str) -> None:
        """Send an error on its way."""
        if self.cut:
            self._is_lost(pending)
        else:
            self.world.after(
                self.world.travel_seconds(),
                lambda: self._when_awake(lambda: self._fail_now(pending, message)),
            )

    def answer_now(self, pending: Pending, answer: Any) -> None:
        """Resume the steps, unless they have gone on already."""
        if pending.open:
            pending.open = False
            self._go_on(answer, None)

    def _fail_now(self, pending: Pending, message: str) -> None:
        if pending.open:
            pending.open = False
            self.world.note(self.name, lambda: f"{describe(pending.effect)} -> ERROR {message}")
            self._go_on(None, RendezvousConnectionError(message))
