"""The catalogue of what is broken on purpose, and what puts it before the kit.

Rules:

* A fault is one class with one fault that real code has had. It derives from a good one, which is
  named in ``GOOD``, and changes as little as shows the fault. The first paragraph of its docstring
  is the fault in a sentence, and ends up in the documentation.
* It names the clause that is expected to catch it. The proof holds it to that.
* A fault that is caught because a call never comes back says so by ``hangs``; one that is caught
  by an exception that no documentation promises names the exception's type in ``raises``. Any
  other exception of the broken class itself is a mistake in this folder, and no catch.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.conformance.target import Server, Target
from rdzv.errors import RendezvousConnectionError
from rdzv.stores.base import Store, StoreClient, Unanswered
from rdzv.stores.memory import MemoryClient

C = TypeVar("C", bound=type)

A_MOMENT_SECONDS = 0.0005

BOOKS_OF = MappingProxyType(
    {
        "backend": ("backend", "roster", "watch"),
        "roster": ("roster", "backend", "watch"),
        "watch": ("watch", "backend", "roster"),
        "store": ("store", "backend"),
    }
)
"""By kind of fault: the books of clauses that are held against it."""
SHORT_STEPS_MAX = 200
"""So many tenths of a short life pass at most, before what was waited for has not come."""


def a_moment() -> None:
    """What two round trips have between them: long enough for another thread to come between."""
    threading.Event().wait(A_MOMENT_SECONDS)


@dataclass(frozen=True, slots=True)
class Fault:
    """One class that is broken on purpose."""

    kind: str
    """A key of ``BOOKS_OF``."""
    broken: type
    caught_by: str
    """The name of the clause that is expected to fail."""
    hangs: bool = False
    raises: tuple[type[Exception], ...] = ()
    seen_in: str = ""
    """Where real code had or has it."""

    @property
    def name(self) -> str:
        """The class's name."""
        return self.broken.__name__

    @property
    def sentence(self) -> str:
        """The fault: the first paragraph of the docstring."""
        return " ".join(inspect.cleandoc(self.broken.__doc__ or "").split("\n\n")[0].split())


FAULTS: dict[str, Fault] = {}
"""Every fault by its name, in the order of the modules' import."""


def catalogue(kind: str) -> Callable[..., Callable[[C], C]]:
    """A decorator maker that enters faults of one kind into ``FAULTS``."""

    def fault(
        caught_by: str,
        *,
        hangs: bool = False,
        raises: tuple[type[Exception], ...] = (),
        seen_in: str = "",
    ) -> Callable[[C], C]:
        def enter(broken: C) -> C:
            if broken.__name__ in FAULTS:
                raise ValueError(f"two faults are called {broken.__name__}")
            FAULTS[broken.__name__] = Fault(kind, broken, caught_by, hangs, raises, seen_in)
            return broken

        return enter

    return fault


class KitTarget(Target):
    """The memory backend and store with at most one part replaced, on a clock that is moved."""

    without: Mapping[str, str] = MappingProxyType(
        dict.fromkeys(["durable", "processes"], "it is this process's memory")
    )
    short_ttl_seconds = 5.0
    call_seconds_max = 1.0
    recovery_seconds_max = 1.0

    def __init__(self, part: type | None = None) -> None:
        self.name = "memory" if part is None else part.__name__
        self.now = 1000.0
        self._backend: Any = _part(part, MemoryBackend)
        self._store: Any = _part(part, Store)
        space = _part(part, MemorySpace)
        if issubclass(self._backend, RemoteBackend):
            space = RemoteSpace
        elif issubclass(space, RemoteSpace):
            self._backend = RemoteBackend
        self.space = space(lambda: self.now)
        self.stores = _part(part, StoreSpace)(_part(part, MemoryClient))
        self.made: list[Any] = []
        if isinstance(self.space, RemoteSpace):
            self.server = RemoteServer(self.space)
            self.without = {"processes": "it is this process's memory", "store": "it has none"}

    def connect(self, run_id: str = "job") -> Any:
        return self._backend(self.space, run_id)

    def store(self, run_id: str = "job") -> Any:
        store = self._store(self.stores.client(run_id))
        self.made.append(store)
        return store

    def wipe(self) -> None:
        self.space.wipe()

    def let_pass(self, seconds: float) -> None:
        self.now += seconds

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(SHORT_STEPS_MAX):
            if condition():
                return
            self.let_pass(self.short_ttl_seconds / 10)
        raise AssertionError("waited in vain")

    def close(self) -> None:
        while self.made:
            self.made.pop().close()


def _part(part: type | None, good: type) -> Any:
    return part if part is not None and issubclass(part, good) else good


