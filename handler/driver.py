"""Performs the protocol's effects on a real backend.

Rules:

* One place where bytes meet records, and where a backend's exceptions become ours: whatever it
  raises that its contract does not name is taken for a lost connection, with its text, so that a
  fault in a driver costs a retry and not a silent thread.
* Nothing is decided here, and nothing is repeated: an effect is performed once and either answered
  or failed.
* A :class:`Driver` that was stopped performs nothing any more but a last ``withdraw``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.adapters import FramedBackend, PollingWatch
from rdzv.codec import decode_entry, decode_state, encode_state
from rdzv.effects import (
    Announce,
    Beat,
    Effect,
    Found,
    ListRoster,
    Pause,
    Prepare,
    Read,
    Swap,
    Wait,
    Withdraw,
)
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    mask_secrets,
)
from rdzv.ports import FirstLook, Located, Roster, Token, Watch
from rdzv.state import Present, State

T = TypeVar("T")

TOMBSTONE_WINDOWS = 2
"""For how many liveness windows a withdrawn entry can be told from one that vanished."""


ANNOUNCING_WAIT_SECONDS = 1.0


class _Decoding:
    """Whose turn it is to decode a document; nobody's in a forked child."""

    lock = threading.Lock()

    @classmethod
    def renew(cls) -> None:
        cls.lock = threading.Lock()


os.register_at_fork(after_in_child=_Decoding.renew)


class Stopped(Exception):
    """The driver was stopped while it performed steps."""


class Driver:
    """A backend as the protocol sees it. Safe to use from any thread. ``prepare`` is called for
    :class:`Prepare` and answers as described there, well within a keep-alive interval, or raises
    :class:`Stopped` when nobody waits for the round."""

    def __init__(
        self,
        backend: RendezvousBackend,
        liveness_window_seconds: float,
        prepare: Callable[[State], int] | None = None,
    ) -> None:
        self._prepare = prepare
        self._window = liveness_window_seconds
        self.endpoint = backend.endpoint if isinstance(backend, Located) else ""
        self.has_roster = isinstance(backend, Roster)
        if isinstance(backend, Roster):
            self._roster: Roster = backend
        else:
            backend = framed = FramedBackend(backend)
            self._roster = framed
        self._backend = backend
        self._watch = backend if isinstance(backend, Watch) else PollingWatch(backend)
        self._stopped = threading.Event()
        self._announcing = threading.Lock()

    def stop(self) -> None:
        """Perform no further effect."""
        self._stopped.set()

    def run(self, steps: Generator[Effect, Any, T]) -> T:
        """Perform the steps of a protocol generator and return its result.

        Raises what the generator raises, and :class:`Stopped` after :meth:`stop`.
        """
        answer: Any = None
        error: RendezvousError | None = None
        while True:
            try:
                effect = steps.throw(error) if error is not None else steps.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            if self._stopped.is_set():
                steps.close()
                raise Stopped
            error = None
            try:
                answer = self.perform(effect)
            except RendezvousError as failure:
                error = failure

    def perform(self, effect: Effect) -> Any:
        """The answer to one effect, as :mod:`rdzv.effects` describes it."""
        try:
            return self._perform(effect)
        except (RendezvousConnectionError, RendezvousStateError, Stopped):
            raise
        except Exception as error:
            where = f" at {self.endpoint}" if self.endpoint else ""
            raise RendezvousConnectionError(
                f"The rendezvous backend{where} failed with "
                f"{type(error).__name__}: {mask_secrets(str(error))}."
            ) from error

    def withdraw(self, node_id: str) -> None:
        """Take a node's entry back, even after :meth:`stop`."""
        # An announcement under way must not bring the entry back; one that hangs must not hold
        # whoever leaves.
        locked = self._announcing.acquire(timeout=ANNOUNCING_WAIT_SECONDS)
        try:
            self._take_back(node_id)
        finally:
            if locked:
                self._announcing.release()

    def _take_back(self, node_id: str) -> None:
        self._roster.withdraw(node_id, TOMBSTONE_WINDOWS * self._window)

    def _perform(self, effect: Effect) -> Any:
        if isinstance(effect, Beat):
            return self._roster.beat(effect.node_id, self._window, effect.question)
        if isinstance(effect, Wait):
            found = self._watch.wait_for_change(
                effect.token, effect.timeout_seconds, effect.revision
            )
            return None if found is None else _found(found)
        if isinstance(effect, Read):
            if effect.watches and isinstance(self._backend, FirstLook):
                return _found(self._backend.look_and_watch())
            return _found(self._backend.get_state())
        if isinstance(effect, Swap):
            return self._swap(effect)
        if isinstance(effect, Announce):
            with self._announcing:
                if self._stopped.is_set():
                    raise Stopped
                return self._roster.announce(effect.entry, self._window, effect.question)
        if isinstance(effect, ListRoster):
            return self._list()
        if isinstance(effect, Withdraw):
            return self.withdraw(effect.node_id)
        if isinstance(effect, Pause):
            self._stopped.wait(effect.seconds)
            return None
        if isinstance(effect, Prepare):
            return 0 if self._prepare is None else self._prepare(effect.state)
        raise TypeError(f"unknown effect {effect!r}")

    def _swap(self, effect: Swap) -> Found:
        answer = self._backend.set_state(encode_state(effect.state), effect.token)
        if answer is None:
            return _found(self._backend.get_state())
        data, token, swapped = answer
        return Found(_decoded(data), token, swapped)

    def _list(self) -> tuple[tuple[Present, ...], frozenset[str]]:
        rows = self._roster.entries()
        present = tuple(
            Present(decode_entry(row.entry.data), row.proven) for row in rows if not row.withdrawn
        )
        return present, frozenset(row.entry.node_id for row in rows if row.withdrawn)


def _found(answer: tuple[bytes, Token] | None) -> Found:
    if answer is None:
        return Found(None, None)
    data, token = answer
    return Found(_decoded(data), token)


def _decoded(data: bytes) -> State:
    """One at a time: threads that are woken together would all decode what one can for all."""
    with _Decoding.lock:
        return decode_state(data)
