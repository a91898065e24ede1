"""torch's Store contract, implemented once over few primitives.

A technology supplies a :class:`StoreClient`, whose primitives cost one round trip each;
:class:`Store` makes of it what ``torch.distributed`` expects. The reference is what torch's own
TCPStore and HashStore do; where those differ or hang, the choice made here is in brackets.

* ``get``, ``wait``, ``multi_get`` and ``queue_pop`` block until the store's timeout, which is read
  anew at each call, and then raise ``DistStoreError`` with the word "timeout" and the keys. A
  timeout of zero or less looks once [HashStore waits for ever]. A Python signal handler that
  raises ends a wait at once, also when C++ called.
* A request that was not answered is repeated with jittered pauses within the same timeout; only
  then ``DistNetworkError`` is raised. Torch's own callers cannot bear an error where a repeat
  would do: gloo's other ranks would hang.
* ``add`` counts in decimal ASCII, in one key space with ``set``. What is no number, or would leave
  64 bits, raises ``ValueError``, changes nothing, and the store stays usable [torch's wrap round].
* Values are ``bytes`` of up to ``value_bytes_max``, keys are any text of up to ``key_bytes_max``
  bytes of UTF-8, the prefix included; beyond it ``ValueError``, before anything is sent.
* Queues have a key space of their own. ``check`` and ``wait`` see a queue that is not empty;
  ``num_keys``, ``list_keys`` and ``delete_key`` do not see queues.

Lifetime. C++ that holds a store does not keep its Python half alive: the half would be collected
and every later call would fail inside torch. So a store pins itself when it is made. ``close()``
of a clone or namespace ends its own pin; ``close()`` of the store they were made from ends the
pins of all of them and closes the client. What Python still refers to works on after that, and
connects anew. A namespace or clone costs about a kilobyte and no connection: they share one
client.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import SupportsIndex, TypeVar

import torch.distributed as dist

from rdzv.errors import mask_secrets
from rdzv.ports import Closable, Namespaced, Peekable
from rdzv.torch_store import (
    Backoff,
    Deadline,
    QueueEmptyError,
    Text,
    TorchStore,
    key_list,
    key_text,
    keys_and_values,
    shown_keys,
    value_bytes,
    wait_timeout_error,
    whole_number,
)

__all__ = [
    "Backoff",
    "Store",
    "StoreClient",
    "Unanswered",
    "counter_after",
    "current_deadline",
]

T = TypeVar("T")

current_deadline: ContextVar[Deadline | None] = ContextVar("current_deadline", default=None)
"""The end of the call of a store that makes a primitive's request; None outside of one.

