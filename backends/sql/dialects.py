"""What differs among databases, and nothing else.

A :class:`Dialect` belongs to one :class:`rdzv.backends.sql.engine.Database`. To add a database,
write a subclass and name it in :func:`dialect_for`; statements elsewhere use only what all of
them have: no RETURNING (MySQL), no text a user chose as a key, no clock but :attr:`Dialect.now`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite as sqlite_dialect

from rdzv.backends.sql import files
from rdzv.backends.sql.options import SqlOptions
from rdzv.backends.sql.schema import Tables
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousSettingsError,
    RendezvousStateError,
    mask_secrets,
)

POOL_CONNECTIONS_KEPT = 4
POOL_CONNECTIONS_MAX = 16
POLL_SECONDS_FIRST = 0.005
POLL_SECONDS_LAST = 0.02


_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+|\[[0-9A-Fa-f:]+\]:\d+")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What an error of the driver means to the caller."""

    error: RendezvousError
    reopen: bool
    """Whether all connections must be given up and the tables looked after anew."""


class ChangeSignal(ABC):
    """Tells that something may have been committed by anyone."""

    @abstractmethod
    def mark(self) -> Any:
        """A value that is another one after any later commit. Cheap: made for polling."""

    @abstractmethod
    def close(self) -> None:
        """Give up the connection; the next mark opens one, and is a value never seen before."""


class Dialect(ABC):
    """One kind of database at one address."""

    endpoint: str
    """What the user would recognise, with secrets masked."""
    now: sa.ColumnElement[int]
    """Milliseconds since 1970 by the database's clock, one value within a statement."""
    driver_error: type[Exception]
    """The base of the driver's errors, for calls that SQLAlchemy does not wrap."""
    poll_seconds_first: float = POLL_SECONDS_FIRST
    poll_seconds_last: float = POLL_SECONDS_LAST

    @abstractmethod
    def prepare(self, tables: Tables, deadline: float) -> None:
        """Make sure that the tables are there; safe while many processes do it at once.

        Raises ``RendezvousSettingsError`` for what will never work at this address, and else what
        :meth:`explain` makes of the driver's error.
        """

    @abstractmethod
    def engine(self) -> sa.Engine:
        """A new engine for what :meth:`prepare` has prepared."""

    @abstractmethod
    def is_replaced(self) -> bool:
        """Whether what was prepared is no more, although connections may still seem to work.
        False before :meth:`prepare` and after :meth:`forget`."""

    @abstractmethod
    def forget(self) -> None:
        """The caller has been told of the loss: what is there next is as good."""

    @abstractmethod
    def begin(self, connection: sa.Connection, write: bool, seconds: float) -> None:
        """Start the transaction. It sees one moment of the database, and waits for no lock longer
        than ``seconds``. One that writes has every lock it needs from the start."""

    @abstractmethod
    def explain(self, error: BaseException) -> Trouble:
        """What to tell the caller of a driver's error."""

    @abstractmethod
    def signal(self) -> ChangeSignal:
        """A new change signal."""

    @abstractmethod
    def insert_if_absent(self, table: sa.Table, values: dict[str, Any]) -> sa.Insert:
        """Insert the row unless there is one; ``rowcount`` tells."""

    @abstractmethod
    def upsert(self, table: sa.Table, values: dict[str, Any]) -> sa.Insert:
        """Insert the row, or overwrite the one with the same primary key."""

    @abstractmethod
    def route(self) -> tuple[str, int] | None:
        """Host and port of the server; None where there is none."""


def dialect_for(
    endpoint: str,
    options: SqlOptions,
    filesystem_type: Callable[[Path], str] = files.filesystem_type,
) -> Dialect:
    """The dialect for an endpoint: a path, or an SQLAlchemy URL.

    Raises ``RendezvousSettingsError`` where the endpoint cannot work; nothing is opened yet.
    """
    if not endpoint:
        raise RendezvousSettingsError(
            "no database was named: give the path of a file that all nodes of this machine can "
            "open, such as --rdzv-endpoint=/tmp/job.db"
        )
    path = _sqlite_path(endpoint) if "://" in endpoint else endpoint
    if path in ("", ":memory:") or path.startswith("file:"):
        raise RendezvousSettingsError(
            f"{mask_secrets(endpoint)}: a database in memory can be seen by one process only, and "
            "SQLite's file: names are not supported; give the path of a file, such as "
            "--rdzv-endpoint=/tmp/job.db"
        )
    if _HOST_AND_PORT.fullmatch(path):
        raise RendezvousSettingsError(
            f"{path} looks like a host and port, but this backend is a file: give its path, such "
            f"as --rdzv-endpoint=/tmp/job.db (or ./{path} if that is its name)"
        )
    if "\0" in path:
        raise RendezvousSettingsError("the path of the database holds a NUL character")
    return SqliteDialect(Path(path), options, filesystem_type)


