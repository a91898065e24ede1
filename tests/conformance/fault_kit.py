"""What the clauses about faults are written with.

Rules for the clauses:

* A call under a fault returns the right answer or raises a documented error, in time: it is made
  in a thread of its own, so that one that hangs is a failure of the clause, and not its end.
* A call that raised has an unknown effect: it has happened once or not at all, now or late. What is
  counted therefore lies between what was acknowledged and that plus what is unknown.
* Whatever a clause does to the server or to the network is undone when it ends, also by failing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rdzv.conformance.proxy import Proxy
from rdzv.conformance.target import DEADLINE_SECONDS, Server, Target
from rdzv.errors import RendezvousConnectionError

Errors = tuple[type[Exception], ...]

BACKEND_ERRORS: Errors = (RendezvousConnectionError,)
"""What a backend's method may raise when the network or the server fails. Nothing that is stored
is wrong then, so ``RendezvousStateError``, which ends a job, is not among them."""
STORE_ERRORS: Errors = (dist.DistNetworkError, dist.DistStoreError)
"""What a store's method may raise then: the first where it was not answered, the second, of which
``QueueEmptyError`` is a kind, where it waited in vain. Both are ``RuntimeError``."""

BUSY_SECONDS = 3.0
"""So much later than promised a call may end, as the machine may be busy."""
STORE_TIMEOUT_SECONDS = 0.5
"""Of stores whose calls are to fail."""
BLOCKED_SECONDS = 60.0
"""How long a call is told to wait that is to be released."""
LONG_ENOUGH_TO_SEE_SECONDS = 0.05
QUIET_SECONDS = 0.2
ANSWERS_OF_A_CALL_MAX = 24
ALL = 1_000_000
NO_ANSWER = "no answer came through the proxy: is Target.address used, and is the call answered?"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended."""

    value: Any = None
    error: Exception | None = None

    @property
    def acknowledged(self) -> bool:
        """Whether it returned."""
        return self.error is None