A client may read it, so that a stalled server does not hold the caller beyond it, and so that what
it keeps of an operation is kept for as long as that may be repeated."""

REQUEST_WAIT_SECONDS_MAX = 3600.0
"""The longest wait a client is ever asked for; longer ones are asked for again."""

RETRY_SECONDS_FIRST = 0.02
RETRY_SECONDS_LAST = 2.0


class Unanswered(Exception):
    """A request was not answered, and making it again, with the same operation id, is right.

    The text says why; :class:`Store` shows it, with secrets masked, when time is up.
    """


class StoreClient(ABC):
    """A technology's part of a store: one key space, shared by any number of stores and threads.

    Keys are complete (the prefix is applied), any text, never twice in one call. Values are bytes
    within ``value_bytes_max``. Each primitive is atomic, is answered in one round trip (several
    only where the technology limits the size of a request) and returns or raises within the
    client's own request timeout, so that a stalled server cannot hold a caller beyond the store's.

    Errors. A primitive raises :class:`Unanswered` when it may be asked again: reads always, once
    the connection is lost; a mutation only where the repeat cannot be applied twice. For that a
    mutation gets ``operation``, an id that is new for every call of the store and the same in its
    repeats. Either the client knows that the first try was not applied (nothing was sent, the
    transaction was rolled back), or it recognises the id: it keeps it beside the data, in the same
    transaction, and gives the first answer again. A client that can do neither raises
    ``dist.DistNetworkError`` itself. It raises no exception of its driver's.

    Threads. All methods are called from any thread, also from threads of C++ that Python has never
    seen and that never come back: no ``threading.local``. They let go of the GIL while blocked and
    let Python signal handlers run.
    """

    endpoint: str = "store"
    """For messages: what the user would recognise. Secrets are masked by the store."""
    value_bytes_max: int = 64 * 1024 * 1024
    key_bytes_max: int = 4096
    poll_seconds_first: float = 0.001
    poll_seconds_last: float = 0.1

    @abstractmethod
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of all keys at one moment, in order; None for a key that has none."""

    @abstractmethod
    def set_many(self, pairs: Sequence[tuple[str, bytes]], operation: str) -> None:
        """Write all pairs, or none."""

    @abstractmethod
    def add(self, key: str, amount: int, operation: str) -> int:
        """Add to the decimal number under the key, absent counting as 0, and return the sum.

        Raises ``ValueError`` and changes nothing where the value is no decimal number or the sum
        would leave 64 bits; see :func:`counter_after`.
        """

    @abstractmethod
    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        """Write ``desired`` where the value is ``expected``, or where there is no value and
        ``expected`` is empty. Return the value after that, None where there is still none."""

    @abstractmethod
    def append(self, key: str, value: bytes, operation: str) -> None:
        """Put the bytes behind the key's value, absent counting as empty.

        Raises ``ValueError`` and changes nothing where the result would exceed
        ``value_bytes_max``.
        """

    @abstractmethod
    def delete(self, key: str, operation: str) -> bool:
        """Remove the key's value. Return whether there was one."""

    @abstractmethod
    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those keys, in order, that have neither a value nor a queue that is not empty."""

    @abstractmethod
    def count_keys(self, prefix: str) -> int:
        """How many keys that begin with ``prefix`` have a value."""

    @abstractmethod
    def list_keys(self, prefix: str) -> list[str]:
        """The keys that begin with ``prefix`` and have a value, complete, in any order."""

    @abstractmethod
    def queue_push(self, key: str, value: bytes, operation: str) -> None:
        """Put the value at the end of the key's queue."""

    @abstractmethod
    def queue_pop(self, key: str, operation: str) -> bytes | None:
        """Take the value at the head of the key's queue; None where it is empty."""

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """How many values the key's queue holds; 0 for one never used."""

    @abstractmethod
    def close(self) -> None:
        """Give up connections and threads. Never raises; later calls open them anew."""

    def check_key_size(self, key: str) -> None:
        """Raises ``ValueError`` for a key that is longer than ``key_bytes_max``."""
        size_bytes = len(key) if key.isascii() else len(key.encode())
        if size_bytes > self.key_bytes_max:
            raise ValueError(
                f"key {shown_keys([key])} has {size_bytes} bytes: on "
                f"{mask_secrets(self.endpoint)} key_bytes_max is {self.key_bytes_max}"
            )

    def check_value_size(self, key: str, value: bytes) -> None:
        """Raises ``ValueError`` for a value that is longer than ``value_bytes_max``."""
        if len(value) > self.value_bytes_max:
            raise ValueError(
                f"value for {shown_keys([key])} has {len(value)} bytes: on "
                f"{mask_secrets(self.endpoint)} value_bytes_max is {self.value_bytes_max}"
            )

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        """Wait until :meth:`missing` would return nothing; return what it returned last.

        Looks at least once, before it sleeps, and does not miss what changed in between. It may
        come back early, for instance after ``Unanswered``, but not at once: the store asks again.
        Override it where the technology can push.
        """
        return self._poll(lambda: self.missing(keys), lambda missing: not missing, timeout_seconds)

    def wait_for_queue(self, key: str, timeout_seconds: float) -> bool:
        """Wait until the queue is not empty, in the manner of :meth:`wait_for_keys`."""
        return self._poll(lambda: self.queue_len(key) > 0, bool, timeout_seconds)

    def _poll(self, look: Callable[[], T], done: Callable[[T], bool], timeout_seconds: float) -> T:
        deadline = Deadline(timeout_seconds)
        pauses = Backoff(self.poll_seconds_first, self.poll_seconds_last)
        while True:
            seen = look()
            if done(seen) or deadline.passed:
                return seen
            pauses.sleep(deadline)


def counter_after(key: str, value: bytes | None, amount: int) -> int:
    """What :meth:`StoreClient.add` makes of a value, for clients that compute it themselves.

    >>> counter_after("k", None, 5), counter_after("k", b"-3", 1)
    (5, -2)
    """
    digits = b"0" if value is None else value
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise ValueError(f"cannot add to {shown_keys([key])}: its value is no decimal number")
    total = int(digits) + amount
    if not -(2**63) <= total < 2**63:
        raise ValueError(f"cannot add {amount} to {shown_keys([key])}: the sum leaves 64 bits")
    return total


_pinned: set[Store] = set()
"""No lock: each use is one atomic operation. A garbage collection may close a store in the midst
of any of them, and would then wait for a lock that its own thread holds."""


