"""Recording what concurrent clients do, for :func:`rdzv.conformance.linearizability.check`.

::

    recorder = Recorder()
    recorder.call("add", "k", (1,), lambda: store.add("k", 1))      # anything, from any thread
    RecordedStore(store, recorder).add("k", 1)                      # the same, shorter
    assert check(recorder.history(), Value()) is None
    assert_linearizable(recorder.history())                         # the same, shows the reason

A call that raises is recorded with an unknown outcome, and so is one that has not returned when
the history is taken. The kinds, arguments and answers are those that the models name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rdzv.conformance.linearizability import (
    UNKNOWN,
    Document,
    Model,
    Operation,
    Queue,
    Value,
    check,
)
from rdzv.torch_store import QueueEmptyError

T = TypeVar("T")

STATE_KEY = "state"
"""The key under which calls of a backend are recorded."""


class Call:
    """An operation that may still be under way."""

    __slots__ = ("answer", "answered", "arguments", "called", "client", "error", "key", "kind")

    def __init__(self, client: str, kind: str, key: str, arguments: tuple[Any, ...]) -> None:
        self.client, self.kind, self.key, self.arguments = client, kind, key, arguments
        self.answer: Any = UNKNOWN
        self.answered: int | None = None
        self.error = ""
        self.called = time.monotonic_ns()

    def operation(self) -> Operation:
        # The time of the answer is written last, so with it the answer is there.
        answered = self.answered
        answer = UNKNOWN if answered is None else self.answer
        return Operation(
            self.client,
            self.kind,
            self.key,
            self.arguments,
            answer,
            self.called,
            answered,
            self.error,
        )


class Recorder:
    """A history in the making, used by any number of threads. Costs about a microsecond a call."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def call(
        self,
        kind: str,
        key: str,
        arguments: tuple[Any, ...],
        function: Callable[[], T],
        client: str = "",
    ) -> T:
        """Make the call and record it. Returns what it returns and raises what it raises."""
        client = client or threading.current_thread().name
        call = Call(client, kind, key, arguments)
        # Appending to a list is atomic. It comes first: a call that never returns is recorded.
        self._calls.append(call)
        self.begun(call)
        try:
            answer = function()
        except BaseException as error:
            call.error = f"{type(error).__name__}: {error}"
            raise
        answered = time.monotonic_ns()
        call.answer = answer
        call.answered = answered
        self.ended(call)
        return answer

    def begun(self, call: Call) -> None:
        """For those who pass on what is recorded: a call is about to be made."""

    def ended(self, call: Call) -> None:
        """For those who pass on what is recorded: a call was answered."""

    def history(self) -> list[Operation]:
        """Everything recorded so far."""
        return [call.operation() for call in list(self._calls)]


class RecordedBackend:
    """A backend whose calls of the document are recorded."""

    def __init__(self, backend: Any, recorder: Recorder) -> None:
        self._backend = backend
        self._recorder = recorder

    def get_state(self) -> tuple[bytes, Any] | None:
        """As torch's."""
        answer: tuple[bytes, Any] | None = self._recorder.call(
            "get_state", STATE_KEY, (), self._backend.get_state
        )
        return answer

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """As torch's."""
        answer: tuple[bytes, Any, bool] | None = self._recorder.call(
            "set_state", STATE_KEY, (state, token), lambda: self._backend.set_state(state, token)
        )
        return answer


class RecordedStore:
    """A store whose calls are recorded. Queues have names of their own, so ``q`` is recorded as
    ``queue q``."""

    def __init__(self, store: Any, recorder: Recorder) -> None:
        self._store = store
        self._recorder = recorder

    def set(self, key: str, value: bytes) -> None:
        """As torch's."""
        self._recorder.call("set", key, (value,), lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """As torch's. An error is an unknown outcome, even that of a wait in vain."""
        answer: bytes = self._recorder.call("get", key, (), lambda: self._store.get(key))
        return answer

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As torch's."""
        answer: bytes = self._recorder.call(
            "compare_set",
            key,
            (expected, desired),
            lambda: self._store.compare_set(key, expected, desired),
        )
        return answer

    def add(self, key: str, amount: int) -> int:
        """As torch's."""
        answer: int = self._recorder.call(
            "add", key, (amount,), lambda: self._store.add(key, amount)
        )
        return answer

    def append(self, key: str, value: bytes) -> None:
        """As torch's."""
        self._recorder.call("append", key, (value,), lambda: self._store.append(key, value))

    def delete(self, key: str) -> bool:
        """As torch's ``delete_key``."""
        answer: bool = self._recorder.call("delete", key, (), lambda: self._store.delete_key(key))
        return answer

    def check(self, key: str) -> bool:
        """As torch's, for one key."""
        answer: bool = self._recorder.call("check", key, (), lambda: self._store.check([key]))
        return answer

    def push(self, key: str, value: bytes) -> None:
        """As torch's ``queue_push``."""
        self._recorder.call(
            "push", f"queue {key}", (value,), lambda: self._store.queue_push(key, value)
        )

    def pop(self, key: str) -> bytes | None:
        """As torch's ``queue_pop(key, False)``, with None for an empty queue."""
        return self._recorder.call("pop", f"queue {key}", (), lambda: self._popped(key))

    def len(self, key: str) -> int:
        """As torch's ``queue_len``."""
        answer: int = self._recorder.call(
            "len", f"queue {key}", (), lambda: self._store.queue_len(key)
        )
        return answer

    def _popped(self, key: str) -> bytes | None:
        try:
            value: bytes = self._store.queue_pop(key, False)
        except QueueEmptyError:
            return None
        return value


MODELS: tuple[tuple[type[Model], frozenset[str]], ...] = (
    (Document, frozenset({"get_state", "set_state"})),
    (Value, frozenset({"set", "get", "compare_set", "add", "append", "delete", "check"})),
    (Queue, frozenset({"push", "pop", "len"})),
)


def assert_linearizable(history: Iterable[Operation]) -> None:
    """Fail with the explanation unless the calls of a backend and a store are linearizable."""
    operations = list(history)
    unknown = {each.kind for each in operations}.difference(*(kinds for _, kinds in MODELS))
    assert not unknown, f"no model knows {sorted(unknown)}"
    for model, kinds in MODELS:
        problem = check([each for each in operations if each.kind in kinds], model())
        assert problem is None, problem
