"""``SqlStore``: a store in an SQL database.

Every operation is one transaction. Each mutation also writes its operation id into a row that
belongs to this client alone while the mutation runs. So when the answer to a commit was lost, the
row tells whether it was made, and nothing is ever applied twice, whatever others did meanwhile.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
import torch.distributed as dist

from rdzv.backends.sql.backend import SqlBackend
from rdzv.backends.sql.dialects import dialect_for
from rdzv.backends.sql.engine import AnswerLost, Database
from rdzv.backends.sql.files import filesystem_type
from rdzv.backends.sql.options import SqlOptions
from rdzv.backends.sql.runs import Run, unique
from rdzv.backends.sql.schema import hashed, tables
from rdzv.backends.sql.statements import values_statement
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousSettingsError,
    RendezvousStateError,
)
from rdzv.settings import Settings
from rdzv.stores.base import Store, StoreClient, Unanswered, counter_after

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

__all__ = ["SqlClient", "SqlStore", "create_backend", "store_beside"]

T = TypeVar("T")

REQUEST_SECONDS_MAX = 2.0
"""One request waits for a locked database no longer; the store asks again until its own timeout."""
KEYS_AT_ONCE_MAX = 4
"""So few are asked for without what SQLAlchemy does for each statement."""
OPEN_OPERATIONS_MAX = 1000
"""Operations of unknown outcome that are remembered for a repeat, which soon comes or never."""
LIFETIME_SECONDS = 7 * 24 * 3600.0
"""How long the keys of a store that stands alone live after its last write. Where the run has a
backend too, the keys live at least as long as that one keeps the run."""


class SqlStore(Store):
    """A ``torch.distributed.Store`` whose keys are in a database, in the name of a run id.

    ``endpoint`` is what :class:`rdzv.backends.sql.SqlBackend` takes; all stores of one endpoint
    and run id share their keys, in any process. ``timeout`` None means torch's default of 300
    seconds. With ``connect=False`` it connects when it is first used. ``beside`` is a backend with
    the same endpoint and options, whose connections the store shares.

    Raises ``RendezvousSettingsError`` (a ``ValueError``) for what cannot work,
    ``dist.DistNetworkError`` where the database cannot be opened now.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        timeout: timedelta | None = None,
        *,
        options: SqlOptions | None = None,
        lifetime_seconds: float = LIFETIME_SECONDS,
        filesystem_type: Callable[[Path], str] = filesystem_type,
        name: str = "sql",
        connect: bool = True,
        beside: SqlBackend | None = None,
    ) -> None:
        client = SqlClient(
            endpoint, run_id, options, lifetime_seconds, filesystem_type, name, beside
        )
        if connect:
            client.open()
        super().__init__(client, timeout=timeout)


def create_backend(params: RendezvousParameters) -> tuple[SqlBackend, dist.Store]:
    """The backend and store that torchrun's parameters ask for, connected, the tables made.

    The endpoint is an SQLAlchemy URL; for ``sqlite`` also a path, for ``postgresql`` and ``mysql``
    also ``host:port/database``. Options: see :class:`SqlOptions`; ``read_timeout``
    is also the store's timeout, as in torch's ``c10d``. The pair is made here, for a store may
    know its backend and not the other way round.

    Raises ``RendezvousSettingsError`` for what cannot work, ``RendezvousConnectionError`` for
    what does not work now, ``RendezvousStateError`` where the tables are of another release.
    """
    settings = Settings.from_parameters(params)
    options = SqlOptions.from_settings(settings)
    backend = SqlBackend(settings.endpoint, settings.run_id, options, name=settings.backend)
    try:
        backend.open()
    except BaseException:
        backend.close()
        raise
    name = settings.backend
    return backend, store_beside(settings.endpoint, settings.run_id, options, name, backend)


def store_beside(
    endpoint: str,
    run_id: str,
    options: SqlOptions,
    name: str = "sql",
    backend: SqlBackend | None = None,
) -> SqlStore:
    """The store that goes with a backend: torch's ``read_timeout`` is its timeout, and its keys
    live as long as the run's other records."""
    timeout = timedelta(seconds=options.read_timeout_seconds)
    lifetime = options.lifetime_seconds
    return SqlStore(
        endpoint,
        run_id,
        timeout,
        options=options,
        lifetime_seconds=lifetime,
        name=name,
        # The backend has just shown that it works.
        connect=False,
        beside=backend,
    )