class Store(TorchStore):
    """A ``torch.distributed.Store`` over a :class:`StoreClient`; see the head of this file.

    ``timeout`` None means torch's default of 300 seconds. The store is also
    :class:`rdzv.ports.Namespaced`, ``Peekable`` and ``Closable`` (registered, since the
    metaclasses of torch's class and of an ABC do not agree).
    """

    def __init__(self, client: StoreClient, *, timeout: timedelta | None = None) -> None:
        super().__init__()
        self._client = client
        self._prefix = ""
        self._root: Store = self
        if timeout is not None:
            self.set_timeout(timeout)
        _pinned.add(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint!r}, prefix={self._prefix!r})"

    @property
    def endpoint(self) -> str:
        """Where the data is, with secrets masked."""
        return mask_secrets(self._client.endpoint)

    def clone(self) -> Store:
        """The same keys with a timeout of its own, by the same client."""
        return self._view(self._prefix)

    def namespace(self, prefix: str) -> Store:
        """The keys below ``prefix + "/"``, with a timeout of its own, by the same client."""
        return self._view(f"{self._prefix}{key_text(prefix)}/")

    def close(self) -> None:
        """End the pin of this store; see "Lifetime" at the head of this file. Never raises."""
        _pinned.discard(self)
        if self._root is self:
            for store in list(_pinned):
                if store._root is self:
                    _pinned.discard(store)
            self._client.close()

    def set(self, key: Text, value: Text) -> None:
        """Write the value under the key."""
        pairs = [(self._key(key), self._value(key, value))]
        operation = _operation()
        self._ask("set", lambda: self._client.set_many(pairs, operation))

    def get(self, key: Text) -> bytes:
        """The key's value, once it has one."""
        return self._fetch("get", [key_text(key)])[0]

    def add(self, key: Text, amount: SupportsIndex, /) -> int:
        """Add to the number under the key and return the sum."""
        name, number, operation = self._key(key), whole_number(amount, "amount"), _operation()
        return self._ask("add", lambda: self._client.add(name, number, operation))

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        """Write ``desired_value`` where the key holds ``expected_value``; an absent key is written
        where that is empty. Return the value after that, ``expected_value`` where there is none."""
        name, operation = self._key(key), _operation()
        expected, desired = value_bytes(expected_value), self._value(key, desired_value)
        value = self._ask(
            "compare_set", lambda: self._client.compare_set(name, expected, desired, operation)
        )
        return expected if value is None else value

    def append(self, key: Text, value: Text) -> None:
        """Put the bytes behind the key's value."""
        name, chunk, operation = self._key(key), self._value(key, value), _operation()
        self._ask("append", lambda: self._client.append(name, chunk, operation))

    def check(self, keys: Iterable[Text]) -> bool:
        """Whether all keys are there now. Never waits for one."""
        full = [self._key(key) for key in dict.fromkeys(key_list(keys))]
        return not full or not self._ask("check", lambda: self._client.missing(full))

    def wait(self, keys: Iterable[Text], timeout: timedelta | float | None = None) -> None:
        """Return once all keys are there. ``timeout`` None means the store's own."""
        self._wait(key_list(keys), self._deadline(timeout))

    def delete_key(self, key: Text) -> bool:
        """Remove the key. Return whether it was there."""
        name, operation = self._key(key), _operation()
        return self._ask("delete_key", lambda: self._client.delete(name, operation))

    def num_keys(self) -> int:
        """How many keys this store, or namespace, holds."""
        return self._ask("num_keys", lambda: self._client.count_keys(self._prefix))

    def list_keys(self) -> list[str]:
        """The keys this store, or namespace, holds, sorted and without the prefix."""
        full = self._ask("list_keys", lambda: self._client.list_keys(self._prefix))
        return sorted(key[len(self._prefix) :] for key in full)

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        """The values of all keys, in order, once all are there."""
        return self._fetch("multi_get", key_list(keys))

    def peek(self, keys: Iterable[Text]) -> list[bytes | None]:
        """The values of all keys, in order, None for an absent one. Never waits for one."""
        full = [self._key(key) for key in key_list(keys)]
        names = list(dict.fromkeys(full))
        if not names:
            return []
        found = self._ask("peek", lambda: self._client.get_many(names))
        values = dict(zip(names, found, strict=True))
        return [values[name] for name in full]

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        """Write all values under their keys at once. Raises ``ValueError`` for unequal lengths."""
        names, contents = keys_and_values(keys, values)
        written = {
            self._key(name): self._value(name, value)
            for name, value in zip(names, contents, strict=True)
        }
        operation = _operation()
        if written:
            self._ask("multi_set", lambda: self._client.set_many(list(written.items()), operation))

    def has_extended_api(self) -> bool:
        """True: ``append``, ``multi_get`` and ``multi_set`` are one request each."""
        return True

    def queue_push(self, key: Text, value: Text) -> None:
        """Put the value at the end of the key's queue."""
        name, content, operation = self._key(key), self._value(key, value), _operation()
        self._ask("queue_push", lambda: self._client.queue_push(name, content, operation))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the head of the key's queue, once it has one.

        Raises ``QueueEmptyError`` at once where the queue is empty and ``block`` is False.
        """
        name, deadline = self._key(key), self._deadline()
        value = self._pop(name, deadline)
        while value is None:
            if not block:
                raise QueueEmptyError(f"queue {shown_keys([key_text(key)])} is empty")
            if not self._wait_for_queue(name, deadline):
                raise wait_timeout_error(deadline, [key_text(key)], self.endpoint)
            value = self._pop(name, deadline)
        return value

    def queue_len(self, key: Text) -> int:
        """How many values the key's queue holds."""
        name = self._key(key)
        return self._ask("queue_len", lambda: self._client.queue_len(name))

    def _view(self, prefix: str) -> Store:
        view = Store(self._client, timeout=self.timeout)
        view._prefix = prefix
        view._root = self._root
        return view

    def _key(self, key: object) -> str:
        full = self._prefix + key_text(key)
        self._client.check_key_size(full)
        return full

    def _value(self, key: object, value: object) -> bytes:
        content = value_bytes(value)
        self._client.check_value_size(key_text(key), content)
        return content

    def _fetch(self, action: str, keys: list[str]) -> list[bytes]:
        """The values of all keys, once all are there."""
        full = {self._key(key): key for key in keys}
        names, deadline, waited = list(full), self._deadline(), False
        pauses = Backoff(self._client.poll_seconds_first, self._client.poll_seconds_last)
        while names:
            values = self._ask(action, lambda: self._client.get_many(names), deadline)
            found = {full[n]: v for n, v in zip(names, values, strict=True) if v is not None}
            absent = [key for key in full.values() if key not in found]
            if not absent:
                return [found[key] for key in keys]
            if waited:  # the key has gone again, or is a queue's, which a wait sees and a get not
                if deadline.passed:
                    raise wait_timeout_error(deadline, absent, self.endpoint)
                pauses.sleep(deadline)
            self._wait(absent, deadline)
            waited = True
        return []

    def _wait(self, keys: list[str], deadline: Deadline) -> None:
        full = {self._key(key): key for key in keys}
        names = list(full)
        while names:
            missing = self._ask(
                "wait",
                lambda: self._client.wait_for_keys(
                    names, deadline.remaining_seconds(REQUEST_WAIT_SECONDS_MAX)
                ),
                deadline,
            )
            if not missing:
                return
            if deadline.passed:
                raise wait_timeout_error(deadline, [full[name] for name in missing], self.endpoint)

    def _pop(self, name: str, deadline: Deadline) -> bytes | None:
        operation = _operation()
        return self._ask("queue_pop", lambda: self._client.queue_pop(name, operation), deadline)

    def _wait_for_queue(self, name: str, deadline: Deadline) -> bool:
        def request() -> bool:
            wait_seconds = deadline.remaining_seconds(REQUEST_WAIT_SECONDS_MAX)
            return self._client.wait_for_queue(name, wait_seconds)

        while not self._ask("queue_pop", request, deadline):
            if deadline.passed:
                return False
        return True

    def _ask(self, action: str, request: Callable[[], T], deadline: Deadline | None = None) -> T:
        """Make the request until it is answered, or the deadline, the store's own, is over."""
        limit = deadline or self._deadline()
        pauses = Backoff(RETRY_SECONDS_FIRST, RETRY_SECONDS_LAST)
        repeated = False  # at least once: a short wait must bear a connection that has gone stale
        while True:
            token = current_deadline.set(limit)
            try:
                return request()
            except Unanswered as error:
                if limit.passed and repeated:
                    raise dist.DistNetworkError(
                        f"{action}: no answer from {self.endpoint} within the timeout of "
                        f"{limit.seconds:g} s: {mask_secrets(str(error))}. Look whether it runs "
                        "and can be reached from here, or raise the store's timeout."
                    ) from error
            finally:
                current_deadline.reset(token)
            pauses.sleep(limit)
            repeated = True


def _operation() -> str:
    return uuid.uuid4().hex


Namespaced.register(Store)
Peekable.register(Store)
Closable.register(Store)