def _sqlite_path(endpoint: str) -> str:
    try:
        url = sa.make_url(endpoint)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise RendezvousSettingsError(
            f"{mask_secrets(endpoint)} is no URL that SQLAlchemy can read; for SQLite give a "
            "path, or sqlite:////absolute/path.db"
        ) from error
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise RendezvousSettingsError(
            f"{mask_secrets(endpoint)}: {url.drivername} is not part of this release of rdzv, "
            "only sqlite is; give the path of a file, or sqlite:////absolute/path.db"
        )
    if url.host:
        raise RendezvousSettingsError(
            f"{endpoint} names the host {url.host!r}, but SQLite has none: an absolute path takes "
            "four slashes, sqlite:////absolute/path.db"
        )
    if url.query:
        raise RendezvousSettingsError(
            f"{mask_secrets(endpoint)}: nothing may follow a '?'; set options in --rdzv-conf"
        )
    return url.database or ""


class SqliteDialect(Dialect):
    """SQLite in one file, for processes of one machine."""

    driver_error = sqlite3.Error
    # unixepoch('subsec') would need SQLite 3.42.
    now = sa.literal_column(
        "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)", sa.BigInteger
    )

    def __init__(
        self, path: Path, options: SqlOptions, filesystem_type: Callable[[Path], str]
    ) -> None:
        if options.schema is not None:
            raise RendezvousSettingsError(
                f"schema={options.schema!r}: SQLite has no schemas; leave the option out, or use "
                "table_prefix"
            )
        try:
            # A job may change its directory later; the file must stay the same one.
            self._path = path.expanduser().resolve()
            self._filesystem = filesystem_type(self._path.parent)
            files.check_path(self._path, self._filesystem, options.allow_network_filesystem)
        except (OSError, RuntimeError) as error:
            raise RendezvousSettingsError(f"{path} cannot be used: {error}") from error
        self._options = options
        self._identity: files.Identity | None = None
        self.endpoint = str(self._path)

    def route(self) -> None:
        return None

    def prepare(self, tables: Tables, deadline: float) -> None:
        filesystem, allow = self._filesystem, self._options.allow_network_filesystem
        files.check_path(self._path, filesystem, allow)
        try:
            if self._path.exists() and self._is_made(tables, deadline):
                return
            if not self._options.create_tables:
                raise RendezvousSettingsError(self._missing())
            with files.directory_lock(self._path.parent, deadline):
                self._make(tables, deadline)
        except sa.exc.DatabaseError as error:
            if "not a database" in str(error):
                raise RendezvousSettingsError(
                    f"{self._path} exists and is not an SQLite database: give another path, or "
                    "remove the file if nobody needs it"
                ) from error
            raise

    def _is_made(self, tables: Tables, deadline: float) -> bool:
        with _one_connection(lambda: self._connect("rw")) as connection:
            self.begin(connection, False, deadline - time.monotonic())
            found = files.identity(self._path)
            is_made = tables.check(connection, self.endpoint)
            if is_made:
                self._identity = found
            return is_made

    def _make(self, tables: Tables, deadline: float) -> None:
        if not self._path.exists():
            files.remove_side_files(self._path)
        with _one_connection(lambda: self._connect("rwc")) as connection:
            self._set_busy_timeout(connection, deadline - time.monotonic())
            # WAL keeps an index in shared memory, which machines do not share.
            is_shared = files.is_network(self._filesystem)
            self._set_journal_mode(connection, "DELETE" if is_shared else "WAL", deadline)
            self.begin(connection, True, deadline - time.monotonic())
            if not tables.check(connection, self.endpoint):
                tables.create(connection)
            connection.commit()
            self._identity = files.identity(self._path)

    def _set_journal_mode(self, connection: sa.Connection, mode: str, deadline: float) -> None:
        # SQLite does not wait for this lock itself.
        while True:
            try:
                connection.exec_driver_sql(f"PRAGMA journal_mode={mode}")
                connection.rollback()
                return
            except sa.exc.OperationalError as error:
                connection.rollback()
                if "locked" not in str(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(files.LOCK_POLL_SECONDS)

    def engine(self) -> sa.Engine:
        return _sqlite_engine(self._open, self._options.read_timeout_seconds)

    def _missing(self) -> str:
        if not self._path.exists():
            return (
                f"there is no file {self._path}, and create_tables=false: no job has used this "
                "endpoint yet, or the path is wrong"
            )
        return (
            f"{self._path} has no tables of rdzv with table_prefix={self._options.table_prefix}: "
            "check the path, or have the tables made by create_tables=true"
        )

    def is_replaced(self) -> bool:
        expected = self._identity
        return expected is not None and files.identity(self._path) != expected

    def forget(self) -> None:
        self._identity = None

    def begin(self, connection: sa.Connection, write: bool, seconds: float) -> None:
        connection.begin()
        self._set_busy_timeout(connection, seconds)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    def _set_busy_timeout(self, connection: sa.Connection, seconds: float) -> None:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute(f"PRAGMA busy_timeout={max(1, round(seconds * 1000))}")

    def signal(self) -> ChangeSignal:
        return DataVersion(self._open)

    def insert_if_absent(self, table: sa.Table, values: dict[str, Any]) -> sa.Insert:
        return sqlite_dialect.insert(table).values(values).on_conflict_do_nothing()

    def upsert(self, table: sa.Table, values: dict[str, Any]) -> sa.Insert:
        statement = sqlite_dialect.insert(table).values(values)
        keys = [column.name for column in table.primary_key]
        others = {name: statement.excluded[name] for name in values if name not in keys}
        return statement.on_conflict_do_update(index_elements=keys, set_=others)

    def explain(self, error: BaseException) -> Trouble:
        cause = getattr(error, "orig", None) or error
        text = str(cause)
        kind, advice = _meaning(text)
        reopen = "locked" not in text and not isinstance(error, sa.exc.TimeoutError)
        return Trouble(kind(f"{self._path}: {mask_secrets(text)}. {advice}"), reopen)

    def _open(self) -> sqlite3.Connection:
        """A connection to the prepared file; never makes one, and never takes another one."""
        connection = self._connect("rw")
        # The first statement opens the file. What was put in its place meanwhile is not ours.
        mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
        if self.is_replaced():
            connection.close()
            raise sqlite3.OperationalError("unable to open database file")
        if mode == "wal":
            # Safe for the data when a process dies; a crash of the machine may lose the last
            # commits, and the machine's nodes with them.
            connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"file:{quote(os.fsencode(self._path))}?mode={mode}",
            uri=True,
            timeout=self._options.read_timeout_seconds,
            # Transactions are begun and ended here, not by guesses of the driver.
            isolation_level=None,
            # The pool gives a connection to one thread at a time.
            check_same_thread=False,
        )


