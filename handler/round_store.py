"""The store of one round: what ``RendezvousInfo.store`` is.

It puts the keys of a round below a prefix of any base store, ours or not, and adds what torch's
agent and a store of torch's own cannot do:

* It notices that this node has finished: an agent whose workers are done begins torch's exit
  barrier, which adds to one well-known key.
* It can let that agent go: a node that waits in the exit barrier of a round that will never be
  complete gets ``DistStoreError``, which the agent logs and swallows.
* It has a timeout of its own. torch's agent sets one on this store and forgets to put it back
  after an error; on a shared base store that would be everybody's timeout.
* A wait on a store of torch's own ends when a Python signal handler raises, as it looks again and
  again. There a wait in C++ would hold the main thread until its end.

Lifetime. C++ that holds a store does not keep its Python half alive, and nobody closes the store
of a past round. So Python's references keep a round's store alive, and the
``ROUND_STORES_PINNED_MAX`` of a process that were pinned last live on without any, for C++ that
holds one of those. One more than a process's current round is needed only where several handlers
live in one process.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException

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
    wait_timeout_error,
)

__all__ = ["RoundStore"]

T = TypeVar("T")

EXIT_BARRIER_COUNTER = "torchelastic/agent/terminal_state/num_members"
EXIT_BARRIER_END = "torchelastic/agent/terminal_state/last_member"

ROUND_STORES_PINNED_MAX = 4
POLL_SECONDS_FIRST = 0.001
POLL_SECONDS_LAST = 0.25

_log = logging.getLogger(__name__)
_pinned: deque[RoundStore] = deque(maxlen=ROUND_STORES_PINNED_MAX)


class RoundStore(TorchStore):
    """The keys of ``base`` below ``prefix + "/"``, as a store with a timeout of its own.

    ``on_exit_barrier`` is called, in the thread that calls ``add``, before this node is counted in
    torch's exit barrier; what it raises is logged and keeps nobody from the barrier. ``keep`` is
    held as long as the store.

    A base that is :class:`rdzv.ports.Namespaced` is asked for the namespace and waits by itself.
    Any other is cloned, for a connection of its own where it has one, wrapped in torch's
    PrefixStore, and polled with growing pauses of up to ``POLL_SECONDS_LAST``; its timeout is not
    touched. Errors of either are passed on.
    """

    def __init__(
        self,
        base: dist.Store,
        prefix: str,
        *,
        on_exit_barrier: Callable[[], None],
        keep: object = None,
        _original: RoundStore | None = None,
    ) -> None:
        super().__init__()
        self._base = base
        self._prefix = prefix
        self._on_exit_barrier = on_exit_barrier
        self._keep = keep
        self._release: _Release = _Release() if _original is None else _original._release
        self._clones: list[RoundStore] = []
        self._waits_itself = isinstance(base, Namespaced)
        self._whole: Any = None
        self._inner: Any  # torch's stubs lack half of what a store can do
        if isinstance(base, Namespaced):
            self._inner = base.namespace(prefix)
            if isinstance(self._inner, Closable):
                # Else each round would leave a pinned namespace behind in the base store.
                weakref.finalize(self, self._inner.close).atexit = False
        else:
            self._whole = _clone(base)
            self._inner = dist.PrefixStore(prefix, self._whole)
        self.set_timeout(self._inner.timeout if _original is None else _original.timeout)
        if _original is not None:
            _original._clones.append(self)

    def pin(self) -> None:
        """Live on for a while even if only C++ holds this store; see "Lifetime" above."""
        _pinned.append(self)

    def release(self, reason: str) -> None:
        """Let whoever waits for the end of the exit barrier go, now and later, with
        ``DistStoreError``, unless the barrier is complete. May be called from any thread."""
        self._release.reason = reason
        self._release.event.set()

    def clone(self) -> RoundStore:
        """The same round with a timeout of its own; ``release`` holds for both. A clone lives as
        long as what it was cloned from, since C++ may be all that holds it."""
        return RoundStore(
            self._base,
            self._prefix,
            on_exit_barrier=self._on_exit_barrier,
            keep=self._keep,
            _original=self,
        )

    def set(self, key: Text, value: Text) -> None:
        """Write the value under the key."""
        self._within_timeout().set(key, value)

    def get(self, key: Text) -> bytes:
        """The key's value, once it has one."""
        self._await_before_reading([key_text(key)])
        value: bytes = self._within_timeout().get(key)
        return value

    def add(self, key: Text, amount: int, /) -> int:
        """Add to the number under the key and return the sum."""
        if key_text(key) == EXIT_BARRIER_COUNTER:
            try:
                self._on_exit_barrier()
            except SignalException:
                raise
            except Exception:
                _log.warning("could not note that this node has finished", exc_info=True)
        total: int = self._within_timeout().add(key, amount)
        return total

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        """As :meth:`torch.distributed.Store.compare_set`."""
        value: bytes = self._within_timeout().compare_set(key, expected_value, desired_value)
        return value

    def append(self, key: Text, value: Text) -> None:
        """Put the bytes behind the key's value."""
        self._within_timeout().append(key, value)

    def check(self, keys: Iterable[Text]) -> bool:
        """Whether all keys are there now. Never waits for one."""
        return bool(self._within_timeout().check(key_list(keys)))

    def wait(self, keys: Iterable[Text], timeout: timedelta | float | None = None) -> None:
        """Return once all keys are there. ``timeout`` None means the store's own.

        Raises ``DistStoreError`` after it, or when :meth:`release` ends the exit barrier.
        """
        names, deadline = key_list(keys), self._deadline(timeout)
        if self._waits_itself and EXIT_BARRIER_END not in names:
            inner = self._within_timeout()
            inner.wait(names, self.timeout if timeout is None else timeout)
        else:
            self._await(names, deadline)

    def delete_key(self, key: Text) -> bool:
        """Remove the key. Return what the base store says of whether it was there."""
        return bool(self._within_timeout().delete_key(key))

    def num_keys(self) -> int:
        """How many keys the round holds; of a base that cannot list its keys, how many it holds."""
        try:
            return len(self.list_keys())
        except (NotImplementedError, AttributeError):  # older releases of torch lack list_keys
            return int(self._within_timeout().num_keys())

    def list_keys(self) -> list[str]:
        """The keys of the round, without the prefix."""
        if self._waits_itself:
            return list(self._within_timeout().list_keys())
        # torch's PrefixStore takes "round1" for a prefix of "round10/key".
        prefix = f"{self._prefix}/"
        keys: list[str] = self._whole.list_keys()
        return [key[len(prefix) :] for key in keys if key.startswith(prefix)]

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        """The values of all keys, in order, once all are there."""
        names = key_list(keys)
        self._await_before_reading(names)
        return list(self._within_timeout().multi_get(names))

    def peek(self, keys: Iterable[Text]) -> list[bytes | None]:
        """The values of all keys, in order; where one is absent, at least of that one None. Never
        waits for one."""
        names, inner = key_list(keys), self._within_timeout()
        if isinstance(inner, Peekable):
            return inner.peek(names)
        return list(inner.multi_get(names)) if inner.check(names) else [None] * len(names)

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        """Write all values under their keys. Raises ``ValueError`` for unequal lengths."""
        self._within_timeout().multi_set(*keys_and_values(keys, values))

    def has_extended_api(self) -> bool:
        """Whether the base store has ``append``, ``multi_get`` and ``multi_set`` of its own."""
        return bool(self._inner.has_extended_api())

    def queue_push(self, key: Text, value: Text) -> None:
        """Put the value at the end of the key's queue."""
        self._within_timeout().queue_push(key, value)

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the head of the key's queue; where ``block`` is true, once it has one."""
        name, deadline = key_text(key), self._deadline()
        inner = self._within_timeout()
        if self._waits_itself or not block:
            value: bytes = inner.queue_pop(name, block)
            return value

        def pop() -> bytes | None:
            try:
                head: bytes = inner.queue_pop(name, False)
                return head
            except QueueEmptyError:
                return None

        return self._poll(pop, [name], deadline)

    def queue_len(self, key: Text) -> int:
        """How many values the key's queue holds."""
        return int(self._within_timeout().queue_len(key))

    def _within_timeout(self) -> Any:
        """The inner store with this store's timeout, where it is this store's alone."""
        if self._waits_itself:
            self._inner.set_timeout(self.timeout)
        return self._inner

    def _await_before_reading(self, keys: list[str]) -> None:
        """Where the inner store's own wait cannot be relied on, wait before it is asked to read.

        A key that is deleted between the two is waited for by the inner store after all.
        """
        if not self._waits_itself or EXIT_BARRIER_END in keys:
            self._await(keys, self._deadline())

    def _await(self, keys: list[str], deadline: Deadline) -> None:
        inner = self._within_timeout()
        self._poll(lambda: inner.check(keys) or None, keys, deadline)

    def _poll(self, look: Callable[[], T | None], keys: list[str], deadline: Deadline) -> T:
        """Look with growing pauses until there is something to see."""
        releasable = EXIT_BARRIER_END in keys
        pauses = Backoff(POLL_SECONDS_FIRST, POLL_SECONDS_LAST)
        while True:
            # The order matters: what came in time counts, even if the release came too.
            seen = look()
            if seen is not None:
                return seen
            if releasable and self._release.event.is_set():
                raise dist.DistStoreError(f"released from the exit barrier: {self._release.reason}")
            if deadline.passed:
                raise wait_timeout_error(deadline, keys, f"the round's store {self._prefix!r}")
            if releasable:
                self._release.event.wait(pauses.pause_seconds(deadline))
            else:
                pauses.sleep(deadline)


class _Release:
    """Shared by a round's store and its clones."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reason = ""


def _clone(base: dist.Store) -> dist.Store:
    """The base store with a timeout, and where it has one a connection, of its own.

    A third party's store need not know how to clone itself, and older releases of torch do not
    ask for it: such a store is used as it is.
    """
    clone = getattr(base, "clone", None)
    if clone is None:
        return base
    try:
        copy: dist.Store = clone()
    except RuntimeError as error:
        if isinstance(error, dist.DistError):
            raise
        return base  # torch: 'Tried to call pure virtual function "clone"'
    return copy
