"""A backend's most frequent calls in one message each: see :meth:`Dialect.send`.

Of a crowd that arrives, each changes the one row that numbers the arrivals. Whoever holds its lock
over several exchanges lets all others wait for each turn of this process. Here the server goes
from the lock to the commit by itself. Who waits where nobody tells asks again and again, and is
answered without what SQLAlchemy does for each statement. All calls may be repeated.

SQLite has no messages. But a transaction there keeps all others out, so it is the shorter for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from rdzv.backends.sql.base import Language
from rdzv.backends.sql.engine import Database
from rdzv.backends.sql.roster import (
    from_now,
    live_in,
    look_statement,
    new_row,
    pulse_statement,
)
from rdzv.backends.sql.runs import Run, unique
from rdzv.backends.sql.schema import Tables

CROWD = 16
"""Among more live nodes an arrival or a changed entry wakes nobody, since the server wakes every
process that listens to anything: who waits for the roster looks again and again besides."""


@dataclass(frozen=True, slots=True)
class Announced:
    """What an announcement found."""

    is_new: bool | None
    """None where the entry was there and the same, and the run's row was left alone."""
    has_expired: bool
    """Whether entries are there whose time is over."""
    has_overdue: bool
    """Whether runs are there whose time is over."""
    pulse: Sequence[Any]


class AtOnce:
    """The roster of one run, and the look of who waits."""

    def __init__(self, database: Database, run: Run) -> None:
        """Of a database whose dialect :attr:`Dialect.sends_as` something."""
        self._database, self._run = database, run
        dialect = database.dialect
        self._statements = _statements(database.tables, dialect.now, dialect.sends_as)
        self._constants = {
            "run": run.key,
            "lifetime": run.lifetime,
            "topic": run.topic("roster"),
        }

    def announce(self, values: dict[str, Any]) -> Announced:
        """Write the entry, or let it live on where it is the same.

        The pulse is of the same transaction, which holds the run's lock: so of those who arrive at
        once one finds that it is alone, and writes the run's first document.
        """
        statements = self._statements
        is_new: bool | None = None
        values = {**values, **self._constants, "new_revision": unique()}
        written, read = [*statements.announce, statements.pulse], [statements.find]
        *_, announced, pulse, found = self._database.send(written, read, values)
        if not announced.rows:
            self._run.make()
            *_, announced, pulse, found = self._database.send(written, read, values)
        for row in announced.rows:
            is_new = row[0]
        has_expired, has_overdue = found.rows[0]
        return Announced(is_new, has_expired, has_overdue, pulse.rows[0])

    def beat(self, values: dict[str, Any]) -> tuple[bool, Sequence[Any]]:
        """Let the entry live on; whether there was one, and the pulse."""
        statements, values = self._statements, {**values, **self._constants}
        written, read = [statements.extend], [statements.pulse]
        extended, pulse = self._database.send(written, read, values, alone=True)
        return extended.count == 1, pulse.rows[0]

    def look(self, values: dict[str, Any]) -> Sequence[Any]:
        """The row of :func:`look_statement`."""
        [found] = self._database.send([], [self._statements.look], {**values, "run": self._run.key})
        return found.rows[0]


@dataclass(frozen=True, slots=True)
class _Statements:
    """The same for all runs, since to compile them takes longer than to execute them."""

    announce: tuple[sa.Executable, ...]
    """The last one's row tells whether the entry is new, NULL where it was there and the same; no
    row where the run has none."""
    extend: sa.Executable
    find: sa.Executable
    pulse: sa.Executable
    look: sa.Executable


_NOW_AFTER_WAITING: sa.ColumnElement[int] = sa.literal_column(
    "(SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT))", sa.BigInteger
)
"""All statements of one message have one ``statement_timestamp``, that of its arrival: before the
wait for the run's row."""


@functools.cache
def _statements(
    tables: Tables, now: sa.ColumnElement[int], language: Language | None
) -> _Statements:
    run: sa.BindParameter[str] = sa.bindparam("run", type_=sa.String)
    roster, runs = tables.roster, tables.runs
    is_live = live_in(roster, run, now)
    is_mine = sa.and_(is_live, roster.c.node_key == sa.bindparam("node", type_=sa.String))
    find = sa.select(
        sa.exists().where(roster.c.run_key == run, roster.c.expires_at <= now),
        sa.exists().where(runs.c.alive_until < now),
    )
    is_postgresql = language == "postgresql"
    announcements = {"postgresql": _announcement, "sqlite": _announcement_to_sqlite}
    return _Statements(
        announcements.get(language or "", _announcement_to_mysql)(tables, run, now),
        roster.update().where(is_mine).values(expires_at=from_now(now)),
        find,
        pulse_statement(tables, run, _NOW_AFTER_WAITING if is_postgresql else now),
        look_statement(tables, run),
    )


def _change(
    tables: Tables, run: sa.ColumnElement[str], now: sa.ColumnElement[int], unless: sa.Exists
) -> sa.Update:
    """Number an arrival, and keep the run's records."""
    runs = tables.runs
    until = now + sa.bindparam("lifetime", type_=sa.BigInteger)
    return (
        runs.update()
        .where(runs.c.run_key == run, sa.not_(unless))
        .values(
            revision=sa.bindparam("new_revision", type_=sa.String),
            arrivals=runs.c.arrivals + 1,
            # Others may keep the same run for longer.
            alive_until=sa.func.greatest(runs.c.alive_until, until),
        )
    )


