"""The simulated world: one clock, one backend, and what befalls it. Hosts are in ``sim.host``.

Rules:

* Everything random comes from the world's one generator and every event has one place in one
  queue, so a seed reproduces a run exactly.
* An effect is a request that travels, an atomic step on the backend, and an answer that travels.
  Either can be lost; a lost answer's step has been done. A request can also come so late that its
  sender has long given up.
* Hosts have clocks of their own, far apart and of different speed. The backend's is another one.
* The world knows the truth (who was cut off when); protocol code never sees it, checkers do.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rdzv.adapters import FramedBackend
from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.codec import decode_entry, decode_state, encode_state
from rdzv.effects import (
    Announce,
    Beat,
    Effect,
    Found,
    ListRoster,
    Read,
    Swap,
    Wait,
    Withdraw,
)
from rdzv.machine import Rules
from rdzv.ports import Pulse
from rdzv.state import Present, State

if TYPE_CHECKING:
    from sim.host import Host

RUN_ID = "job"
BACKEND_EPOCH_SECONDS = 5e8
TOMBSTONE_WINDOWS = 2
EVENTS_MAX = 400_000
POLL_SECONDS = 0.5


class Stuck(Exception):
    """More events than any honest run needs: something spins."""


@dataclass(slots=True)
class Weather:
    """How the network behaves now."""

    delay_seconds: float = 0.005
    loss: float = 0.0
    """Of a request or of an answer, each."""
    late: float = 0.0
    """Probability that a request arrives long after its sender has given up."""
    late_seconds: float = 20.0


@dataclass(slots=True)
class Pending:
    """A request whose answer a host waits for."""

    effect: Effect
    sent_at: float
    open: bool = True


@dataclass(slots=True)
class Waiter:
    host: Host
    pending: Pending
    token: Any
    revision: Any


class World:
    """Virtual time and the one backend that all hosts share."""

    def __init__(self, seed: str, rules: Rules, kind: str = "push") -> None:
        """``kind`` of the backend: ``push`` wakes those who wait, with ``poll`` they look now and
        then, ``ageless`` has no clock to date the document by, ``bare`` has no roster either."""
        self.rng = random.Random(seed)
        self.rules = rules
        self.kind = kind
        self.now = 0.0
        self.weather = Weather()
        self.space = MemorySpace(clock=lambda: self.now + BACKEND_EPOCH_SECONDS)
        self.memory = MemoryBackend(self.space, RUN_ID)
        self.backend = self.connect(lambda: self.now)
        self.up = True
        self.outages: list[tuple[float, float]] = []
        self.emptied_at: list[float] = []
        self.restored_at: list[float] = []
        self.rolled_back_at: list[float] = []
        self.gap_incarnations: set[str] = set()
        """Made by brand-new nodes on an empty backend, beside a running round."""
        self.disturbed_at = 0.0
        """When the last mishap began or ended."""
        self.hosts: dict[str, Host] = {}
        self.trace: list[str] | None = None
        self.watchers: list[Any] = []
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._waiters: list[Waiter] = []
        self._decoded: dict[bytes, State] = {}

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Call at a moment of true time."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), call))

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Call after some true time."""
        self.at(self.now + seconds, call)

    def run(self, until: float, finished: Callable[[], bool] = lambda: False) -> None:
        """Let time pass. Raises :class:`Stuck`."""
        events = 0
        while self._events and self._events[0][0] <= until and not finished():
            self.now, _, call = heapq.heappop(self._events)
            call()
            events += 1
            if events > EVENTS_MAX:
                raise Stuck(f"{events} events by {self.now:.1f} s")
        self.now = max(self.now, until) if not finished() else self.now

    def note(self, who: str, what: Callable[[], str]) -> None:
        """A line of the trace, made only if there is one."""
        if self.trace is not None:
            self.trace.append(f"{self.now:10.3f}  {who:<8} {what()}")

    def tell(self, event: str, *facts: Any) -> None:
        """Tell every checker that has a method of that name."""
        for watcher in self.watchers:
            method = getattr(watcher, event, None)
            if method is not None:
                method(*facts)

    def travel_seconds(self) -> float:
        """How long one message takes."""
        return self.rng.expovariate(1.0 / self.weather.delay_seconds) + 0.0002

    # ---------------------------------------------------------------- the backend

    def connect(self, clock: Callable[[], float]) -> Any:
        """The backend as a node with this clock has it."""
        return FramedBackend(self.memory, clock) if self.kind == "bare" else self.memory

    def document(self) -> State | None:
        """What is stored now."""
        found = self.backend.get_state()
        return None if found is None else self._decode(found[0])

    def _decode(self, data: bytes) -> State:
        state = self._decoded.get(data)
        if state is None:
            state = self._decoded[data] = decode_state(data)
        return state

    def _found(self, answer: tuple[bytes, Any] | None) -> Found:
        return Found(None, None) if answer is None else Found(self._decode(answer[0]), answer[1])

    def apply(self, host: Host, effect: Effect) -> Any:
        """One atomic step. (A Wait that has nothing to tell yet is kept by the caller.)"""
        window = self.rules.liveness_window_seconds
        backend = host.backend
        if isinstance(effect, Read):
            return self._found(backend.get_state())
        if isinstance(effect, Swap):
            return self._swap(host, effect)
        if isinstance(effect, ListRoster):
            rows = backend.entries()
            present = tuple(
                Present(decode_entry(row.entry.data), row.proven)
                for row in rows
                if not row.withdrawn
            )
            return present, frozenset(row.entry.node_id for row in rows if row.withdrawn)
        if isinstance(effect, Withdraw):
            self.tell("on_withdraw", host, effect)
            return backend.withdraw(effect.node_id, TOMBSTONE_WINDOWS * window)
        if isinstance(effect, Announce):
            pulse: Pulse = backend.announce(effect.entry, window, effect.question)
            self.tell("on_announce", host, decode_entry(effect.entry.data))
        else:
            assert isinstance(effect, Beat)
            pulse = backend.beat(effect.node_id, window, effect.question)
        if isinstance(effect, Announce) or pulse.present:
            host.was_kept_alive()
        return replace(pulse, state_age_seconds=None) if self.kind == "ageless" else pulse

    def _swap(self, host: Host, effect: Swap) -> Found:
        before = self.document()
        answer = host.backend.set_state(encode_state(effect.state), effect.token)
        if answer is None:
            return Found(None, None)
        data, token, swapped = answer
        found = Found(self._decode(data), token, swapped)
        self.tell("on_attempt", host, swapped)
        if swapped:
            self.tell("on_write", host, before, found.state)
        return found

    def arrive(self, host: Host, pending: Pending) -> tuple[bool, Any]:
        """A request reaches the backend: whether there is an answer yet, and which."""
        effect = pending.effect
        host.is_late = not pending.open
        if not isinstance(effect, Wait):
            answer = self.apply(host, effect)
            self._wake()
            return True, answer
        waiter = Waiter(host, pending, effect.token, effect.revision)
        changed, found = self._look(waiter)
        if changed:
            return True, found
        self._waiters.append(waiter)
        if self.kind != "push":
            self._poll(waiter)
        return False, None

    def _look(self, waiter: Waiter) -> tuple[bool, Found | None]:
        found = waiter.host.backend.get_state()
        token = None if found is None else found[1]
        if token != waiter.token:
            return True, None if found is None else self._found(found)
        if waiter.revision is None:
            return False, None
        if self.kind == "bare":
            backend = waiter.host.backend
            return waiter.revision != backend.revision_of(backend.look()), None
        revision = self.space.run(RUN_ID).revision
        return waiter.revision != revision, None

    def _wake(self) -> None:
        if self.kind == "push" and self._waiters:
            for waiter in self._waiters[:]:
                self._end_if_changed(waiter)

    def _end_if_changed(self, waiter: Waiter) -> bool:
        if not waiter.pending.open:
            self._waiters.remove(waiter)
            return True
        changed, found = self._look(waiter)
        if changed:
            self._waiters.remove(waiter)
            waiter.host.answer(waiter.pending, found)
        return changed

    def _poll(self, waiter: Waiter) -> None:
        def look() -> None:
            if waiter in self._waiters and not (self.up and self._end_if_changed(waiter)):
                self._poll(waiter)

        most = POLL_SECONDS if self.kind != "bare" else 3.0 * POLL_SECONDS
        self.after(most * self.rng.uniform(0.5, 1.0), look)

    # ---------------------------------------------------------------- what befalls the backend

    def go_down(self) -> None:
        """The backend stops answering; who waits on a connection learns it."""
        if self.up:
            self.up = False
            self.outages.append((self.now, float("inf")))
            self.note("backend", lambda: "DOWN")
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if self.rng.random() < 0.7:
                    waiter.host.fail_soon(waiter.pending, "the connection was closed")

    def go_up(self) -> None:
        """The backend answers again."""
        if not self.up:
            self.up = True
            self.disturbed_at = self.now
            self.emptied_at = [
                at if at < self.outages[-1][0] else self.now for at in self.emptied_at
            ]
            self.outages[-1] = (self.outages[-1][0], self.now)
            self.note("backend", lambda: "UP")

    def wipe(self) -> None:
        """The backend has lost everything."""
        self.note("backend", lambda: "WIPED")
        self.emptied_at.append(self.now)
        self.tell("on_data_lost")
        self.space.wipe()
        self._wake()

    def take_copy(self) -> Any:
        """What a replica that lags behind knows now."""
        return self.memory.get_state(), copy.deepcopy(self.space.run(RUN_ID).rows)

    def fail_over(self, older: Any, *, with_roster: bool) -> None:
        """An older copy takes over: acknowledged writes are lost."""
        document, rows = older
        if document is None:
            return
        self.note("backend", lambda: f"OLDER COPY{' WITH ROSTER' if with_roster else ''}")
        self.restored_at.append(self.now)
        self.tell("on_data_lost")
        now = self.memory.get_state()
        self.memory.set_state(document[0], None if now is None else now[1])
        if with_roster or self.kind == "bare":
            self.rolled_back_at.append(self.now)
            run = self.space.run(RUN_ID)
            run.rows.clear()
            run.rows.update(rows)
            run.revision = self.space.next_number()
        self._wake()

    def recently_troubled(self) -> bool:
        """Whether the backend has lost entries that their nodes cannot all have put back."""
        since = self.now - 2.0 * self.rules.liveness_window_seconds - 4.0
        moments = [*self.emptied_at, *self.restored_at, *(end for _, end in self.outages)]
        return any(moment > since for moment in moments)

    def recently_rolled_back(self) -> bool:
        """Whether the roster is an older copy, in which entries end too early."""
        since = self.now - self.rules.liveness_window_seconds - 4.0
        return any(moment > since for moment in self.rolled_back_at)

    def down_seconds(self, since: float) -> float:
        """For how long the backend has been down since then."""
        return sum(max(0.0, min(end, self.now) - max(begin, since)) for begin, end in self.outages)


