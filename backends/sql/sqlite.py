"""SQLite: what is particular to a database that is a file on this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite as sqlite_dialect

from rdzv.backends.sql import files
from rdzv.backends.sql.base import Answer, ChangeSignal, Dialect, Look, Pace, Rest, Trouble
from rdzv.backends.sql.options import SqlOptions
from rdzv.backends.sql.pool import Pool
from rdzv.backends.sql.schema import Tables
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousSettingsError,
    RendezvousStateError,
    mask_secrets,
)

CONNECTIONS_MAX = 16
PACE = Pace(0.005, 0.02, 0.005)
LOCK_PACE = Pace(0.002, 0.02, 0.2)
"""How often one process looks whether another one still writes."""
TURN_SECONDS_MAX = 1.0
BUSY_MILLISECONDS_STEP = 100


class SqliteDialect(Dialect):
    """SQLite in one file, for processes of one machine."""

    driver_error = sqlite3.Error
    connections_max = CONNECTIONS_MAX
    sends_as = "sqlite"
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
        self.request_seconds = self.open_seconds = options.read_timeout_seconds
        self._identity: files.Identity | None = None
        self.endpoint = str(self._path)

    def route(self) -> None:
        return None

    def prepare(self, tables: Tables, pool: Pool, deadline: float, joins: bool) -> None:
        filesystem, allow = self._filesystem, self._options.allow_network_filesystem
        files.check_path(self._path, filesystem, allow)
        try:
            if self._path.exists() and self._is_made(tables, deadline):
                return
            if not self._options.create_tables:
                raise RendezvousSettingsError(self._missing())
            with files.directory_lock(self._path.parent, deadline):
                self._make(tables, deadline)
        except (sa.exc.DatabaseError, sqlite3.DatabaseError) as error:
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
            self._limit(_driver(connection), deadline - time.monotonic())
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
        return _sqlite_engine(self._open)

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

    def begin(
        self, connection: sa.Connection, write: bool, seconds: float, along: Look | None = None
    ) -> None:
        connection.begin()
        driver = _driver(connection)
        if not write:
            self._limit(driver, seconds)
            driver.execute("BEGIN")
            return
        with _turn(self._path, seconds) as deadline:
            self._begin_to_write(driver, deadline)

    def _begin_to_write(self, driver: sqlite3.Connection, deadline: float) -> None:
        """Wait for the lock that one alone has who writes. SQLite itself would look ever more
        seldom, at last every 0.1 s, and let those who come later go first."""
        begun = time.monotonic()
        driver.execute("PRAGMA busy_timeout=0")
        while True:
            try:
                driver.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError as error:
                now = time.monotonic()
                if "locked" not in str(error) or now >= deadline:
                    raise
            pause = LOCK_PACE.seconds(now - begun)
            time.sleep(min(deadline - now, random.uniform(pause / 2, pause)))
        self._limit(driver, deadline - time.monotonic())

    def _limit(self, driver: sqlite3.Connection, seconds: float) -> None:
        """Let nothing on this connection wait longer for a lock."""
        # The driver keeps what it has compiled, by its text.
        milliseconds = max(1, round(seconds * 1000))
        if milliseconds > BUSY_MILLISECONDS_STEP:
            milliseconds -= milliseconds % BUSY_MILLISECONDS_STEP
        driver.execute(f"PRAGMA busy_timeout={milliseconds}")

    def send(
        self,
        connection: sa.Connection,
        written: Sequence[sa.Executable],
        read: Sequence[sa.Executable],
        values: dict[str, Any],
        seconds: float,
    ) -> list[Answer]:
        texts = [_compiled(each) for each in (*written, *read)]
        driver = _driver(connection)
        if not written:
            self._limit(driver, seconds)
            return [_answer(driver, text, values) for text in texts]
        with _turn(self._path, seconds) as deadline:
            self._begin_to_write(driver, deadline)
            answers = [_answer(driver, text, values) for text in texts[: len(written)]]
            driver.execute("COMMIT")
        return answers + [_answer(driver, text, values) for text in texts[len(written) :]]

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


@functools.cache
def _common_engine() -> sa.Engine:
    """Whose dialect has seen a connection, and so knows what SQLite can do."""
    engine = sa.create_engine("sqlite://", poolclass=sa.NullPool)
    with engine.connect():
        return engine


_statements: dict[Any, Any] = {}
"""What SQLAlchemy has compiled, for all engines alike."""


def _sqlite_engine(creator: Callable[[], Any]) -> sa.Engine:
    """An engine whose connections ``creator`` opens. To make one by ``create_engine``, and to
    compile each statement for it anew, would take longer than a rendezvous."""
    common = _common_engine()
    return sa.Engine(
        sa.NullPool(creator, dialect=common.dialect, reset_on_return=None),
        common.dialect,
        common.url,
        execution_options={"compiled_cache": _statements},
    )


def _driver(connection: sa.Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


@dataclass(frozen=True, slots=True)
class _Text:
    """A statement as SQLite takes it, and the values that it holds itself."""

    text: str
    constants: dict[str, Any]


@functools.cache
def _compiled(statement: sa.Executable) -> _Text:
    compiled: Any = statement.compile(  # type: ignore[attr-defined]
        dialect=sqlite_dialect.dialect(paramstyle="named")
    )
    constants = {name: value for name, value in compiled.params.items() if value is not None}
    return _Text(compiled.string, constants)


_turns: dict[Path, threading.Lock] = {}
os.register_at_fork(after_in_child=_turns.clear)


@contextlib.contextmanager
def _turn(path: Path, seconds: float) -> Iterator[float]:
    """Alone among the threads of this process, with the end of these ``seconds``: each is woken as
    soon as it may go on, where SQLite would let it look again and again, and none of those who wait
    takes Python's lock from it. It is SQLite's lock that keeps others out: one that is not given
    back, since a signal handler has raised an error just then, costs a moment, once."""
    deadline = time.monotonic() + seconds
    lock = _turns.setdefault(path, threading.Lock())
    is_mine = lock.acquire(timeout=min(max(0.0, seconds), TURN_SECONDS_MAX))
    if not is_mine:
        _turns[path] = threading.Lock()
    try:
        yield deadline
    finally:
        if is_mine:
            lock.release()


def _answer(driver: sqlite3.Connection, text: _Text, values: dict[str, Any]) -> Answer:
    cursor = driver.execute(text.text, {**text.constants, **values})
    return Answer(cursor.rowcount, cursor.fetchall())


@contextlib.contextmanager
def _one_connection(creator: Callable[[], sqlite3.Connection]) -> Iterator[sa.Connection]:
    engine = _sqlite_engine(creator)
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

    def mark(
        self, topics: Sequence[str], pool: Pool, deadline: float, look: Look | None = None
    ) -> tuple[int, int]:
        return self._version()

    def _version(self) -> tuple[int, int]:
        with self._lock:
            if time.monotonic() - self._looked_at < PACE.first_seconds / 2:
                return self._mark
            connection = self._connection
            if connection is None:
                connection = self._connection = self._connect()
                self._opened += 1
            looked_at = time.monotonic()
            version = connection.execute("PRAGMA data_version").fetchone()[0]
            self._mark, self._looked_at = (self._opened, version), looked_at
            return self._mark

    def sleep(
        self,
        mark: Any,
        topics: Sequence[str],
        seconds: float,
        rest: Rest,
        is_over: Callable[[], bool],
    ) -> None:
        begun = time.monotonic()
        while not is_over() and self._version() == mark:
            slept = time.monotonic() - begun
            if slept >= seconds:
                return
            time.sleep(min(seconds - slept, PACE.seconds(rest.waited_seconds + slept)))

    def close(self) -> None:
        with self._lock:
            self._looked_at = float("-inf")
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