class SqlClient(StoreClient):
    """The keys of one run id in a database."""

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        options: SqlOptions | None = None,
        lifetime_seconds: float = LIFETIME_SECONDS,
        filesystem_type: Callable[[Path], str] = filesystem_type,
        name: str = "sql",
        beside: SqlBackend | None = None,
    ) -> None:
        options = options or SqlOptions()
        dialect = dialect_for(endpoint, options, filesystem_type, name=name)
        shared = beside.database if beside is not None and dialect.can_share else None
        made = tables(options.table_prefix, options.schema)
        self._database = Database(dialect, made, REQUEST_SECONDS_MAX, shared)
        self.value_bytes_max = dialect.value_bytes_max
        self._run = Run(self._database, run_id, lifetime_seconds)
        self._rows = _Rows(self._database, self._run.key)
        self._operations = _Operations(self._database, self._run)
        self.endpoint = self._database.endpoint

    def open(self) -> None:
        """Connect, and make the tables where they are missing."""
        try:
            self._database.open()
        except RendezvousSettingsError:
            raise
        except RendezvousConnectionError as error:
            raise dist.DistNetworkError(str(error)) from error
        except RendezvousStateError as error:
            raise dist.DistStoreError(str(error)) from error

    def close(self) -> None:
        self._database.close()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) <= KEYS_AT_ONCE_MAX and self._database.dialect.sends_as is not None:
            return self._get_at_once([hashed(key) for key in keys])
        return self._read(lambda c: self._rows.values(c, keys))

    def _get_at_once(self, keys: list[str]) -> list[bytes | None]:
        statement = values_statement(self._database.tables, len(keys))
        values = {"run": self._run.key, **{f"key{n}": key for n, key in enumerate(keys)}}
        with _translated():
            [answer] = self._database.send([], [statement], values)
            found = {key: self._rows.checked(value) for key, value in answer.rows}
        return [found.get(key) for key in keys]

    def set_many(self, pairs: Sequence[tuple[str, bytes]], operation: str) -> None:
        self._mutate(lambda c: self._rows.put(c, pairs), operation, [key for key, _ in pairs])

    def add(self, key: str, amount: int, operation: str) -> int:
        def work(connection: sa.Connection) -> int:
            [value] = self._rows.values(connection, [key])
            total = counter_after(key, value, amount)
            self._rows.put(connection, [(key, str(total).encode())])
            return total

        return self._mutate(work, operation, [key])

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        def work(connection: sa.Connection) -> bytes | None:
            [value] = self._rows.values(connection, [key])
            if value != expected and not (value is None and expected == b""):
                return value
            self._rows.put(connection, [(key, desired)])
            return desired

        return self._mutate(work, operation, [key])

    def append(self, key: str, value: bytes, operation: str) -> None:
        def work(connection: sa.Connection) -> None:
            [start] = self._rows.values(connection, [key])
            whole = (start or b"") + value
            self.check_value_size(key, whole)
            self._rows.put(connection, [(key, whole)])

        self._mutate(work, operation, [key])

    def delete(self, key: str, operation: str) -> bool:
        return self._mutate(lambda c: self._rows.delete(c, key), operation)

    def missing(self, keys: Sequence[str]) -> list[str]:
        return self._read(lambda c: self._rows.missing(c, keys))

    def count_keys(self, prefix: str) -> int:
        return self._read(lambda c: self._rows.count(c, prefix))

    def list_keys(self, prefix: str) -> list[str]:
        return self._read(lambda c: self._rows.names(c, prefix))

    def queue_push(self, key: str, value: bytes, operation: str) -> None:
        self._mutate(lambda c: self._rows.push(c, key, value), operation, [key])

    def queue_pop(self, key: str, operation: str) -> bytes | None:
        return self._mutate(lambda c: self._rows.pop(c, key), operation)

    def queue_len(self, key: str) -> int:
        return self._read(lambda c: self._rows.queue_len(c, key))

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        deadline = time.monotonic() + timeout_seconds
        missing = self.missing(keys)
        while missing and (left := deadline - time.monotonic()) > 0:
            # Whichever is last comes last; a random one halves what is left at each waking.
            self._wait_for_one(random.choice(missing), left)
            missing = self.missing(missing)
        return missing

    def _wait_for_one(self, key: str, timeout_seconds: float) -> None:
        def look() -> bool | None:
            return not self._database.read(lambda c: self._rows.missing(c, [key])) or None

        with _translated():
            self._database.wait(look, timeout_seconds, [self._topic(key)])

    def wait_for_queue(self, key: str, timeout_seconds: float) -> bool:
        def look() -> bool | None:
            return self._database.read(lambda c: self._rows.queue_len(c, key)) > 0 or None

        with _translated():
            return self._database.wait(look, timeout_seconds, [self._topic(key)]) or False

    def _read(self, work: Callable[[sa.Connection], T]) -> T:
        with _translated():
            return self._database.read(work)

    def _topic(self, key: str) -> str:
        return self._run.topic("key", key)

    def _mutate(
        self, work: Callable[[sa.Connection], T], operation: str, woken: Sequence[str] = ()
    ) -> T:
        def whole(connection: sa.Connection) -> T:
            # What is read here stays true until the commit.
            self._run.lock(connection)
            result = work(connection)
            self._run.touch(connection)
            self._database.notify(connection, *map(self._topic, woken))
            return result

        with _translated():
            return self._operations.run_once(whole, operation)