def _same(
    tables: Tables, run: sa.ColumnElement[str], now: sa.ColumnElement[int]
) -> sa.ColumnElement[bool]:
    """Which row is a live entry that says what is announced."""
    roster, row = tables.roster, new_row(run, now)
    names = ("node_key", "data", "round_label")
    return sa.and_(live_in(roster, run, now), *(roster.c[name] == row[name] for name in names))


def _announcement(
    tables: Tables, run: sa.ColumnElement[str], now: sa.ColumnElement[int]
) -> tuple[sa.Executable, ...]:
    """One statement."""
    roster, runs = tables.roster, tables.runs
    row = new_row(run, now)
    is_live = live_in(roster, run, now)
    same = (
        roster.update()
        .where(_same(tables, run, now))
        .values(expires_at=row["expires_at"])
        .returning(sa.literal_column("1").label("one"))
        .cte("same")
    )
    changed = (
        _change(tables, run, now, sa.exists(sa.select(same.c.one)))
        .returning(runs.c.arrivals)
        .cte("changed")
    )
    columns: dict[str, Any] = {**row, "arrival": changed.c.arrivals}
    insert = postgresql.insert(roster).from_select(
        list(columns), sa.select(*columns.values()).select_from(changed)
    )
    new: dict[str, Any] = {
        name: insert.excluded[name] for name in columns if name not in roster.primary_key
    }
    # Who is live keeps its place.
    was_live = sa.and_(roster.c.withdrawn == 0, roster.c.expires_at > now)
    new["arrival"] = sa.case((was_live, roster.c.arrival), else_=insert.excluded.arrival)
    put = (
        insert.on_conflict_do_update(index_elements=list(roster.primary_key), set_=new)
        .returning(roster.c.arrival)
        .cte("put")
    )
    some: sa.Select[Any] = (
        sa.select(sa.literal_column("1").label("one")).where(is_live).limit(CROWD + 1)
    )
    is_crowd = sa.select(sa.func.count() > CROWD).select_from(some.subquery()).scalar_subquery()
    notify = sa.cast(sa.func.pg_notify(sa.bindparam("topic", type_=sa.String), ""), sa.Text)
    told = sa.select(
        put.c.arrival == changed.c.arrivals, sa.case((is_crowd, None), else_=notify)
    ).select_from(put.join(changed, sa.true()))
    return (told.union_all(sa.select(sa.null(), sa.null()).select_from(same)),)


def _announcement_to_mysql(
    tables: Tables, run: sa.ColumnElement[str], now: sa.ColumnElement[int]
) -> tuple[sa.Executable, ...]:
    """Three statements: the second one changes nothing but a time where the first one has found
    the same entry. The database's clock is read by each, after it has waited for its turn."""
    roster, runs = tables.roster, tables.runs
    row = {**new_row(run, now), "arrival": runs.c.arrivals}
    keys = roster.primary_key
    put = mysql.insert(roster).from_select(
        list(row), sa.select(*row.values()).where(runs.c.run_key == run)
    )
    # Who is live keeps its place. What stands behind sees what was set before.
    was_live = sa.and_(roster.c.withdrawn == 0, roster.c.expires_at > now)
    place = ("arrival", sa.case((was_live, roster.c.arrival), else_=runs.c.arrivals))
    others = [(name, row[name]) for name in row if name not in keys and name != "arrival"]
    is_same = sa.exists(sa.select(roster.c.node_key).where(_same(tables, run, now)))
    return (
        _change(tables, run, now, is_same),
        put.on_duplicate_key_update([place, *others]),
        _told(tables, run, row),
    )


def _announcement_to_sqlite(
    tables: Tables, run: sa.ColumnElement[str], now: sa.ColumnElement[int]
) -> tuple[sa.Executable, ...]:
    """The same three."""
    roster, runs = tables.roster, tables.runs
    row = {**new_row(run, now), "arrival": runs.c.arrivals}
    put = sqlite.insert(roster).from_select(
        list(row), sa.select(*row.values()).where(runs.c.run_key == run)
    )
    new: dict[str, Any] = {
        name: put.excluded[name] for name in row if name not in roster.primary_key
    }
    # Who is live keeps its place.
    was_live = sa.and_(roster.c.withdrawn == 0, roster.c.expires_at > now)
    new["arrival"] = sa.case((was_live, roster.c.arrival), else_=put.excluded.arrival)
    until = now + sa.bindparam("lifetime", type_=sa.BigInteger)
    is_same = sa.exists(sa.select(roster.c.node_key).where(_same(tables, run, now)))
    return (
        # Its largest of two is called otherwise.
        _change(tables, run, now, is_same).values(
            alive_until=sa.func.max(runs.c.alive_until, until)
        ),
        put.on_conflict_do_update(index_elements=list(roster.primary_key), set_=new),
        _told(tables, run, row),
    )


def _told(
    tables: Tables, run: sa.ColumnElement[str], row: dict[str, Any]
) -> sa.Select[tuple[bool | None]]:
    """Whether the entry is new, after it was put; NULL where the run's row was left alone."""
    roster, runs = tables.roster, tables.runs
    is_changed = runs.c.revision == sa.bindparam("new_revision", type_=sa.String)
    return (
        sa.select(sa.case((is_changed, roster.c.arrival == runs.c.arrivals), else_=None))
        .select_from(roster.join(runs, runs.c.run_key == roster.c.run_key))
        .where(roster.c.run_key == run, roster.c.node_key == row["node_key"])
    )