class Call:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[[], object], name: str = "the call") -> None:
        self._function, self._name = function, name
        self._ended = threading.Event()
        self._value: object = None
        self._error: BaseException | None = None
        self._started = time.monotonic()
        threading.Thread(target=self._run, name=f"rdzv-{name}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether it has returned or raised."""
        return self._ended.is_set()

    @property
    def has_returned(self) -> bool:
        """Whether it has ended, and not by an error."""
        return self.has_ended and self._error is None

    def still_blocked(self) -> Call:
        """Give it a moment, in which it must not end."""
        ended = self._ended.wait(LONG_ENOUGH_TO_SEE_SECONDS)
        assert not ended, f"{self._name} did not block: {self._value!r}, {self._error!r}"
        return self

    def outcome(self, errors: Errors, by: float) -> Outcome:
        """How it ended, which must be by then (``time.monotonic()``), and if by an error, by one
        of these."""
        in_time = self._ended.wait(max(0.0, by - time.monotonic()))
        assert in_time, f"{self._name} hangs, after {time.monotonic() - self._started:.1f} s"
        if self._error is None:
            return Outcome(self._value)
        if isinstance(self._error, errors):
            return Outcome(error=self._error)
        names = " or ".join(each.__name__ for each in errors)
        raise AssertionError(f"{self._name} raised no {names}: {self._error!r}") from self._error


def by_then(target: Target, timeout_seconds: float = 0.0) -> float:
    """When a call that is made now, and is told to wait so long, must have ended."""
    return time.monotonic() + timeout_seconds + target.call_seconds_max + BUSY_SECONDS


def tried(
    target: Target,
    function: Callable[[], object],
    errors: Errors,
    timeout_seconds: float = 0.0,
    name: str = "the call",
) -> Outcome:
    """Make a call that must end in time, and may raise one of the errors."""
    return Call(function, name).outcome(errors, by_then(target, timeout_seconds))


def recovered(
    target: Target,
    function: Callable[[], object],
    errors: Errors,
    timeout_seconds: float = 0.0,
    name: str = "the call",
) -> Any:
    """What the call returns once it works again, which must be soon: nothing hinders it now."""
    deadline = time.monotonic() + target.recovery_seconds_max + BUSY_SECONDS
    pause = threading.Event()
    while True:
        outcome = tried(target, function, errors, timeout_seconds, name)
        if outcome.acknowledged:
            return outcome.value
        assert time.monotonic() < deadline, f"{name} does not work again: {outcome.error!r}"
        pause.wait(0.02)


Calls = Mapping[str, Callable[[], object]]


def all_fail_in_time(
    target: Target, calls: Calls, errors: Errors, timeout_seconds: float = 0.0
) -> None:
    """Make the calls at once while nobody can answer them: each raises one of the errors."""
    running = {name: Call(function, name) for name, function in calls.items()}
    by = by_then(target, timeout_seconds)
    outcomes = {name: call.outcome(errors, by) for name, call in running.items()}
    answered = {name: each.value for name, each in outcomes.items() if each.acknowledged}
    assert not answered, f"nobody can have answered these: {answered}"


def all_recover(target: Target, calls: Calls, errors: Errors, timeout_seconds: float = 0.0) -> None:
    """Make the calls one by one until each has worked."""
    for name, function in calls.items():
        recovered(target, function, errors, timeout_seconds, name)


def found_in_the_end(
    waiting: Call, again: Callable[[], object], errors: Errors, by: float
) -> object:
    """What a wait returns; where it raises one of the errors, what it returns when made again."""
    pause = threading.Event()
    outcome = waiting.outcome(errors, by)
    while not outcome.acknowledged:
        assert time.monotonic() < by, f"it does not work again: {outcome.error!r}"
        pause.wait(0.02)
        outcome = Call(again, "the wait after an error").outcome(errors, by)
    return outcome.value


# ----------------------------------------------------------------------------------- the faults


@contextmanager
def through_proxy(target: Target) -> Iterator[Proxy]:
    """What the target opens in the block connects through the proxy."""
    address = target.address
    assert address is not None
    with Proxy(address) as proxy:
        target.address = proxy.address
        try:
            yield proxy
        finally:
            target.address = address


@contextmanager
def paused(target: Target) -> Iterator[None]:
    """The server does not run during the block."""
    server = server_of(target)
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def down(target: Target, *, keep_data: bool) -> Iterator[None]:
    """The server is killed before the block and started again after it."""
    server = server_of(target)
    server.kill()
    try:
        yield
    finally:
        server.restart(keep_data=keep_data)


def server_of(target: Target) -> Server:
    """The server of a target that has one."""
    assert target.server is not None
    return target.server


FAULTS: dict[str, Callable[[Proxy], None]] = {
    "black hole": Proxy.black_hole,
    "cut": Proxy.cut,
    "lost answers": lambda proxy: proxy.drop_answers(ALL),
}
"""What keeps the network from bringing any answer."""


def each_answer_lost(
    target: Target, proxy: Proxy, ready: Callable[[], object], errors: Errors
) -> Iterator[int]:
    """For a loop in whose body one call is made: its first answer is lost, the next time its
    second, and so on until there was none left to lose. Before each the call ``ready`` is made,
    whose connection the other may use."""
    for step in range(ANSWERS_OF_A_CALL_MAX):
        recovered(target, ready, errors)
        before = proxy.answers_dropped
        proxy.drop_answers(1, after=step)
        yield step
        proxy.heal()
        if proxy.answers_dropped == before:
            break
    assert proxy.answers_dropped, NO_ANSWER


def settle(proxy: Proxy) -> None:
    """Wait until what was held back has arrived and nothing moves any more; not for ever."""
    pause = threading.Event()
    for _ in range(50):
        before = proxy.bytes_to_server, proxy.bytes_to_client
        pause.wait(QUIET_SECONDS)
        if before == (proxy.bytes_to_server, proxy.bytes_to_client):
            return


def until(what: str, condition: Callable[[], object]) -> None:
    """Wait for what does not depend on the target's speed alone."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        pause.wait(0.005)


def no_connection_is_left(proxy: Proxy) -> None:
    """All clients of the proxy have closed their connections, or do so soon."""
    deadline = time.monotonic() + BUSY_SECONDS + 2.0
    pause = threading.Event()
    while proxy.open_connections:
        assert time.monotonic() < deadline, f"{proxy.open_connections} connections are left open"
        pause.wait(0.01)


# ------------------------------------------------------------------------------------- backends


def reach(target: Target, function: Callable[[], object], name: str = "the call") -> Any:
    """What a backend's call returns, once it works."""
    return recovered(target, function, BACKEND_ERRORS, name=name)


def nothing_answers(target: Target, fault: str, calls: Callable[[Any], Calls]) -> None:
    """All calls fail in time under the fault, and work after it, with the same object."""
    with through_proxy(target) as proxy:
        backend = target.connect()
        for function in calls(backend).values():
            function()
        FAULTS[fault](proxy)
        fresh = {"a new one": lambda: target.connect().get_state()}
        all_fail_in_time(target, {**calls(backend), **fresh}, BACKEND_ERRORS)
        proxy.heal()
        all_recover(target, {**calls(backend), **fresh}, BACKEND_ERRORS)


def server_is_away(
    target: Target, away: AbstractContextManager[None], calls: Callable[[Any], Calls]
) -> None:
    """All calls fail in time while the server is away, and work after it, with the same object."""
    backend = target.connect()
    for function in calls(backend).values():
        function()
    with away:
        all_fail_in_time(target, calls(backend), BACKEND_ERRORS)
    all_recover(target, calls(backend), BACKEND_ERRORS)


# --------------------------------------------------------------------------------------- stores


def store_of(target: Target, timeout_seconds: float = STORE_TIMEOUT_SECONDS) -> Any:
    """A store with a timeout."""
    store: Any = target.store()
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def reach_store(target: Target, function: Callable[[], object], name: str = "the call") -> Any:
    """What a store's call returns, once it works."""
    return recovered(target, function, STORE_ERRORS, STORE_TIMEOUT_SECONDS, name)


def try_store(target: Target, function: Callable[[], object], name: str = "the call") -> Outcome:
    """How a store's call ends."""
    return tried(target, function, STORE_ERRORS, STORE_TIMEOUT_SECONDS, name)


# ------------------------------------------------------------------------------------- counting


class Tally:
    """What calls that each change something once have told of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acknowledged: list[Any] = []
        """What those returned that did, or stand for."""
        self.unknown: list[Any] = []
        """What those stand for that raised."""

    def note(self, outcome: Outcome, stands_for: Any = None) -> None:
        """Enter a call."""
        with self._lock:
            if outcome.acknowledged:
                value = outcome.value if stands_for is None else stands_for
                self.acknowledged.append(value)
            else:
                self.unknown.append(stands_for)

    def fits_count(self, count: int) -> None:
        """So often it happened: each acknowledged call once, each unknown one at most once."""
        least = len(self.acknowledged)
        most = least + len(self.unknown)
        assert least <= count <= most, (
            f"counted {count}, though {least} calls were acknowledged and {len(self.unknown)} not"
        )

    def fits_list(self, found: Iterable[Any]) -> None:
        """These are the traces: of each acknowledged call one, of each unknown one at most one."""
        found = list(found)
        twice = sorted({each for each in found if found.count(each) > 1})
        assert not twice, f"happened twice: {twice}"
        lost = sorted(set(self.acknowledged) - set(found))
        assert not lost, f"acknowledged and lost: {lost}"
        strange = sorted(set(found) - set(self.acknowledged) - set(self.unknown))
        assert not strange, f"never asked for: {strange}"
