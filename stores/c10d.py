"""The backends ``tcpstore`` and ``filestore``, and their stores: torch's own, within the contract.

A ``TCPStore`` hangs up on whoever adds to a text, does not reconnect, and lets a wait hold up all
that shares its connection; a ``FileStore`` says True of any deletion, loses what two append at the
same time, has no queues and raises errors of other types. :class:`C10dClient` asks both only for
what they do well, most of all ``compare_set``, and leaves waiting, error types and namespaces to
:class:`rdzv.stores.base.Store`. What a lost connection leaves open is not repeated: torch's stores
cannot recognise a repeat.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from rdzv.address import split_host_port
from rdzv.backends.c10d import C10dRendezvousBackend
from rdzv.backends.c10d_link import Abandoned, Link
from rdzv.backends.c10d_places import (
    LINGER_POLL_SECONDS,
    RETRY_SECONDS_FIRST,
    RETRY_SECONDS_LAST,
    FilePlace,
    Place,
    TcpPlace,
)
from rdzv.backends.c10d_roster import EXPIRED, digest
from rdzv.backends.c10d_threads import WrongServiceError
from rdzv.backends.options import REQUEST_SECONDS_MAX, BackendOptions, common_options
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousSettingsError,
    RendezvousStateError,
    mask_secrets,
)
from rdzv.settings import Settings
from rdzv.stores.base import Backoff, Store, StoreClient, Unanswered, counter_after
from rdzv.torch_store import Deadline, shown_keys

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

__all__ = ["C10dClient", "C10dStore", "create_filestore", "create_tcpstore"]

T = TypeVar("T")

DEFAULT_PORT = 29400
"""That of torch's ``c10d``."""
FAREWELL_SECONDS = 2.0
"""So long a node that leaves tries to tell the host."""
LINGER_LIST_SECONDS = 0.5
"""A host that waits for the others looks so often which of them are lost."""
LINGER_WITHDRAWN_SECONDS = 3.0
"""One that has withdrawn needs the store no more, and has so long to say so."""
KEYS_LOOKED_AT_MAX = 4
MISSING_SECONDS = 1.0
NONCE_BYTES = 8


def create_tcpstore(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, dist.Store]:
    """The factory behind ``--rdzv-backend=tcpstore``.

    Raises ``RendezvousSettingsError`` for what cannot work, ``RendezvousConnectionError`` for
    what does not work now.
    """
    settings = Settings.from_parameters(params)
    host, port = split_host_port(settings.endpoint or "localhost", DEFAULT_PORT)
    if port == 0 and settings.is_host is False:
        raise RendezvousSettingsError(
            f"--rdzv-endpoint={settings.endpoint}: port 0 is any free port of the host, which "
            "nobody else can know. Give the port that the host was given."
        )
    return _opened(TcpPlace(host, port, settings.is_host), settings)


def create_filestore(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, dist.Store]:
    """The factory behind ``--rdzv-backend=filestore``. Raises as :func:`create_tcpstore`."""
    settings = Settings.from_parameters(params)
    if not settings.endpoint:
        raise RendezvousSettingsError(
            "--rdzv-backend=filestore needs --rdzv-endpoint: the path of a file that all nodes "
            "share."
        )
    if not settings.create_tables and not Path(settings.endpoint).exists():
        raise RendezvousSettingsError(
            f"There is no file {mask_secrets(settings.endpoint)}: no job has used this endpoint "
            "yet, or the path is wrong."
        )
    lifetime_seconds = BackendOptions(**common_options(settings)).lifetime_seconds
    return _opened(FilePlace(settings.endpoint, lifetime_seconds), settings)


def _opened(place: Place, settings: Settings) -> tuple[C10dRendezvousBackend, dist.Store]:
    seconds = settings.read_timeout_seconds
    backend = PlacedBackend(place, settings)
    try:
        place.open(seconds)
        backend.attend(seconds)
    except BaseException:
        backend.close()
        raise
    client = C10dClient(backend, place, settings.run_id, settings.read_timeout_seconds)
    return backend, C10dStore(client, timeout=timedelta(seconds=seconds))


