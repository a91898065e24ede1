"""PostgreSQL, by psycopg 3.

* No state of a session where a pooler may stand behind the connection, which may give each
  transaction to another one of its own. Time limits are set in the transaction that they are for.
  Only where the server itself has told that it is there, statements are prepared.
* libpq waits for an answer for ever. So the loop that waits for the socket is ours, with a
  deadline; a connection whose answer did not come is closed.
* The server ends a transaction whose client has gone silent, so that nobody waits long for a lock
  of one that is behind a broken network.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg.adapt import Transformer
from psycopg.waiting import Ready, Wait
from sqlalchemy.dialects import postgresql

from rdzv.backends.sql.base import Answer, ChangeSignal, Look, Pace
from rdzv.backends.sql.listen import Listener, StaleConnection, unless_stale
from rdzv.backends.sql.names import addresses
from rdzv.backends.sql.options import SqlOptions
from rdzv.backends.sql.prepared import CODES, NOTHING_PREPARED, PLAN_ONCE, Prepared
from rdzv.backends.sql.schema import Tables
from rdzv.backends.sql.server import (
    OVERCROWDED,
    READ_ONLY,
    WRONG_PASSWORD,
    ServerDialect,
    masked,
    without_effect,
)
from rdzv.backends.sql.shortage import COUNT, LIMITS, Limits
from rdzv.backends.sql.statements import PLACEHOLDERS, statements_for
from rdzv.errors import RendezvousSettingsError

POLL_SECONDS = 0.25
"""The socket is looked at by itself at least so often, as psycopg does."""
ASK_SECONDS_MIN = 1.0
"""A question has so long, even where the call's time was spent on hosts that are silent: else no
call would ever reach the one behind them."""
OPENED_SECONDS = 5.0
"""Who will join may have to wait for its agent to be ready for that."""
LIMITS_SECONDS = 60.0
"""For so long limits of connections are taken to be what they were."""
UNFLUSHED = "SET LOCAL synchronous_commit = off"
"""Of the nodes that announce themselves one after the other holds the run's row, so that each
would wait for the disk of all before it. What a crash takes with it is announced again: by nodes
that have lost contact, and by those that have not noticed, at their next beat. A document that is
written later does not outlive what was sent before."""
LOCK_OF_THE_MAKERS = 0x72647A76
"""What those who make tables hold: "rdzv" as a number."""
TOO_MANY_CONNECTIONS = "53300"
NO_ANSWER = "the server has not answered in time"


class Connection(psycopg.Connection[Any]):
    """One whose every statement ends by a deadline."""

    deadline: float = math.inf
    """By ``time.monotonic()``."""
    prepared: Mapping[Any, Prepared] = NOTHING_PREPARED
    """By statement."""

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """Drive an operation of psycopg's to its end; see ``psycopg.Connection.wait``."""
        poller = select.poll()
        descriptor = self.pgconn.socket
        try:
            wanted = next(gen)
            while True:
                events = (select.POLLIN if wanted & Wait.R else 0) | (
                    select.POLLOUT if wanted & Wait.W else 0
                )
                poller.register(descriptor, events)
                left = self.deadline - time.monotonic()
                if left <= 0:
                    raise psycopg.OperationalError(NO_ANSWER)
                found = poller.poll(math.ceil(min(left, POLL_SECONDS) * 1000))
                wanted = self._next(gen, wanted, found[0][1] if found else 0)
        except StopIteration as end:
            return end.value
        except BaseException:
            # In the middle of an exchange: of no use to anybody.
            self.close()
            raise

    @staticmethod
    def _next(gen: Any, wanted: int, seen: int) -> int:
        if not seen:
            following = gen.send(Ready.NONE)
            return wanted if following is None else int(following)
        broken = select.POLLERR | select.POLLHUP | select.POLLNVAL
        ready = (Ready.R if seen & (select.POLLIN | broken) else 0) | (
            Ready.W if seen & (select.POLLOUT | broken) else 0
        )
        return int(gen.send(ready & wanted or wanted))