_SQLITE_TROUBLES: Sequence[tuple[tuple[str, ...], type[RendezvousError], str]] = (
    (
        ("locked",),
        RendezvousConnectionError,
        "Another process holds a transaction open (see it with `fuser`), or read_timeout is too "
        "short.",
    ),
    (("is full",), RendezvousConnectionError, "Free some space there, or raise the quota."),
    (
        ("readonly", "unable to open"),
        RendezvousConnectionError,
        "Look whether the file is there, and whether this user can write it and its directory.",
    ),
    (
        ("no such table", "no such column", "has no column"),
        RendezvousConnectionError,
        "The tables were removed; the next call makes them anew.",
    ),
    (
        ("malformed", "not a database"),
        RendezvousStateError,
        "The file is damaged: stop the job, then remove it together with its -wal and -shm files.",
    ),
)


def _meaning(text: str) -> tuple[type[RendezvousError], str]:
    for patterns, kind, advice in _SQLITE_TROUBLES:
        if any(pattern in text for pattern in patterns):
            return kind, advice
    return RendezvousConnectionError, "Try again, or look at the file."


def _sqlite_engine(creator: Callable[[], sqlite3.Connection], timeout_seconds: float) -> sa.Engine:
    return sa.create_engine(
        "sqlite://",
        creator=creator,
        poolclass=sa.QueuePool,
        pool_size=POOL_CONNECTIONS_KEPT,
        max_overflow=POOL_CONNECTIONS_MAX - POOL_CONNECTIONS_KEPT,
        pool_timeout=timeout_seconds,
    )


@contextlib.contextmanager
def _one_connection(creator: Callable[[], sqlite3.Connection]) -> Iterator[sa.Connection]:
    engine = _sqlite_engine(creator, 0.0)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


class DataVersion(ChangeSignal):
    """SQLite's own counter of commits, which a connection sees change when others commit.

    It does not count the connection's own commits, so this one never writes. All waiting threads
    share it, and its last answer for half a poll's time: an older mark wakes once too often, a
    newer one would miss a change.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        # Reentrant: a signal handler may close what its own thread is looking at.
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._opened = 0
        self._mark: tuple[int, int] = (0, 0)
        self._looked_at = float("-inf")

    def mark(self) -> tuple[int, int]:
        with self._lock:
            if time.monotonic() - self._looked_at < POLL_SECONDS_FIRST / 2:
                return self._mark
            connection = self._connection
            if connection is None:
                connection = self._connection = self._connect()
                self._opened += 1
            looked_at = time.monotonic()
            version = connection.execute("PRAGMA data_version").fetchone()[0]
            self._mark, self._looked_at = (self._opened, version), looked_at
            return self._mark

    def close(self) -> None:
        with self._lock:
            self._looked_at = float("-inf")
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