class PlacedBackend(C10dRendezvousBackend):
    """A backend that knows where its store is, and leaves last where it hosts it."""

    def __init__(self, place: Place, settings: Settings) -> None:
        super().__init__(
            place.connect,
            settings.run_id,
            name=settings.backend,
            endpoint=place.endpoint,
            route=(place.host, place.port) if isinstance(place, TcpPlace) else None,
            request_seconds=settings.read_timeout_seconds,
            pushes=place.pushes,
            stamp_ms=place.stamp_ms,
            on_failure=place.doubt,
        )
        self._place = place
        self._linger_seconds = settings.close_timeout_seconds
        self._all_withdrawn_since = math.inf
        self._attends = False
        self._attended_life = b""
        """Of the store that knows that this node is here: one that has lost its data does not."""

    @property
    def endpoint(self) -> str:
        return self._place.endpoint

    def route(self) -> tuple[str, int] | None:
        place = self._place
        return (place.host, place.port) if isinstance(place, TcpPlace) else None

    def attend(self, seconds: float) -> None:
        """Connect, trying again until the time is over, and let whoever hosts know that somebody
        is here. Raises ``RendezvousConnectionError``, at once where somebody else answers."""
        self._attends = isinstance(self._place, TcpPlace)
        deadline = Deadline(seconds)
        pauses = Backoff(RETRY_SECONDS_FIRST, RETRY_SECONDS_LAST)
        while True:
            try:
                self._ask(lambda session: None)
                break
            except RendezvousConnectionError as error:
                if deadline.passed or isinstance(error.__cause__, WrongServiceError):
                    raise
            pauses.sleep(deadline)
        if self._pushes:
            # Now, and not when all nodes do: torch looks up a name for each connection.
            self._listen()

    def close(self) -> None:
        """See base class. Whoever hosts the store waits until the others have left it, for up to
        ``close_timeout``."""
        if isinstance(self._place, TcpPlace) and self._place.hosts:
            with contextlib.suppress(RendezvousConnectionError, RendezvousStateError):
                self._linger()
        self.leave()
        self._place.close()

    def leave(self) -> None:
        """See base class."""
        attended, self._attends = self._attends and self._attended_life, False
        with self._place.leaving():
            if attended:
                self._say_farewell()
            super().leave()

    def _say_farewell(self) -> None:
        # Where nobody answers, nobody is left to be told.
        with contextlib.suppress(RendezvousConnectionError, RendezvousStateError):
            self._ask(self._tell_gone, min(FAREWELL_SECONDS, self._request_seconds))

    def _open_session(self, link: Link) -> Any:
        session = super()._open_session(link)
        life = session.roster.life
        hosts = isinstance(self._place, TcpPlace) and self._place.hosts
        if self._attends and not hosts and life != self._attended_life:
            session.store().add(self._base + "here", 1)
            self._attended_life = life
        return session

    def _tell_gone(self, session: Any) -> None:
        if session.roster.life == self._attended_life:
            session.store().add(self._base + "gone", 1)

    def _linger(self) -> None:
        now = time.monotonic()
        deadline, list_at = now + self._linger_seconds, now
        while now < deadline:
            if self._ask(functools.partial(self._others_have_left, lists=now >= list_at)):
                return
            if now >= list_at:
                list_at = now + LINGER_LIST_SECONDS
            with self._changed:
                self._changed.wait(LINGER_POLL_SECONDS)
            now = time.monotonic()

    def _others_have_left(self, session: Any, *, lists: bool) -> bool:
        """Whether all who came have told that they go; with ``lists``, or are lost."""
        here, gone = (int(session.store().add(self._base + key, 0)) for key in ("here", "gone"))
        if gone >= here or not lists:
            return bool(gone >= here)
        session.entries()
        rows = session.roster.rows(session.look().tally).values()
        if sum(row.status == EXPIRED for row in rows) >= here - gone:
            return True
        # One that SIGTERM ends withdraws, and then tells nothing any more. The rows of all who came
        # are one more than they, since this node came too.
        if len(rows) <= here or any(row.live for row in rows):
            self._all_withdrawn_since = math.inf
        else:
            self._all_withdrawn_since = min(self._all_withdrawn_since, time.monotonic())
        return time.monotonic() - self._all_withdrawn_since > LINGER_WITHDRAWN_SECONDS