def describe(thing: Any) -> str:
    """An effect or an answer in one short line."""
    if isinstance(thing, Swap):
        return f"Swap({describe(thing.state)} over {thing.token})"
    if isinstance(thing, State):
        parts = [f"{thing.incarnation}.{thing.round}.{thing.nonce}"]
        parts += ["[" + " ".join(thing.participant_ids) + "]"]
        if thing.proposal is not None:
            chosen = " ".join(node.id for node in thing.proposal.participants)
            parts.append(f"proposal {thing.proposal.nonce} [{chosen}]")
        parts.append(f"by {thing.coordinator or '-'} waiting {thing.waiting}")
        if thing.lost:
            parts.append(f"lost {' '.join(thing.lost)}")
        if thing.closed is not None:
            parts.append(f"CLOSED {thing.closed}")
        return " ".join(parts)
    if isinstance(thing, Found):
        swapped = " swapped" if thing.swapped else ""
        return f"{thing.token}: {describe(thing.state)}{swapped}"
    if isinstance(thing, Announce):
        entry = decode_entry(thing.entry.data)
        left = entry.left.label if entry.left else "-"
        running = entry.running.label if entry.running else "-"
        return f"Announce(left {left} running {running} finished {entry.finished})"
    if isinstance(thing, tuple):
        present, withdrawn = thing
        return f"{[p.entry.node.id for p in present]} withdrawn {sorted(withdrawn)}"
    return str(thing)