class PostgresqlDialect(ServerDialect):
    """PostgreSQL 12 or newer, directly or behind a pooler."""

    # One value within a message, and not that of a transaction's begin.
    now = sa.literal_column(
        "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000 AS BIGINT)", sa.BigInteger
    )
    default_port = 5432
    sends_as = "postgresql"
    roster_pace = Pace(0.02, 0.25, 0.1)
    keys_per_statement_max = 10_000
    advice = {  # noqa: RUF012
        "28P01": WRONG_PASSWORD,
        "28000": WRONG_PASSWORD,
        TOO_MANY_CONNECTIONS: OVERCROWDED,
        "25006": READ_ONLY,
    }
    missing_table = frozenset({"42P01", "3F000"})
    missing_column = frozenset({"42703"})
    missing_right = frozenset({"42501"})
    # Overcrowded; serialization failure; deadlock.
    transient = frozenset({TOO_MANY_CONNECTIONS, "40001", "40P01"})
    # A standby; a standby that was promoted; a server that shuts down.
    reopen = frozenset({"25006", "57P01", "57P02"})

    _limits: tuple[Limits | None, float] = (None, 0.0)
    _may_prepare = True

    def __init__(self, url: sa.URL, options: SqlOptions) -> None:
        if url.drivername not in ("postgresql", "postgresql+psycopg"):
            raise RendezvousSettingsError(
                f"{masked(url)}: rdzv reaches PostgreSQL by psycopg 3; write "
                "postgresql:// or postgresql+psycopg://"
            )
        super().__init__(url.set(drivername="postgresql+psycopg"), options)

    def engine_options(self) -> dict[str, Any]:
        return {"use_native_hstore": False}

    def connect(self) -> Connection:
        positional, named = self._arguments
        # psycopg gives each host so long, one after the other.
        hosts = str(named.get("host") or "").count(",") + 1
        allowed = float(named.get("connect_timeout") or math.inf)
        seconds = min(self.request_seconds / hosts, allowed)
        named = {**_with_addresses(named, seconds), "connect_timeout": max(2, math.ceil(seconds))}
        if named.get("client_encoding", "SQL_ASCII").upper() == "SQL_ASCII":
            # A database of that encoding would have psycopg return bytes for text.
            named["client_encoding"] = "UTF8"
        try:
            connection = Connection.connect(
                *positional, **named, autocommit=True, prepare_threshold=None
            )
        except psycopg.Error as error:
            # Its frames would keep a half-made connection open until garbage is collected.
            error.__traceback__ = None
            raise
        connection.deadline = time.monotonic() + self.request_seconds
        return connection

    def code(self, error: BaseException) -> str | None:
        cause = getattr(error, "orig", None) or error
        if not isinstance(cause, psycopg.Error):
            return None
        if cause.sqlstate is not None:
            return cause.sqlstate
        # While a connection is made, psycopg gives the server's words and no code.
        return next((code for words, code in _WORDS if words in str(cause)), None)

    def is_transient(self, error: BaseException) -> bool:
        return super().is_transient(error) or isinstance(error, StaleConnection)

    def _try_all(
        self, connection: sa.Connection, tables: Tables, seconds: float, joins: bool
    ) -> Any:
        self.begin(connection, False, seconds)
        driver: Any = connection.connection.driver_connection
        literal = _literals_for(driver)
        # The last one of these is carried out, which a server that takes no writes refuses.
        asked = [tables.newest_version, self._asks_rights(tables), without_effect(tables)[-1]]
        texts = [*self.texts(asked, {}, literal), LIMITS, *([COUNT] if joins else [])]
        try:
            answers = self.answers(driver, "; ".join(texts))
            limits = self._note_limits(driver, answers[len(asked)].rows[0])
            if joins:
                is_crowded = limits.is_direct and limits.are_short(driver, answers[-1].rows[0][1])
                self.opened_seconds = 0.0 if is_crowded else OPENED_SECONDS
                self._plan(driver, tables, limits.is_direct and not is_crowded)
        except psycopg.Error:
            # It is of no more use, as :meth:`Connection.wait` has it.
            connection.invalidate()
            raise
        if not answers[1].rows[0][0]:
            # It may have them column by column.
            super()._try_all(connection, tables, seconds, joins)
        return answers[0].rows[0][0]

    def _plan(self, driver: Connection, tables: Tables, is_kept: bool) -> None:
        """Let the server plan now what is sent when many join at once, and keep that where the
        connection ``is_kept`` for it: whatever it has against a statement is told at the start."""
        statements = statements_for(tables, self.now, self.sends_as)
        literal = _literals_for(driver)
        before: list[str] = []
        # Who makes the tables opens twice.
        if is_kept and self._may_prepare and not driver.prepared:
            driver.prepared = {
                statement: Prepared.of(*self._compiled(statement, literal))
                for statement in statements.with_one_plan
            }
            before = [PLAN_ONCE, *(one.definition for one in driver.prepared.values())]
        texts = self._texts(driver, statements.of_a_join, PLACEHOLDERS)
        try:
            self.answers(driver, "; ".join((*before, *(f"EXPLAIN {text}" for text in texts))))
        except psycopg.Error as error:
            if not before or error.sqlstate is None:
                raise
            # A server that merely speaks like PostgreSQL may know no such thing. What it has
            # against the statements themselves it will say once more.
            self._may_prepare = False
            raise StaleConnection(str(error)) from error

    def _asks_rights(self, tables: Tables) -> sa.Select[Any]:
        """Asks for all rights that are needed, which costs less than to try them."""
        name_of = self._by_name.identifier_preparer.format_table
        return _rights(tuple(map(name_of, tables.all_of_runs)))

    def limits_by(self, driver: Any) -> Limits:
        """The limits of connections, not older than that, by the driver's connection."""
        limits, read_at = self._limits
        if limits is None or time.monotonic() - read_at > LIMITS_SECONDS:
            return self._note_limits(driver, driver.execute(LIMITS).fetchone())
        return limits

    def _note_limits(self, driver: Any, row: Sequence[Any]) -> Limits:
        limits = Limits.of(driver, row)
        self._limits = limits, time.monotonic()
        return limits

    @contextmanager
    def making(self, connection: sa.Connection, seconds: float) -> Iterator[bool]:
        self.begin(connection, True, seconds)
        question = sa.select(sa.func.pg_try_advisory_xact_lock(LOCK_OF_THE_MAKERS))
        try:
            yield bool(connection.scalar(question))
        finally:
            connection.rollback()

    def make_schema(self, connection: sa.Connection) -> None:
        schema = self._options.schema
        if schema is not None and not sa.inspect(connection).has_schema(schema):
            connection.execute(sa.schema.CreateSchema(schema, if_not_exists=True))

    def begin(
        self, connection: sa.Connection, write: bool, seconds: float, along: Look | None = None
    ) -> None:
        driver: Any = connection.connection.driver_connection
        seconds = max(seconds, min(ASK_SECONDS_MIN, self.request_seconds))
        driver.deadline = time.monotonic() + seconds
        if not write:
            return
        # Nothing is written before the commit.
        if along is None:
            with unless_stale(driver):
                driver.execute(_begin(seconds))
        else:
            text = self.text(driver, along.statement, along.values)
            along.answer = self.answers(driver, f"{_begin(seconds)}; {text}")[-1]

    def send(
        self,
        connection: sa.Connection,
        written: Sequence[sa.Executable],
        read: Sequence[sa.Executable],
        values: dict[str, Any],
        seconds: float,
    ) -> list[Answer]:
        self.begin(connection, False, seconds)
        driver: Any = connection.connection.driver_connection
        texts = self._texts(driver, (*written, *read), values)
        if not written:
            return self.answers(driver, "; ".join(texts))
        texts.insert(len(written), "COMMIT")
        begin = f"{_begin(driver.deadline - time.monotonic())}; {UNFLUSHED}"
        answers = self.answers(driver, "; ".join((begin, *texts)))
        answers = answers[len(answers) - len(texts) :]
        del answers[len(written)]
        return answers

    def text(self, driver: Any, statement: sa.Executable, values: dict[str, Any]) -> str:
        """The statement as it is sent by this connection of the driver's."""
        [text] = self._texts(driver, [statement], values)
        return text

    def _texts(
        self, driver: Connection, statements: Sequence[sa.Executable], values: Mapping[str, Any]
    ) -> list[str]:
        prepared = driver.prepared if self._may_prepare else NOTHING_PREPARED
        return self.texts(statements, values, _literals_for(driver), prepared)

    def answers(self, driver: Any, message: str) -> list[Answer]:
        """To all statements of a message. Raises :class:`StaleConnection` where it was lost before
        anything was asked that may not be repeated."""
        answers: list[Answer] = []
        cursor = psycopg.ClientCursor(driver)
        with unless_stale(driver), self._unless_not_prepared(driver):
            cursor.execute(message)
            while True:
                # Not by its description, which makes an object for each column.
                has_rows = cursor.pgresult is not None and cursor.pgresult.nfields > 0
                rows = cursor.fetchall() if has_rows else ()
                answers.append(Answer(cursor.rowcount, rows))
                if not cursor.nextset():
                    return answers

    @contextmanager
    def _unless_not_prepared(self, driver: Connection) -> Iterator[None]:
        """Where the server does not have prepared what this side takes to be, nothing is any more,
        and the connection is stale."""
        try:
            yield
        except psycopg.Error as error:
            if driver.prepared and error.sqlstate in CODES:
                self._may_prepare = False
                raise StaleConnection(str(error)) from error
            raise

    def signal(self) -> ChangeSignal:
        pooled, crowded = Pace(0.01, 0.5, 0.1), Pace(0.5, 2.0, 0.2)
        return Listener(self, pooled, crowded)

    def notify(self, connection: sa.Connection, topics: Sequence[str]) -> None:
        if topics:
            wakes = [sa.func.pg_notify(topic, "") for topic in dict.fromkeys(topics)]
            connection.execute(sa.select(*wakes))

    def insert_if_absent(self, table: sa.Table, values: dict[str, Any]) -> sa.Insert:
        return postgresql.insert(table).values(values).on_conflict_do_nothing()

    def upsert(self, table: sa.Table, values: dict[str, Any]) -> sa.Insert:
        statement = postgresql.insert(table).values(values)
        keys = [column.name for column in table.primary_key]
        others = {name: statement.excluded[name] for name in values if name not in keys}
        return statement.on_conflict_do_update(index_elements=keys, set_=others)