class _Operations:
    """Mutations, each applied once however often it is asked for.

    A writer is a row of ``writers`` that holds the last operation done in its name. It serves one
    operation at a time, so there are as many as ever ran at once.
    """

    def __init__(self, database: Database, run: Run) -> None:
        writers = database.tables.writers
        self._database, self._lock_run = database, run.lock
        self._client = unique()
        self._lock = threading.Lock()
        self._idle: list[str] = []
        self._made = 0
        # Operations whose outcome is not known: their writer, and their result if it was made.
        self._open: dict[str, tuple[str, Any]] = {}
        self._put = database.dialect.upsert(
            writers,
            {
                "run_key": run.key,
                "writer": sa.bindparam("this_writer"),
                "operation": sa.bindparam("this_operation"),
            },
        )
        self._find = sa.select(writers.c.operation).where(
            writers.c.run_key == run.key, writers.c.writer == sa.bindparam("this_writer")
        )

    def run_once(self, work: Callable[[sa.Connection], T], operation: str) -> T:
        """The result of ``work``, committed once.

        Raises what :meth:`Database.write` raises; it is right to call again with the same id.
        """
        with self._lock:
            known = self._open.get(operation)
        if known is None:
            return self._run(work, operation, self._take())
        writer, result = known
        was_applied = self._database.write(lambda c: self._was_applied(c, writer, operation))
        with self._lock:
            self._open.pop(operation, None)
        if not was_applied:
            return self._run(work, operation, writer)
        self._give_back(writer)
        return result  # type: ignore[no-any-return]

    def _run(self, work: Callable[[sa.Connection], T], operation: str, writer: str) -> T:
        def whole(connection: sa.Connection) -> T:
            result = work(connection)
            values = {"this_writer": writer, "this_operation": operation}
            connection.execute(self._put, values)
            return result

        try:
            result = self._database.write(whole, lambda c: self._was_applied(c, writer, operation))
        except AnswerLost as lost:
            with self._lock:
                self._open[operation] = (writer, lost.result)
                while len(self._open) > OPEN_OPERATIONS_MAX:
                    self._open.pop(next(iter(self._open)))
            raise
        except Exception:
            self._give_back(writer)
            raise
        self._give_back(writer)
        return result

    def _was_applied(self, connection: sa.Connection, writer: str, operation: str) -> bool:
        # Every mutation holds this lock to its end, which may come after its answer is given up.
        self._lock_run(connection)
        return connection.scalar(self._find, {"this_writer": writer}) == operation

    def _take(self) -> str:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._made += 1
            return f"{self._client}-{self._made}"

    def _give_back(self, writer: str) -> None:
        with self._lock:
            self._idle.append(writer)


