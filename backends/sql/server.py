"""What databases share that are servers: connections by URL, tables made once, rights, errors.

* Statements outside a transaction commit by themselves, so none is left open by a read; a
  transaction is begun and ended in so many words.
* Every right is tried when the tables are looked after: a role that may not delete is told at the
  start of its job, and not when the first run is swept.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rdzv.backends.sql.base import Dialect, Trouble
from rdzv.backends.sql.options import SqlOptions
from rdzv.backends.sql.pool import Pool
from rdzv.backends.sql.prepared import NOTHING_PREPARED, Prepared
from rdzv.backends.sql.schema import SCHEMA_VERSION, Tables
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousSettingsError,
    mask_secrets,
    secrets_in,
)

CONNECTIONS_MAX = 4
IDLE_SECONDS = 1.0
MAKERS_PAUSE_SECONDS = 0.1
"""Who finds that another one makes the tables looks so often whether they are there."""
MISSING_TABLE = "The tables were removed; the next call makes them anew."
OTHER_TABLES = (
    "The tables with table_prefix={} are not as this release of rdzv has made them: choose another "
    "prefix or database, or have them removed"
)
MISSING_RIGHT = "The role lacks a right: docs/sql.md lists what is needed."
WRONG_PASSWORD = (
    "Give user and password in the URL, or password_file=…, or by the driver's own means."
)
OVERCROWDED = "The server has no connection left: raise its limit, or put a pooler in front."
READ_ONLY = "This server takes no writes: it may be a standby. The next call connects anew."
UNREACHABLE = "Look whether the server runs and can be reached from here."

_compiled: dict[Any, tuple[str, dict[str, str]]] = {}
"""By dialect and statement."""
_engines: dict[tuple[sa.URL, float], sa.Engine] = {}


class ServerDialect(Dialect):
    """A database that is reached by an SQLAlchemy URL."""

    connections_max = CONNECTIONS_MAX
    idle_seconds = IDLE_SECONDS
    can_skip_locked = True
    can_share = True
    advice: Mapping[Any, str] = {}
    """What to do about an error, by the driver's code."""
    missing_table: frozenset[Any] = frozenset()
    """Codes that say that a table is not there."""
    missing_column: frozenset[Any] = frozenset()
    """Codes that say so of a column."""
    missing_right: frozenset[Any] = frozenset()
    transient: frozenset[Any] = frozenset()
    """Codes of :meth:`is_transient`."""
    reopen: frozenset[Any] = frozenset()
    """Codes after which all connections are made anew."""

    def __init__(self, url: sa.URL, options: SqlOptions) -> None:
        if options.password is not None:
            url = url.set(password=options.password)
        self._url, self._options = url, options
        self._secrets = (*_secrets_of(url), options.password)
        self.endpoint = masked(url)
        self.request_seconds = options.request_seconds
        self.open_seconds = max(options.read_timeout_seconds, options.request_seconds)
        try:
            dialect: Any = url.get_dialect()
            self._sqlalchemy: Any = dialect()
            self._by_name: Any = dialect(paramstyle="pyformat")
            self._driver: Any = dialect.import_dbapi()
            self._arguments = self._sqlalchemy.create_connect_args(url)
        except sa.exc.NoSuchModuleError as error:
            raise RendezvousSettingsError(
                f"{self.endpoint}: SQLAlchemy knows no driver {url.drivername}"
            ) from error
        except (sa.exc.ArgumentError, ValueError, TypeError):
            raise RendezvousSettingsError(
                f"{self.endpoint}: an option after the '?' cannot be read"
            ) from None
        self.driver_error = self._driver.Error

    @abstractmethod
    def connect(self) -> Any:
        """A connection of the driver's, on which each statement is a transaction of its own until
        one is begun in so many words."""

    @abstractmethod
    def code(self, error: BaseException) -> Any:
        """The driver's code of its error; None where it has none."""

    @abstractmethod
    def making(self, connection: sa.Connection, seconds: float) -> Any:
        """A context in which nobody else makes tables, or whose value says that another one
        does."""

    def route(self) -> tuple[str, int] | None:
        host = self._url.host
        if not host or host.startswith("/"):
            return None
        return host, self._url.port or self.default_port

    default_port: int

    def engine(self) -> sa.Engine:
        # One for all that is alike: it has no connections, but the statements it has compiled.
        key = (self._url, self.request_seconds)
        engine = _engines.get(key)
        if engine is None:
            made = sa.create_engine(
                self._url,
                creator=self.connect,
                poolclass=sa.NullPool,
                pool_reset_on_return=None,
                **self.engine_options(),
            )
            engine = _engines.setdefault(key, made)
        return engine

    def engine_options(self) -> dict[str, Any]:
        """What :func:`sqlalchemy.create_engine` is told besides."""
        return {}

    def texts(
        self,
        statements: Sequence[Any],
        values: Mapping[str, Any],
        literal: Callable[[Any], str],
        prepared: Mapping[Any, Prepared] = NOTHING_PREPARED,
    ) -> list[str]:
        """The statements as they are sent: each is compiled once, and each value is made a
        ``literal`` of the language once, however many of them name it. Of what is ``prepared``
        only the values are sent."""
        literals = {name: literal(value) for name, value in values.items()}
        texts = []
        for statement in statements:
            if statement in prepared:
                texts.append(prepared[statement].call(literals))
                continue
            text, fixed = self._compiled(statement, literal)
            texts.append(text % {**fixed, **literals})
        return texts

    def _compiled(
        self, statement: Any, literal: Callable[[Any], str]
    ) -> tuple[str, dict[str, str]]:
        """The statement's text, and the literals that it brings with it."""
        key = (type(self), statement)
        if key not in _compiled:
            compiled = statement.compile(dialect=self._by_name)
            fixed = {n: literal(v) for n, v in compiled.params.items() if v is not None}
            _compiled[key] = (compiled.string, fixed)
        return _compiled[key]

    def is_replaced(self) -> bool:
        return False

    def forget(self) -> None:
        """Nothing is kept."""

    def prepare(self, tables: Tables, pool: Pool, deadline: float, joins: bool) -> None:
        with pool.connection(deadline) as connection:
            self.begin(connection, False, deadline - time.monotonic())
            try:
                if self._lacks(connection, tables, deadline, joins) is None:
                    return
                self._make(connection, tables, deadline)
                missing = self._lacks(connection, tables, deadline, joins)
                if missing is not None:
                    raise RendezvousSettingsError(
                        f"{self.endpoint}: {missing}. {self._other_tables}"
                    )
            except (sa.exc.DBAPIError, self.driver_error) as error:
                if self.code(error) in self.missing_right:
                    raise RendezvousSettingsError(
                        f"{self.endpoint}: {self._said(error)}. {MISSING_RIGHT}"
                    ) from error
                raise

    @property
    def _other_tables(self) -> str:
        return OTHER_TABLES.format(self._options.table_prefix)

    def _lacks(
        self, connection: sa.Connection, tables: Tables, deadline: float, joins: bool
    ) -> str | None:
        """What of the tables is not there; None where they are. Raises the driver's error where
        they may not be used, ``RendezvousStateError`` where they are of another release."""
        try:
            seconds = max(deadline - time.monotonic(), 1.0)
            version = self._try_all(connection, tables, seconds, joins)
            is_known = tables.is_known(version, self.endpoint)
            return None if is_known else f"no version in {tables.schema.name}"
        except (sa.exc.DBAPIError, self.driver_error) as error:
            code = self.code(error)
            was_answered = code is not None and not self.is_transient(error)
            if was_answered and code not in self.missing_right:
                self._refuse_another_release(connection, tables)
            if code not in self.missing_table | self.missing_column:
                raise
            return self._said(error)
        finally:
            connection.rollback()

    def _refuse_another_release(self, connection: sa.Connection, tables: Tables) -> None:
        """Of one, tables or columns may be missing, or be of other types."""
        with contextlib.suppress(sa.exc.DBAPIError, self.driver_error):
            connection.rollback()
            tables.check_version(connection, self.endpoint)

    def _try_all(
        self, connection: sa.Connection, tables: Tables, seconds: float, joins: bool
    ) -> Any:
        """Try all rights without effect; return the tables' version. For who ``joins``, as
        :meth:`prepare` has it."""
        statements = (tables.newest_version, *without_effect(tables))
        if self.sends_as is not None:
            return self.send(connection, [], statements, {}, seconds)[0].rows[0][0]
        self.begin(connection, True, seconds)
        version, *_ = [connection.execute(each) for each in statements]
        return version.scalar_one()

    def _make(self, connection: sa.Connection, tables: Tables, deadline: float) -> None:
        if not self._options.create_tables:
            command = f"python -m rdzv.backends.sql schema --dialect {self._url.get_backend_name()}"
            raise RendezvousSettingsError(
                f"{self.endpoint} has no tables of rdzv with table_prefix="
                f"{self._options.table_prefix}, and create_tables=false: have an administrator run "
                f"what `{command}` prints, or check database, schema and prefix"
            )
        try:
            while not self._make_alone(connection, tables, deadline):
                # Who waited for the lock would go on one by one, each over several exchanges.
                pause = random.uniform(MAKERS_PAUSE_SECONDS / 2, MAKERS_PAUSE_SECONDS)
                if time.monotonic() + pause > deadline:
                    raise RendezvousConnectionError(
                        f"{self.endpoint}: another process is making the tables and does not end"
                    )
                time.sleep(pause)
                if self._lacks(connection, tables, deadline, joins=False) is None:
                    return
        except sa.exc.DBAPIError as error:
            if self.code(error) in self.missing_right:
                raise RendezvousSettingsError(
                    f"{self.endpoint}: the tables are missing and this role may not make them "
                    f"({self._said(error)}). Have an administrator make them: docs/sql.md says how."
                ) from error
            raise

    def _make_alone(self, connection: sa.Connection, tables: Tables, deadline: float) -> bool:
        """Whether the tables are there now; False where another one is making them."""
        with self.making(connection, deadline - time.monotonic()) as is_alone:
            if not is_alone or self._is_made_by_now(connection, tables):
                return bool(is_alone)
            self.make_schema(connection)
            tables.metadata.create_all(connection, checkfirst=True)
            connection.execute(self.insert_if_absent(tables.schema, {"version": SCHEMA_VERSION}))
            connection.commit()
            return True

    def _is_made_by_now(self, connection: sa.Connection, tables: Tables) -> bool:
        inspector, schema = sa.inspect(connection), self._options.schema
        # First of all: nothing is to be made among the tables of another release.
        is_known = inspector.has_table(tables.schema.name, schema) and tables.check_version(
            connection, self.endpoint
        )
        names = [table.name for table in tables.metadata.sorted_tables]
        return is_known and all(inspector.has_table(name, schema) for name in names)

    def make_schema(self, connection: sa.Connection) -> None:
        """Make the schema of the tables, where that is a thing of its own and missing."""

    def explain(self, error: BaseException) -> Trouble:
        code = self.code(error)
        advice = self.advice.get(code, UNREACHABLE)
        if code in self.missing_table:
            advice = MISSING_TABLE
        elif code in self.missing_column:
            advice = self._other_tables
        elif code in self.missing_right:
            advice = MISSING_RIGHT
        text = f"{self.endpoint}: {self._said(error)}. {advice}"
        return Trouble(
            RendezvousConnectionError(text), code in self.missing_table or code in self.reopen
        )

    def is_transient(self, error: BaseException) -> bool:
        return self.code(error) in self.transient

    def _said(self, error: BaseException) -> str:
        cause = getattr(error, "orig", None) or error
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        return mask_secrets(" ".join(line.strip() for line in lines[:3]), *self._secrets)

    @property
    def whole_request_seconds(self) -> int:
        """For drivers and servers that count whole seconds."""
        return max(1, math.ceil(self.request_seconds))


def masked(url: sa.URL) -> str:
    """The URL without its secrets, which may also stand after the '?'."""
    return mask_secrets(url.render_as_string(), *_secrets_of(url))


def _secrets_of(url: sa.URL) -> tuple[str | None, ...]:
    return (*secrets_in(url.render_as_string(hide_password=False)), url.password)


@functools.cache
def without_effect(tables: Tables) -> tuple[sa.Executable, ...]:
    """Statements that need all rights that are needed, and change nothing."""
    statements: list[sa.Executable] = []
    for table in tables.all_of_runs:
        names, first = [column.name for column in table.columns], next(iter(table.columns))
        statements += (
            table.insert().from_select(names, sa.select(table).where(sa.false())),
            table.update().where(sa.false()).values({first: first}),
            table.delete().where(sa.false()),
        )
    return tuple(statements)
