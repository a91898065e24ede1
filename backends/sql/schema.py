"""The tables: a few for all runs, with no feature that only one database has.

Text that users choose (run ids, node ids, keys) can be long, hold any character and differ only
in case, and databases disagree about all three. So rows are found by a hash of such a text, and
the text itself is stored as bytes, for people and for listings. Times are milliseconds since 1970
by the database's clock, always computed in the statement that uses them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from rdzv.errors import RendezvousStateError

SCHEMA_VERSION = 1
HASH_CHARACTERS = 32


class Blob(mysql.LONGBLOB):
    """MySQL's plain BLOB ends at 64 KiB."""

    cache_ok = True


class Bytes(sa.LargeBinary):
    """Binary data, returned as it is stored: SQLAlchemy's own type would turn the integer 5,
    which someone else has written there, into five zero bytes."""

    cache_ok = True

    def result_processor(self, dialect: Any, coltype: Any) -> Callable[[Any], Any]:
        def process(value: Any) -> Any:
            return bytes(value) if isinstance(value, (bytearray, memoryview)) else value

        return process


def hashed(text: str) -> str:
    """The key under which rows of this text are found."""
    raw = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=HASH_CHARACTERS // 2).hexdigest()


def _key(name: str, **options: Any) -> sa.Column[str]:
    return sa.Column(name, sa.String(HASH_CHARACTERS), nullable=False, **options)


def _number(name: str, **options: Any) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, **options)


def _bytes(name: str) -> sa.Column[bytes]:
    return sa.Column(name, Bytes().with_variant(Blob(), "mysql", "mariadb"), nullable=False)


def _table(name: str, metadata: sa.MetaData, *items: Any) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        *items,
        # The one that has transactions and locks of rows.
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
    )


def _roster(prefix: str, metadata: sa.MetaData) -> sa.Table:
    return _table(
        f"{prefix}roster",
        metadata,
        _key("run_key", primary_key=True),
        _key("node_key", primary_key=True),
        _number("withdrawn"),
        _number("expires_at"),
        _key("label_key"),
        _number("arrival"),
        _bytes("node_id"),
        _bytes("round_label"),
        _bytes("data"),
        # Covers the counting of a pulse, so that a thousand nodes do not read their rows.
        sa.Index(f"{prefix}roster_live", "run_key", "withdrawn", "expires_at", "label_key"),
    )


@functools.cache
def tables(prefix: str, schema: str | None = None) -> Tables:
    """The tables under one prefix. The same object again, as compiled statements are found by
    the tables in them."""
    return Tables(prefix, schema)


class Tables:
    """The tables under one prefix."""

    def __init__(self, prefix: str, schema: str | None = None) -> None:
        metadata = sa.MetaData(schema=schema)
        self.metadata = metadata
        self.schema = _table(
            f"{prefix}schema",
            metadata,
            _number("version", primary_key=True, autoincrement=False),
        )
        self.newest_version = sa.select(sa.func.max(self.schema.c.version))
        """Asks for the version of the tables, NULL where none was noted."""
        self.runs = _table(
            f"{prefix}runs",
            metadata,
            _key("run_key", primary_key=True),
            _bytes("run_id"),
            _key("revision"),
            _number("arrivals"),
            _number("alive_until"),
            sa.Index(f"{prefix}runs_alive", "alive_until"),
        )
        self.states = _table(
            f"{prefix}states",
            metadata,
            _key("run_key", primary_key=True),
            _number("version"),
            _key("write_id"),
            _number("written_at"),
            _bytes("state"),
        )
        self.roster = _roster(prefix, metadata)
        self.store = _table(
            f"{prefix}store",
            metadata,
            _key("run_key", primary_key=True),
            _key("name_key", primary_key=True),
            _bytes("name"),
            _bytes("value"),
        )
        self.queues = _table(
            f"{prefix}queues",
            metadata,
            _key("run_key", primary_key=True),
            _key("name_key", primary_key=True),
            _number("position", primary_key=True, autoincrement=False),
            _bytes("value"),
        )
        self.writers = _table(
            f"{prefix}writers",
            metadata,
            _key("run_key", primary_key=True),
            sa.Column("writer", sa.String(2 * HASH_CHARACTERS), primary_key=True),
            _key("operation"),
        )

    @property
    def of_a_run(self) -> tuple[sa.Table, ...]:
        """The tables with many rows a run, to be swept before its rows in the others."""
        return (self.store, self.queues, self.writers, self.roster)

    @property
    def all_of_runs(self) -> tuple[sa.Table, ...]:
        """Those and the rows."""
        return (*self.of_a_run, self.states, self.runs)

    def create(self, connection: sa.Connection) -> None:
        """Make what is missing; the caller holds whatever keeps others from doing it too."""
        self.metadata.create_all(connection, checkfirst=True)
        if connection.scalar(sa.select(sa.func.count()).select_from(self.schema)) == 0:
            connection.execute(self.schema.insert().values(version=SCHEMA_VERSION))

    def check(self, connection: sa.Connection, endpoint: str) -> bool:
        """Whether the tables are there, in a version that this code can use.

        Raises ``RendezvousStateError`` for another version.
        """
        if not set(self.metadata.tables) <= set(sa.inspect(connection).get_table_names()):
            return False
        return self.check_version(connection, endpoint)

    def check_version(self, connection: sa.Connection, endpoint: str) -> bool:
        """The same where the tables are known to be there."""
        return self.is_known(connection.scalar(self.newest_version), endpoint)

    def is_known(self, version: int | None, endpoint: str) -> bool:
        """The same of what :attr:`newest_version` has found."""
        if version is None:
            return False
        if version != SCHEMA_VERSION:
            raise RendezvousStateError(
                f"the tables in {endpoint} have schema version {version}, this release of rdzv "
                f"knows {SCHEMA_VERSION}: use the same release on all nodes, or another database "
                "or table_prefix"
            )
        return True