class StoreSpace:
    """What the stores of all nodes share."""

    def __init__(self, new_client: Callable[[], MemoryClient]) -> None:
        self._new_client = new_client
        self._clients: dict[str, MemoryClient] = {}

    def client(self, run_id: str) -> MemoryClient:
        """The run's key space."""
        if run_id not in self._clients:
            self._clients[run_id] = self._new_client()
        return self._clients[run_id]


class RemoteSpace(MemorySpace):
    """A space that a crash or a pause puts out of reach."""

    answers = True
    crashes = 0

    def pause(self) -> None:
        """Stop answering; whoever waits goes on waiting."""
        with self.changed:
            self.answers = False

    def crash(self) -> None:
        """Stop answering; whoever waits notices."""
        with self.changed:
            self.answers = False
            self.crashes += 1
            self.changed.notify_all()

    def go_on(self) -> None:
        """Answer again."""
        with self.changed:
            self.answers = True
            self.changed.notify_all()


class RemoteBackend(MemoryBackend):
    """The memory backend as behind a connection whose read timeout is zero."""

    _space: RemoteSpace

    @property
    def _run(self) -> Any:
        self.check_reach()
        return super()._run

    def check_reach(self) -> None:
        """Raise while the space does not answer; the caller holds its lock."""
        if not self._space.answers:
            raise RendezvousConnectionError("the space is out of reach")

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        with self._space.changed:
            self.check_reach()
            crashes = self._space.crashes

            def is_over() -> bool:
                found = self.get_state() if self._space.crashes == crashes else None
                return (
                    self._space.crashes != crashes
                    or (found and found[1]) != token
                    or revision not in (None, self._run.revision)
                )

            self._space.changed.wait_for(is_over, max(0.0, timeout_seconds))
            if self._space.crashes != crashes:
                raise RendezvousConnectionError("the connection was lost")
            return super().wait_for_change(token, 0.0, revision)


class RemoteServer(Server):
    """What the kit pauses and kills."""

    technology = "memory"

    def __init__(self, space: RemoteSpace) -> None:
        self._space = space

    @property
    def address(self) -> tuple[str, int]:
        raise NotImplementedError("it is no network service")

    def pause(self) -> None:
        self._space.pause()

    def resume(self) -> None:
        self._space.go_on()

    def kill(self) -> None:
        self._space.crash()

    def restart(self, *, keep_data: bool) -> None:
        if not keep_data:
            self._space.wipe()
        self._space.go_on()


class LossyClient(MemoryClient):
    """Loses the answer to the first try of every change, and recognises what is repeated: a good
    one, from which those derive that do not."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[str, Any] = {}
        self._lost: set[str] = set()

    def once(self, operation: str, change: Callable[[], Any]) -> Any:
        """Make the change unless it has been made, and answer, or lose the answer."""
        with self._changed:
            if operation not in self._answers:
                self._answers[operation] = change()
            self.lose_first(operation)
            return self._answers[operation]

    def lose_first(self, operation: str) -> None:
        """Raise unless the operation's answer has been lost already."""
        if operation not in self._lost:
            self._lost.add(operation)
            raise Unanswered("the answer was lost")

    def set_many(self, pairs: Any, operation: str) -> None:
        self.once(operation, lambda: super(LossyClient, self).set_many(pairs, operation))

    def add(self, key: str, amount: int, operation: str) -> int:
        change = super().add
        total: int = self.once(operation, lambda: change(key, amount, operation))
        return total

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        change = super().compare_set
        value: bytes | None = self.once(
            operation, lambda: change(key, expected, desired, operation)
        )
        return value

    def append(self, key: str, value: bytes, operation: str) -> None:
        change = super().append
        self.once(operation, lambda: change(key, value, operation))

    def delete(self, key: str, operation: str) -> bool:
        change = super().delete
        was_there: bool = self.once(operation, lambda: change(key, operation))
        return was_there

    def queue_push(self, key: str, value: bytes, operation: str) -> None:
        change = super().queue_push
        self.once(operation, lambda: change(key, value, operation))

    def queue_pop(self, key: str, operation: str) -> bytes | None:
        change = super().queue_pop
        value: bytes | None = self.once(operation, lambda: change(key, operation))
        return value


class PollingClient(MemoryClient):
    """Waits as a technology does that cannot push: a good one."""

    wait_for_keys = StoreClient.wait_for_keys
    wait_for_queue = StoreClient.wait_for_queue


@dataclass(frozen=True, slots=True)
class Good:
    """What faults derive from: it must fail no clause of these books."""

    part: type | None
    """What replaces its like in a :class:`KitTarget`; None where nothing does."""
    books: tuple[str, ...]


GOOD = {
    "memory backend": Good(None, ("backend", "roster", "watch")),
    "memory store": Good(None, ("store",)),
    "remote backend": Good(RemoteBackend, ("backend", "roster", "watch")),
    "lossy store": Good(LossyClient, ("store",)),
    "polling store": Good(PollingClient, ("store",)),
}
"""By name."""