class C10dStore(Store):
    """The keys of one run id in a store of torch's."""


QUIET_SECONDS = 0.5
"""After so long without an answer a write asks first: a server that was restarted meanwhile, or a
file that was replaced, fails the question, which may be repeated."""
PROBE = "rdzv/probe"


class C10dClient(StoreClient):
    """The primitives of a store over ``compare_set``, on the connection of a backend: each that
    is opened costs the host a look-up of a name."""

    value_bytes_max = 8 * 1024 * 1024 - 65_536
    """A TCPStore's server hangs up on more than 8 MiB."""

    def __init__(
        self, backend: C10dRendezvousBackend, place: Place, run_id: str, request_seconds: float
    ) -> None:
        self._backend = backend
        self._place = place
        self._base = f"rdzv/{digest(run_id)}/store/"
        self._absent = os.urandom(16)
        """What nobody has written: ``compare_set`` gives it back where there is nothing."""
        self._seconds = min(request_seconds, REQUEST_SECONDS_MAX)
        self._answered_at = float("-inf")

    @property
    def endpoint(self) -> str:  # type: ignore[override]
        return self._place.endpoint

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        names = [self._value(key) for key in keys]

        def read(store: Any) -> list[bytes | None]:
            if len(names) > 1 and store.check(names):
                return list(store.multi_get(names))
            return [self._get(store, name) for name in names]

        return self._read(read)

    def set_many(self, pairs: Sequence[tuple[str, bytes]], operation: str) -> None:
        names = [self._value(key) for key, _ in pairs]
        values = [value for _, value in pairs]

        def write(store: Any) -> None:
            if len(names) == 1:
                store.set(names[0], values[0])
            else:
                store.multi_set(names, values)
            store.check(names[:1])  # a TCPStore's server does not answer a set

        self._write(write)

    def add(self, key: str, amount: int, operation: str) -> int:
        name = self._value(key)

        def look(store: Any) -> None:
            # A TCPStore's server hangs up on whoever adds to a text.
            counter_after(key, self._get(store, name), amount)

        return self._write(lambda store: int(store.add(name, amount)), look)

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        name = self._value(key)
        return self._write(lambda store: bytes(store.compare_set(name, expected, desired)))

    def append(self, key: str, value: bytes, operation: str) -> None:
        name = self._value(key)

        def look(store: Any) -> None:
            if len(self._get(store, name) or b"") + len(value) > self.value_bytes_max:
                raise ValueError(
                    f"value for {shown_keys([key])} would have more than value_bytes_max "
                    f"({self.value_bytes_max})"
                )

        def append(store: Any) -> None:
            if store.has_extended_api():
                store.append(name, value)
                store.check([name])
                return
            # Alone among all that append, so that a value that is there can only be ours.
            with self._place.exclusive():
                while True:
                    found = self._get(store, name) or b""
                    if store.compare_set(name, found, found + value) == found + value:
                        return

        self._write(append, look)

    def delete(self, key: str, operation: str) -> bool:
        name = self._value(key)

        def delete(store: Any) -> bool:
            with self._place.exclusive():
                return bool(store.check([name])) and bool(store.delete_key(name))

        return self._write(delete)

    def missing(self, keys: Sequence[str]) -> list[str]:
        return self._read(lambda store: self._missing(store, keys))

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        if len(keys) <= KEYS_LOOKED_AT_MAX:
            return super().wait_for_keys(keys, timeout_seconds)
        names = [self._value(key) for key in keys]
        deadline = Deadline(min(timeout_seconds, MISSING_SECONDS))
        pauses = Backoff(self.poll_seconds_first, self.poll_seconds_last)
        while not self._read(lambda store: store.check(names)):
            if deadline.passed:
                return self.missing(keys)
            pauses.sleep(deadline)
        return []

    def count_keys(self, prefix: str) -> int:
        return len(self.list_keys(prefix))

    def list_keys(self, prefix: str) -> list[str]:
        begin = self._value("")

        def read(store: Any) -> list[str]:
            # Torch holds Python's global lock while it waits for this answer, so that no thread of
            # the process runs: let only a server be asked that has answered just now.
            store.check([begin])
            keys: list[str] = store.list_keys()
            return keys

        found = self._read(read)
        keys = [key[len(begin) :] for key in found if key.startswith(begin)]
        return [key for key in keys if key.startswith(prefix)]

    def queue_push(self, key: str, value: bytes, operation: str) -> None:
        chunk = struct.pack(">I", len(value)) + value

        def push(found: bytes) -> bytes:
            return found + chunk

        self._write(lambda store: self._change(store, self._queue(key), push))

    def queue_pop(self, key: str, operation: str) -> bytes | None:
        taken: list[bytes] = []

        def pop(found: bytes) -> bytes:
            end = _end_of_first(found)
            taken[:] = [found[4:end]] if found else []
            return found[end:]

        self._write(lambda store: self._change(store, self._queue(key), pop))
        return taken[0] if taken else None

    def queue_len(self, key: str) -> int:
        return self._read(lambda store: _length(self._content(store, self._queue(key))))

    def close(self) -> None:
        self._backend.disconnect()

    def _value(self, key: str) -> str:
        return f"{self._base}value/{key}"

    def _queue(self, key: str) -> str:
        return f"{self._base}queue/{key}"

    def _get(self, store: Any, name: str) -> bytes | None:
        value: bytes = store.compare_set(name, self._absent, self._absent)
        return None if value == self._absent else value

    def _missing(self, store: Any, keys: Sequence[str]) -> list[str]:
        if not keys or store.check([self._value(key) for key in keys]):
            return []
        return [
            key
            for key in keys
            if not store.check([self._value(key)]) and not self._content(store, self._queue(key))
        ]

    def _content(self, store: Any, name: str) -> bytes:
        return (self._get(store, name) or b"")[NONCE_BYTES:]

    def _change(self, store: Any, name: str, change: Callable[[bytes], bytes]) -> None:
        """Change a queue, which is one value. Of two who would write the same at once, one alone
        has done it: so each value begins with bytes that no other has."""
        found = self._get(store, name) or b""
        while (content := change(found[NONCE_BYTES:])) != found[NONCE_BYTES:]:
            new = os.urandom(NONCE_BYTES) + content
            value: bytes = store.compare_set(name, found, new)
            if value == new:
                return
            found = value

    def _read(self, job: Callable[[Any], T]) -> T:
        try:
            answer = self._backend.ask_store(job, self._seconds)
            self._answered_at = time.monotonic()
            return answer
        except RendezvousConnectionError as error:
            raise Unanswered(str(error)) from error
        except RendezvousStateError as error:
            raise dist.DistStoreError(str(error)) from error

    def _write(self, job: Callable[[Any], T], look: Callable[[Any], None] | None = None) -> T:
        """Do what must not be done twice; ``look`` comes before and may refuse it."""
        # Whoever asks may give up while ``look`` waits for its answer, and ask anew. So one of
        # the two takes this lock: the write, which is begun then, or he who is to repeat it.
        begun = threading.Lock()

        def write(store: Any) -> T | ValueError:
            try:
                if look is not None:
                    look(store)
                elif time.monotonic() - self._answered_at > QUIET_SECONDS:
                    store.check([PROBE])
                if not begun.acquire(blocking=False):
                    raise Abandoned
                return job(store)
            except ValueError as refusal:
                return refusal

        try:
            answer = self._backend.ask_store(write, self._seconds)
        except RendezvousConnectionError as error:
            if not begun.acquire(blocking=False):
                raise dist.DistNetworkError(
                    f"{self.endpoint}: {error}; whether the write was done is not known"
                ) from error
            raise Unanswered(str(error)) from error
        except RendezvousStateError as error:
            raise dist.DistStoreError(str(error)) from error
        self._answered_at = time.monotonic()
        if isinstance(answer, ValueError):
            raise answer
        return answer


def _length(queue: bytes) -> int:
    count = 0
    while queue:
        queue = queue[_end_of_first(queue) :]
        count += 1
    return count


def _end_of_first(queue: bytes) -> int:
    return 4 + int(struct.unpack(">I", queue[:4])[0]) if queue else 0
