"""MySQL and MariaDB, by PyMySQL or the driver that the user's URL names.

* Nothing tells of changes: who waits looks again, at growing intervals.
* A session reads what is committed (its default shows a transaction one moment for ever), gives up
  a lock as soon as a request gives up its answer, and is ended by the server when its client has
  gone silent.
* PyMySQL sends several statements as one message where it is asked to, other drivers do not.
* An ``UPDATE`` counts the rows that it found, changed or not, as SQLAlchemy asks of all drivers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from rdzv.backends.sql.base import Answer, ChangeSignal, Look, Pace, Polling, Rest
from rdzv.backends.sql.options import SqlOptions
from rdzv.backends.sql.pool import Pool
from rdzv.backends.sql.server import (
    OVERCROWDED,
    READ_ONLY,
    WRONG_PASSWORD,
    ServerDialect,
    masked,
)
from rdzv.errors import RendezvousSettingsError

PACE = Pace(0.01, 0.5, 0.1)
CROWDED_PACE = Pace(0.2, 1.0, 0.2)
"""Where each look makes a connection."""
LOOK_AROUND_SECONDS = 10.0
"""So often a wait asks whether connections are short."""
SILENT_SECONDS = 5
"""So much longer than a request the server bears a client that says nothing."""
LOCK_OF_THE_MAKERS = "rdzv"
CLOSED = frozenset({2006, 2013, 4031})
"""Codes that say that the connection is no more."""
DEADLINE = "deadline"
"""Of what is done on a connection, by ``time.monotonic()``, among what SQLAlchemy keeps with it."""
TIMEOUTS = {
    "pymysql": ("connect_timeout", "read_timeout", "write_timeout"),
    "mysqldb": ("connect_timeout", "read_timeout", "write_timeout"),
    "mysqlconnector": ("connection_timeout", "read_timeout", "write_timeout"),
    "mariadbconnector": ("connect_timeout", "read_timeout", "write_timeout"),
}
"""The drivers that block, and what they call the limits in whole seconds."""
WRONG_USER = {1044: WRONG_PASSWORD, 1045: WRONG_PASSWORD, 1698: WRONG_PASSWORD}


class MysqlDialect(ServerDialect):
    """MySQL 8 or newer, MariaDB 10.6 or newer."""

    now = sa.literal_column(
        "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)", sa.BigInteger
    )
    default_port = 3306
    keys_per_statement_max = 10_000
    # A server takes no larger packet than max_allowed_packet, MariaDB 16 MiB unless told.
    value_bytes_max = 12 * 1024 * 1024
    advice = {  # noqa: RUF012
        **WRONG_USER,
        1040: OVERCROWDED,
        1203: OVERCROWDED,
        1226: OVERCROWDED,
        1290: READ_ONLY,
        1836: READ_ONLY,
        1205: "Another transaction holds a lock: see it with SHOW PROCESSLIST.",
    }
    missing_table = frozenset({1146})
    missing_column = frozenset({1054})
    missing_right = frozenset({1142, 1143, 1044, 1370})
    # Overcrowded (server, user, account); deadlock, or a cluster's refusal; a row that has changed.
    transient = frozenset({1040, 1203, 1226, 1213, 1020})
    reopen = frozenset({1290, 1836})

    def __init__(self, url: sa.URL, options: SqlOptions) -> None:
        if "+" not in url.drivername:
            url = url.set(drivername=f"{url.drivername}+pymysql")
        self._driver_name = url.drivername.partition("+")[2]
        if self._driver_name not in TIMEOUTS:
            raise RendezvousSettingsError(
                f"{masked(url)}: this driver is not known to work; write mysql:// for "
                f"PyMySQL, or mysql+ and one of {', '.join(TIMEOUTS)}"
            )
        super().__init__(url, options)
        if self._driver_name == "pymysql":
            self.sends_as = "mysql"
            self._connect = _pymysql_class(self._driver)

    def connect(self) -> Any:
        positional, named = self._arguments
        limits = dict.fromkeys(TIMEOUTS[self._driver_name], self.whole_request_seconds)
        settings = (
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
            f"SET SESSION innodb_lock_wait_timeout = {self.whole_request_seconds}, "
            f"wait_timeout = {self.whole_request_seconds + SILENT_SECONDS}",
        )
        if self.sends_as is not None:
            return self._connect_by_pymysql({**named, **limits}, "; ".join(settings))
        connection = self._driver.connect(*positional, **{**named, **limits})
        try:
            # A property with some drivers, a method with others.
            if callable(connection.autocommit):
                connection.autocommit(True)
            else:
                connection.autocommit = True
            with closing(connection.cursor()) as cursor:
                for setting in settings:
                    cursor.execute(setting)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect_by_pymysql(self, named: dict[str, Any], settings: str) -> Any:
        """With few messages: a beat connects anew."""
        flags = int(named.get("client_flag", 0)) | self._driver.constants.CLIENT.MULTI_STATEMENTS
        connection = self._connect(**{**named, "client_flag": flags, "autocommit": True})
        try:
            with closing(connection.cursor()) as cursor:
                cursor.execute(settings)
        except BaseException:
            connection.close()
            raise
        return connection

    def engine(self) -> sa.Engine:
        engine = super().engine()
        if self._driver_name == "pymysql":
            for event in ("before_cursor_execute", "commit"):
                if not sa.event.contains(engine, event, _limit):
                    sa.event.listen(engine, event, _limit)
        return engine

    def code(self, error: BaseException) -> int | None:
        cause = getattr(error, "orig", None) or error
        number = getattr(cause, "errno", None)
        if isinstance(number, int):
            return number
        first = cause.args[0] if cause.args else None
        return first if isinstance(first, int) else None

    def is_transient(self, error: BaseException) -> bool:
        return super().is_transient(error) or isinstance(error, _StaleConnection)

    @contextmanager
    def making(self, connection: sa.Connection, seconds: float) -> Iterator[bool]:
        self.begin(connection, False, seconds)
        # Each statement that makes a table is a transaction, so no transaction's lock will do.
        if connection.scalar(sa.select(sa.func.get_lock(LOCK_OF_THE_MAKERS, 0))) != 1:
            yield False
            return
        try:
            yield True
        finally:
            connection.rollback()
            connection.scalar(sa.select(sa.func.release_lock(LOCK_OF_THE_MAKERS)))

    def begin(
        self, connection: sa.Connection, write: bool, seconds: float, along: Look | None = None
    ) -> None:
        driver: Any = connection.connection.driver_connection
        connection.info[DEADLINE] = time.monotonic() + max(seconds, 0.001)
        if self._driver_name == "pymysql":
            _limit(connection)
        if not write:
            return
        deadline = time.monotonic() + seconds
        try:
            with closing(driver.cursor()) as cursor:
                cursor.execute("START TRANSACTION")
        except self.driver_error as error:
            if time.monotonic() < deadline and self.code(error) in CLOSED:
                # It had been closed while it was idle; to begin changes nothing.
                connection.invalidate()
                raise _StaleConnection(str(error)) from error
            raise

    def send(
        self,
        connection: sa.Connection,
        written: Sequence[sa.Executable],
        read: Sequence[sa.Executable],
        values: dict[str, Any],
        seconds: float,
    ) -> list[Answer]:
        self.begin(connection, False, seconds)
        deadline = time.monotonic() + seconds
        driver: Any = connection.connection.driver_connection
        cursor = driver.cursor()
        texts = self.texts((*written, *read), values, lambda one: cursor.mogrify("%s", [one]))
        if written:
            texts.insert(len(written), "COMMIT")
            texts.insert(0, "START TRANSACTION")
        answers: list[Answer] = []
        try:
            cursor.execute("; ".join(texts))
            answers.append(Answer(cursor.rowcount, cursor.fetchall()))
            for _ in texts[1:]:
                _limit(connection)
                cursor.nextset()
                answers.append(Answer(cursor.rowcount, cursor.fetchall()))
        except self.driver_error as error:
            if time.monotonic() < deadline and self.code(error) in CLOSED:
                connection.invalidate()
                raise _StaleConnection(str(error)) from error
            raise
        if written:
            del answers[len(written) + 1], answers[0]
        return answers

    def signal(self) -> ChangeSignal:
        return _Signal()

    def insert_if_absent(self, table: sa.Table, values: dict[str, Any]) -> sa.Insert:
        return mysql.insert(table).values(values).prefix_with("IGNORE")

    def upsert(self, table: sa.Table, values: dict[str, Any]) -> sa.Insert:
        statement = mysql.insert(table).values(values)
        keys = [column.name for column in table.primary_key]
        others = {name: statement.inserted[name] for name in values if name not in keys}
        return statement.on_duplicate_key_update(others)


class _Signal(ChangeSignal):
    """Looks again and again, and keeps no connection meanwhile where others may lack it."""

    def __init__(self) -> None:
        self._usual, self._crowded = Polling(PACE), Polling(CROWDED_PACE)
        self._polling = self._usual
        self._looks_around_at = float("-inf")

    def mark(
        self, topics: Sequence[str], pool: Pool, deadline: float, look: Look | None = None
    ) -> None:
        now = time.monotonic()
        if now < self._looks_around_at:
            return
        with pool.connection(deadline) as connection:
            is_crowded = _is_crowded(connection)
        self._polling = self._crowded if is_crowded else self._usual
        self._looks_around_at = now + LOOK_AROUND_SECONDS
        if is_crowded:
            pool.spare(LOOK_AROUND_SECONDS)

    def sleep(
        self,
        mark: Any,
        topics: Sequence[str],
        seconds: float,
        rest: Rest,
        is_over: Callable[[], bool],
    ) -> None:
        self._polling.sleep(mark, topics, seconds, rest, is_over)

    def close(self) -> None:
        self._looks_around_at = float("-inf")


def _is_crowded(connection: sa.Connection) -> bool:
    """Whether more than half of the connections are in use that the server, or the account, may
    have. Of both a common account is told."""
    question = "SHOW GLOBAL STATUS LIKE 'Threads_connected'"
    used = int(connection.exec_driver_sql(question).one()[1])
    question = "SELECT @@max_connections, @@max_user_connections"
    most, of_the_account = connection.exec_driver_sql(question).one()
    if 2 * used > most or not of_the_account:
        return bool(2 * used > most)
    question = (
        "SELECT count(*) FROM information_schema.processlist "
        "WHERE user = substring_index(user(), '@', 1)"
    )
    return bool(2 * connection.exec_driver_sql(question).scalar_one() > of_the_account)


def _limit(connection: sa.Connection, *_: Any) -> None:
    """Let the next statement, too, end by the deadline. PyMySQL waits so long for each packet."""
    deadline = connection.info.get(DEADLINE)
    if deadline is not None:
        driver: Any = connection.connection.driver_connection
        driver._read_timeout = driver._write_timeout = max(deadline - time.monotonic(), 0.001)


@functools.cache
def _pymysql_class(driver: Any) -> Any:
    """PyMySQL's connection, but it does not ask the server to undo what was not begun, nor reads
    all certificates of the machine for each connection that checks none."""

    class Connection(driver.connections.Connection):  # type: ignore[misc]
        context_without_files: Any = None

        def _create_ssl_ctx(self, files: Any) -> Any:
            # Without any named, the server's certificate is not looked at.
            if files:
                return super()._create_ssl_ctx(files)
            if Connection.context_without_files is None:
                Connection.context_without_files = super()._create_ssl_ctx(files)
            return Connection.context_without_files

        def rollback(self) -> None:
            # Each statement that ends well and has no rows tells; one that failed leaves it as it
            # was, which at worst asks for nothing.
            status = driver.constants.SERVER_STATUS
            if self.server_status & status.SERVER_STATUS_IN_TRANS:
                super().rollback()

    return Connection


class _StaleConnection(sa.exc.SQLAlchemyError):
    """It was closed before anything was asked on it."""
