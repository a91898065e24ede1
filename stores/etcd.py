"""A store on etcd v3: a key for each value, keys in the order of their making for each queue.

Below ``k/`` of the run's prefix are, for each key of the store, its value and behind it the items
of its queue: one range tells whether there is anything, and one watch hears of it. A byte of the
key that would disturb this order is escaped.

etcd cannot add or append: a new value is computed here and written if the old one has not changed.
What may be asked again after a lost answer must not be done twice. So every mutation also writes a
*slot*, a key that one mutation at a time of this client uses, and rests on its revision: of a try
that comes late and its repeat, one finds the slot changed. If that holds this operation's id, the
operation has been done, and what it was to answer is still remembered here. So a repeat writes the
slot even where it finds nothing to do.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rdzv.backends.etcd import WAIT_SLICE_SECONDS_MAX, EtcdRendezvousBackend
from rdzv.backends.etcd_client import EtcdConnections, within
from rdzv.backends.etcd_operations import OPERATIONS_MAX, batches_of, end_of, range_of
from rdzv.backends.etcd_options import EXTRA_OPTIONS, EtcdOptions
from rdzv.errors import RendezvousConnectionError, RendezvousStateError
from rdzv.settings import Settings
from rdzv.stores.base import Store, StoreClient, Unanswered, counter_after, current_deadline
from rdzv.torch_store import Deadline, shown_keys

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

__all__ = ["EXTRA_OPTIONS", "EtcdClient", "EtcdStore", "create_backend"]

OPERATIONS_REMEMBERED = 1024
LIST_KEYS_MAX = 5000
VALUE, ITEM, END = b"\x00", b"\x01", b"\x02"
"""What follows a key of the store."""
_ESCAPED = {bytes([byte]): b"\x02" + bytes([byte + 3]) for byte in (0, 1, 2)}
_UNESCAPED = {after: before for before, after in _ESCAPED.items()}
_SPECIAL, _ESCAPES = re.compile(b"[\x00-\x02]"), re.compile(b"\x02[\x03-\x05]")
TOO_LARGE = re.compile("too large|larger than max|too many operations")
PAUSE_SECONDS = 0.1
CONFLICT_SECONDS_FIRST, CONFLICT_SECONDS_LAST = 0.001, 0.1


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, dist.Store]:
    """The factory behind ``--rdzv-backend=etcd-v3``.

    Raises ``RendezvousSettingsError`` for what cannot work, ``RendezvousConnectionError`` for
    what does not work now.
    """
    settings = Settings.from_parameters(params, EXTRA_OPTIONS)
    options = EtcdOptions.from_settings(settings, params.config)
    endpoint, run_id = settings.endpoint, settings.run_id
    backend = EtcdRendezvousBackend(endpoint, run_id, options, name=settings.backend)
    try:
        backend.open()
    except BaseException:
        backend.close()
        raise
    timeout = timedelta(seconds=settings.read_timeout_seconds)
    return backend, EtcdStore(endpoint, run_id, timeout, beside=backend)


class EtcdStore(Store):
    """The keys of one run id on etcd v3. ``client`` may be an object of etcd3's family, which is
    used then, and not closed. With ``beside``, a backend of the same run, both use one connection,
    and each ends with its ``close()`` what the other waits for; the store then asks anew."""

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        timeout: timedelta | None = None,
        *,
        options: EtcdOptions | None = None,
        client: Any = None,
        beside: EtcdRendezvousBackend | None = None,
    ) -> None:
        if beside is None:
            connections = EtcdConnections(endpoint, run_id, options or EtcdOptions(), client)
        else:
            connections = beside.connections
        super().__init__(EtcdClient(connections), timeout=timeout)


class _NotYet:
    """Nothing has been read so far: most keys that are changed are not there yet."""

    def __bool__(self) -> bool:
        return False


NOT_YET = _NotYet()


@dataclass
class _Slot:
    """A key that one mutation at a time rests on."""

    key: bytes
    revision: int = 0


@dataclass
class _Operation:
    """What is remembered of a mutation until it is answered."""

    slot: _Slot
    tried: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Change:
    """A try: under which conditions, what is written then, and what is answered then."""

    compare: Sequence[Any]
    operations: Sequence[Any]
    answer: Any = None


class EtcdClient(StoreClient):
    """The primitives of a store, one transaction each where no old value is needed."""

    value_bytes_max = 1_400_000

    def __init__(self, connections: EtcdConnections) -> None:
        self._etcd = connections
        self._keys = self._etcd.base + b"k/"
        self._looked: tuple[Deadline | None, frozenset[str], int] = None, frozenset(), 0
        """What a call of the store has not found, as it knows when it waits for it next."""
        self._begin()
        self.endpoint = self._etcd.endpoint

    def _begin(self) -> None:
        """With slots of this process's own: a forked one must not write those of its parent, of
        which another thread may have held the lock."""
        self._lock = threading.Lock()
        self._slots = self._etcd.base + b"o/" + uuid.uuid4().hex.encode() + b"/"
        self._free: list[_Slot] = []
        self._slots_made = 0
        self._operations: dict[str, _Operation] = {}
        self._batches_done: dict[str, int] = {}
        self._process = os.getpid()

    def _leave_after_fork(self) -> None:
        if self._process != os.getpid():
            self._begin()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        places = [(self._key(key) + VALUE, None) for key in keys]
        found, revision = self._read_many(places, None)
        missing = frozenset(key for key, each in zip(keys, found, strict=True) if not each.kvs)
        self._looked = current_deadline.get(), missing, revision
        return [each.kvs[0].value if each.kvs else None for each in found]

    def set_many(self, pairs: Sequence[tuple[str, bytes]], operation: str) -> None:
        etcd = self._etcd
        puts = [etcd.put(self._key(key) + VALUE, value) for key, value in pairs]
        sizes = [put.ByteSize() for put in puts]
        batches = list(batches_of(puts, sizes))
        self._leave_after_fork()
        with self._lock:
            done = self._batches_done.pop(operation, 0)
        try:
            for number in range(done, len(batches)):
                change = _Change((), batches[number])
                self._mutate(f"{operation}.{number}", lambda _: change)  # noqa: B023
                done += 1
        except Unanswered:
            with self._lock:
                self._batches_done[operation] = done
                while len(self._batches_done) > OPERATIONS_REMEMBERED:
                    del self._batches_done[next(iter(self._batches_done))]
            raise

    def add(self, key: str, amount: int, operation: str) -> int:
        place = self._key(key) + VALUE

        def change(found: Any) -> _Change:
            total = counter_after(key, found.value if found else None, amount)
            value = str(total).encode()
            return _Change([self._as_found(place, found)], [self._etcd.put(place, value)], total)

        return int(self._mutate(operation, change, place))

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        place, etcd = self._key(key) + VALUE, self._etcd

        def change(found: Any) -> _Change | bytes | None:
            put = [etcd.put(place, desired)]
            if found is NOT_YET and expected:
                return _Change([etcd.holds(place, expected)], put, desired)
            value: bytes | None = found.value if found else None
            if (value or b"") != expected:
                return value
            return _Change([self._as_found(place, found)], put, desired)

        answer: bytes | None = self._mutate(operation, change, place)
        return answer

    def append(self, key: str, value: bytes, operation: str) -> None:
        place, limit = self._key(key) + VALUE, self.value_bytes_max

        def change(found: Any) -> _Change:
            whole = (found.value if found else b"") + value
            if len(whole) > limit:
                raise ValueError(
                    f"value for {shown_keys([key])} would have more than value_bytes_max ({limit})"
                )
            return _Change([self._as_found(place, found)], [self._etcd.put(place, whole)])

        self._mutate(operation, change, place)

    def delete(self, key: str, operation: str) -> bool:
        place, etcd = self._key(key) + VALUE, self._etcd

        def change(found: Any) -> _Change | bool:
            if found is None:
                return False
            return _Change([etcd.is_there(place)], [etcd.delete(place)], True)

        return bool(self._mutate(operation, change, place))

    def missing(self, keys: Sequence[str]) -> list[str]:
        return self._missing(keys)[0]

    def count_keys(self, prefix: str) -> int:
        return len(self.list_keys(prefix))

    def list_keys(self, prefix: str) -> list[str]:
        start = self._key(prefix)
        end, names, revision = end_of(start), [], 0
        while True:
            request = self._etcd.get(
                start, end, keys_only=True, limit=LIST_KEYS_MAX, revision=revision
            )
            answer = self._ask(lambda: self._etcd.read(request))  # noqa: B023
            found = range_of(answer, 0)
            names += [self._name(kv.key) for kv in found.kvs if kv.key.endswith(VALUE)]
            if not found.more:
                return names
            # What follows, as it was then.
            start, revision = found.kvs[-1].key + b"\x00", revision or answer.header.revision

    def queue_push(self, key: str, value: bytes, operation: str) -> None:
        item = self._key(key) + ITEM + operation.encode()
        change = _Change((), [self._etcd.put(item, value)])
        self._mutate(operation, lambda _: change)

    def queue_pop(self, key: str, operation: str) -> bytes | None:
        first = self._key(key) + ITEM

        def change(found: Any) -> _Change | None:
            if found is None:
                return None
            item, revision = found.key, found.mod_revision
            removal = [self._etcd.delete(item)]
            return _Change([self._etcd.is_at(item, revision)], removal, found.value)

        value: bytes | None = self._mutate(operation, change, first, end_of(first))
        return value

    def queue_len(self, key: str) -> int:
        return self._queue_len(key)[0]

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        deadline = time.monotonic() + timeout_seconds
        asker, absent, revision = self._looked
        missing = list(keys)
        if asker is None or asker is not current_deadline.get() or not absent.issuperset(keys):
            missing, revision = self._missing(keys, timeout_seconds)
        while missing and (left := deadline - time.monotonic()) > 0:
            places = {self._key(key): key for key in missing}
            first, last = min(places), max(places) + END
            if self._hear(first, last, revision, left, set(places)) and len(missing) == 1:
                return []  # it was there; several need not have been there together
            missing, revision = self._missing(missing, deadline - time.monotonic())
        return missing

    def wait_for_queue(self, key: str, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        place = self._key(key) + ITEM
        while True:
            length, revision = self._queue_len(key)
            left = deadline - time.monotonic()
            if length or left <= 0:
                return length > 0
            self._hear(place, end_of(place), revision, left, None)

    def close(self) -> None:
        self._etcd.close()

    # ------------------------------------------------------------------------------- reading

    def _missing(self, keys: Sequence[str], seconds: float | None = None) -> tuple[list[str], int]:
        """Also the revision for which it holds."""
        places = [self._key(key) for key in keys]
        found, revision = self._read_many(
            [(place + VALUE, place + END) for place in places], seconds, count_only=True
        )
        return [key for key, each in zip(keys, found, strict=True) if not each.count], revision

    def _queue_len(self, key: str) -> tuple[int, int]:
        place = self._key(key) + ITEM
        found, revision = self._read_many([(place, end_of(place))], None, count_only=True)
        return found[0].count, revision

    def _read_many(
        self, ranges: Sequence[tuple[bytes, bytes | None]], seconds: float | None, **more: Any
    ) -> tuple[list[Any], int]:
        """All of them as they were at one revision, which is returned too."""
        etcd, found, revision = self._etcd, [], 0
        for begin in range(0, len(ranges), OPERATIONS_MAX):
            batch = [
                etcd.get(*each, revision=revision, **more)
                for each in ranges[begin : begin + OPERATIONS_MAX]
            ]
            answer = self._ask(lambda: etcd.read(*batch), seconds)  # noqa: B023
            revision = revision or answer.header.revision
            found += [range_of(answer, position) for position in range(len(batch))]
        return found, revision

    def _hear(
        self, first: bytes, end: bytes, revision: int, seconds: float, awaited: set[bytes] | None
    ) -> bool:
        """Whether all keys that are awaited were written after that revision, where it is None
        anything in the range: at once if so, False after a while."""
        seconds, closings = min(seconds, WAIT_SLICE_SECONDS_MAX), self._etcd.closings
        try:
            # From now on, and a look then: of what was before, etcd tells up to 100 ms later.
            for event in self._etcd.watch(first, end, 0, seconds, puts=True):
                if isinstance(event, int):
                    written = self._written_since(first, end, revision)
                else:
                    written = [event.kv] if event.kv.mod_revision > revision else []
                if awaited is None and written:
                    return True
                for kv in written:
                    place = kv.key.partition(ITEM)[0].removesuffix(VALUE)
                    if awaited is not None:
                        awaited.discard(place)
                if not awaited and written:
                    return True
        except RendezvousConnectionError:
            # Whoever cannot be asked says so at the next look.
            with self._translated():
                self._etcd.check_open(closings)
            time.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.0))
        return False

    def _written_since(self, first: bytes, end: bytes, revision: int) -> Any:
        found = self._etcd.get(first, end, keys_only=True, min_mod_revision=revision + 1)
        return range_of(self._ask(lambda: self._etcd.read(found)), 0).kvs

    # ------------------------------------------------------------------------------- writing

    def _mutate(
        self,
        operation: str,
        change: Callable[[Any], Any],
        key: bytes | None = None,
        end: bytes | None = None,
    ) -> Any:
        """Do what ``change`` makes of what is found under ``key``, once.

        It gets a key and value of etcd, None where there is none, or ``NOT_YET`` before anything
        was read; with ``end``, the first of a range. What it returns that is no change is the
        answer.
        """
        etcd = self._etcd
        deadline = time.monotonic() + etcd.options.request_seconds
        with self._remembered(operation) as done:
            slot, is_repeat = done.slot, bool(done.tried)
            look = [etcd.get(slot.key)]
            if key is not None:
                look.append(etcd.get(key) if end is None else etcd.first(key, end))
            answer = None
            if done.tried or end is not None:
                answer = self._ask(lambda: etcd.read(*look))
            for conflicts in itertools.count():
                found: Any = NOT_YET
                if answer is not None:
                    (held, found), slot.revision = self._seen(answer, key)
                    if held.startswith(operation.encode() + b" "):
                        return done.tried[int(held.rpartition(b" ")[2])]
                step, number = change(found), len(done.tried)
                if not isinstance(step, _Change):
                    if not is_repeat:
                        return step
                    step = _Change((), (), step)
                done.tried[number] = step.answer
                answer = self._ask(lambda: self._try(slot, operation, number, step, look))  # noqa: B023
                if answer.succeeded:
                    slot.revision = answer.header.revision
                    return step.answer
                if conflicts:  # the first try knew nothing
                    _pause(conflicts)
                    if time.monotonic() > deadline:
                        raise Unanswered("others change the key all the time")

    @staticmethod
    def _seen(answer: Any, key: bytes | None) -> tuple[tuple[bytes, Any], int]:
        """What the slot holds, what is under the key, and the slot's revision."""
        held = range_of(answer, 0).kvs
        kvs = range_of(answer, 1).kvs if key is not None else ()
        value = bytes(held[0].value) if held else b""
        return (value, kvs[0] if kvs else None), held[0].mod_revision if held else 0

    def _try(
        self, slot: _Slot, operation: str, number: int, step: _Change, look: Sequence[Any]
    ) -> Any:
        etcd = self._etcd
        return etcd.write(
            [etcd.is_at(slot.key, slot.revision), *step.compare],
            [etcd.put(slot.key, f"{operation} {number}".encode()), *step.operations],
            look,
        )

    @contextmanager
    def _remembered(self, operation: str) -> Iterator[_Operation]:
        """What is known of a mutation, kept as long as it may be asked for again."""
        self._leave_after_fork()
        with self._lock:
            known = self._operations.pop(operation, None)
            if known is None:
                known = _Operation(self._free.pop() if self._free else self._new_slot())
        try:
            yield known
        except Unanswered:
            with self._lock:
                self._operations[operation] = known
                while len(self._operations) > OPERATIONS_REMEMBERED:
                    del self._operations[next(iter(self._operations))]
            raise
        except Exception:
            self._release(known)
            raise
        else:
            self._release(known)

    def _release(self, known: _Operation) -> None:
        with self._lock:
            self._free.append(known.slot)

    def _new_slot(self) -> _Slot:
        self._slots_made += 1
        return _Slot(self._slots + str(self._slots_made).encode())

    def _as_found(self, place: bytes, found: Any) -> Any:
        """The condition that a key is as it was found."""
        return self._etcd.is_at(place, found.mod_revision if found else 0)

    # ---------------------------------------------------------------------------------- keys

    def _key(self, key: str) -> bytes:
        return self._keys + _SPECIAL.sub(lambda found: _ESCAPED[found[0]], key.encode())

    def _name(self, place: bytes) -> str:
        key = place[len(self._keys) :].removesuffix(VALUE)
        return _ESCAPES.sub(lambda found: _UNESCAPED[found[0]], key).decode()

    def _ask(self, request: Callable[[], Any], seconds: float | None = None) -> Any:
        """Within so many seconds, and when the store's caller wants to have the answer."""
        patience = self._etcd.options.request_seconds if seconds is None else seconds
        deadline = current_deadline.get()
        left = patience if deadline is None else deadline.remaining_seconds(patience)
        with self._translated(), within(left):
            return request()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except RendezvousConnectionError as error:
            if TOO_LARGE.search(str(error)):  # it will be at the next try, too
                raise dist.DistStoreError(str(error)) from error
            raise Unanswered(str(error)) from error
        except RendezvousStateError as error:
            raise dist.DistStoreError(str(error)) from error


def _pause(conflicts: int) -> None:
    """Let others go first, the longer the more there are."""
    most = min(CONFLICT_SECONDS_LAST, CONFLICT_SECONDS_FIRST * 2.0**conflicts)
    time.sleep(random.uniform(0.0, most))