def _literals_for(driver: Any) -> Callable[[Any], str]:
    transformer = Transformer(driver)
    encoding = driver.info.encoding
    return lambda value: transformer.as_literal(value).decode(encoding)


@functools.cache
def _rights(names: tuple[str, ...]) -> sa.Select[Any]:
    rights = ("SELECT", "INSERT", "UPDATE", "DELETE")
    has = [sa.func.has_table_privilege(name, right) for name in names for right in rights]
    return sa.select(sa.and_(*has))


def _begin(seconds: float) -> str:
    limit = max(1, round(seconds * 1000))
    names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
    limits = "".join(f"; SET LOCAL {name} = {limit}" for name in names)
    return f"BEGIN ISOLATION LEVEL READ COMMITTED{limits}"


def _with_addresses(named: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The same hosts, each with its addresses, looked up within so many seconds each. A host that
    is not found stays out, unless none is found."""
    hosts = str(named.get("host") or "")
    if not hosts or named.get("hostaddr") or all(map(_needs_no_look_up, hosts.split(","))):
        return dict(named)
    ports = str(named.get("port") or "").split(",")
    found: list[tuple[str, str, str]] = []
    trouble: OSError | None = None
    for index, host in enumerate(hosts.split(",")):
        port = ports[index] if len(ports) > 1 else ports[0]
        if host.startswith("/"):
            found.append((host, "", port))
            continue
        try:
            found += [(host, address, port) for address in addresses(host, seconds)]
        except OSError as error:
            trouble = error
    if not found and trouble is not None:
        raise psycopg.OperationalError(str(trouble))
    names, numbers, ports_of = (",".join(column) for column in zip(*found, strict=True))
    return {**named, "host": names, "hostaddr": numbers, "port": ports_of}


def _needs_no_look_up(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.startswith("/")
    return True


_WORDS = (
    ("too many clients", TOO_MANY_CONNECTIONS),
    ("remaining connection slots", TOO_MANY_CONNECTIONS),
    ("too many connections", TOO_MANY_CONNECTIONS),
    ("no more connections allowed", TOO_MANY_CONNECTIONS),
    ("authentication failed", "28P01"),
    ("no password supplied", "28P01"),
)