class _Rows:
    """The statements about keys and queues of one run."""

    def __init__(self, database: Database, run_key: str) -> None:
        store, queues = database.tables.store, database.tables.queues
        self._endpoint = database.endpoint
        self._keys_max = database.dialect.keys_per_statement_max
        self._store, self._in_store = store, store.c.run_key == run_key
        in_queues = queues.c.run_key == run_key
        one: sa.BindParameter[str] = sa.bindparam("one")
        some: sa.BindParameter[Any] = sa.bindparam("some", expanding=True)
        in_queue = sa.and_(in_queues, queues.c.name_key == one)
        self._values = sa.select(store.c.name_key, store.c.value).where(
            self._in_store, store.c.name_key.in_(some)
        )
        self._present = sa.union(
            sa.select(store.c.name_key).where(self._in_store, store.c.name_key.in_(some)),
            sa.select(queues.c.name_key).where(in_queues, queues.c.name_key.in_(some)),
        )
        self._delete = store.delete().where(self._in_store, store.c.name_key == one)
        self._put = database.dialect.upsert(
            store,
            {
                "run_key": run_key,
                "name_key": sa.bindparam("new_key"),
                "name": sa.bindparam("new_name"),
                "value": sa.bindparam("new_value"),
            },
        )
        self._last = sa.select(sa.func.coalesce(sa.func.max(queues.c.position), 0)).where(in_queue)
        self._push = queues.insert().values(
            run_key=run_key,
            name_key=one,
            position=sa.bindparam("new_position"),
            value=sa.bindparam("new_value"),
        )
        self._head = (
            sa.select(queues.c.position, queues.c.value)
            .where(in_queue)
            .order_by(queues.c.position)
            .limit(1)
        )
        self._shift = queues.delete().where(
            in_queue, queues.c.position == sa.bindparam("old_position")
        )
        self._length = sa.select(sa.func.count()).select_from(queues).where(in_queue)

    def values(self, connection: sa.Connection, keys: Sequence[str]) -> list[bytes | None]:
        hashes = [hashed(key) for key in keys]
        found: dict[str, bytes] = {}
        for some in self._chunks(hashes):
            for name_key, value in connection.execute(self._values, {"some": some}):
                found[name_key] = self.checked(value)
        return [found.get(name_key) for name_key in hashes]

    def put(self, connection: sa.Connection, pairs: Sequence[tuple[str, bytes]]) -> None:
        # In one order, so that two writers never hold what the other waits for.
        values = [
            {"new_key": hashed(key), "new_name": key.encode(), "new_value": value}
            for key, value in sorted(pairs)
        ]
        connection.execute(self._put, values)

    def delete(self, connection: sa.Connection, key: str) -> bool:
        return connection.execute(self._delete, {"one": hashed(key)}).rowcount == 1

    def missing(self, connection: sa.Connection, keys: Sequence[str]) -> list[str]:
        hashes = {key: hashed(key) for key in keys}
        present: set[str] = set()
        for some in self._chunks(list(hashes.values())):
            present.update(connection.scalars(self._present, {"some": some}))
        return [key for key, name_key in hashes.items() if name_key not in present]

    def count(self, connection: sa.Connection, prefix: str) -> int:
        statement = sa.select(sa.func.count()).select_from(self._store)
        return connection.scalar(statement.where(*self._under(prefix))) or 0

    def names(self, connection: sa.Connection, prefix: str) -> list[str]:
        names = connection.scalars(sa.select(self._store.c.name).where(*self._under(prefix)))
        return [self.checked(name).decode() for name in names]

    def push(self, connection: sa.Connection, key: str, value: bytes) -> None:
        name_key = hashed(key)
        last = connection.execute(self._last, {"one": name_key}).scalar_one()
        values = {"one": name_key, "new_position": last + 1, "new_value": value}
        connection.execute(self._push, values)

    def pop(self, connection: sa.Connection, key: str) -> bytes | None:
        name_key = hashed(key)
        head = connection.execute(self._head, {"one": name_key}).one_or_none()
        if head is None:
            return None
        position, value = head
        connection.execute(self._shift, {"one": name_key, "old_position": position})
        return self.checked(value)

    def queue_len(self, connection: sa.Connection, key: str) -> int:
        return connection.execute(self._length, {"one": hashed(key)}).scalar_one()

    def _chunks(self, items: list[str]) -> Iterator[list[str]]:
        for start in range(0, len(items), self._keys_max):
            yield items[start : start + self._keys_max]

    def _under(self, prefix: str) -> list[sa.ColumnElement[bool]]:
        conditions = [self._in_store]
        if prefix:
            start = prefix.encode()
            # No byte of UTF-8 is 255, so the next text that does not begin so ends one higher.
            end = start[:-1] + bytes([start[-1] + 1])
            conditions += [self._store.c.name >= start, self._store.c.name < end]
        return conditions

    def checked(self, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise RendezvousStateError(
                f"{self._endpoint} holds a value that rdzv has not written (no bytes but "
                f"{type(value).__name__}): see who else writes to its tables"
            )
        return value


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Rendezvous errors, as the store has them."""
    try:
        yield
    except RendezvousConnectionError as error:
        raise Unanswered(str(error)) from error
    except RendezvousStateError as error:
        raise dist.DistStoreError(str(error)) from error
