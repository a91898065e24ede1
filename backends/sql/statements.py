"""The statements of :mod:`rdzv.backends.sql.at_once`, in each database's own language.

They use what the others may not: RETURNING, writes within a read, the clock after a wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from rdzv.backends.sql.base import Language
from rdzv.backends.sql.roster import (
    from_now,
    live_in,
    look_statement,
    new_row,
    new_state,
    pulse_statement,
    says_so,
)
from rdzv.backends.sql.schema import Bytes, Tables

CROWD = 16
"""Among more live nodes an arrival or a changed entry wakes nobody, but for the last confirmation,
since the server wakes every process that listens to anything: who waits for the roster looks again
and again besides."""


@dataclass(frozen=True, slots=True)
class Statements:
    """The same for all runs, since to compile them takes longer than to execute them."""

    announce: tuple[sa.Executable, ...]
    """The last one's row tells whether the entry is new, NULL where it was there and the same; no
    row where the run has none."""
    change: tuple[sa.Executable, ...]
    """The same for who has announced another entry, which costs less; no row where it has gone."""
    pulse_after_announcing: sa.Executable
    extend: sa.Executable
    extend_same: sa.Executable
    find: sa.Executable
    pulse: sa.Executable
    look: sa.Executable
    """:func:`look_statement`."""
    look_at_state: sa.Executable
    """The same without the roster's revision; no row without a document."""
    create: sa.Executable | None = None
    swap: sa.Executable | None = None
    """Write the document and wake who waits for it. The row tells whether the run's records are
    kept; there is none where the write has lost. None where that takes more than a statement."""

    @property
    def of_a_join(self) -> tuple[sa.Executable, ...]:
        """What a node sends that joins a rendezvous."""
        return (*self.with_one_plan, self.find)

    @property
    def with_one_plan(self) -> tuple[sa.Executable, ...]:
        """Those of them for which one plan is good, however many rows there are."""
        return (
            *self.announce,
            *self.change,
            self.pulse_after_announcing,
            self.look_at_state,
            *(write for write in (self.create, self.swap) if write is not None),
        )


_AFTER_WAITING: sa.Subquery = sa.select(
    sa.literal_column(
        "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)", sa.BigInteger
    ).label("now")
).subquery("moment")
"""All statements of one message have one ``statement_timestamp``, that of its arrival: before the
wait for the run's row."""


PLACEHOLDERS = {
    **dict.fromkeys(("run", "node", "peer", "label", "topic", "new_revision"), ""),
    **dict.fromkeys(("new_label_key", "old_write_id", "new_write_id", "state_topic"), ""),
    **dict.fromkeys(("run_id", "new_node_id", "new_label", "new_data", "new_state"), b""),
    **dict.fromkeys(("ttl", "lifetime", "old_version", "new_withdrawn"), 0),
}
"""Values for all of them, where nothing is to be found or written. NULL would be no value of a
key, and planned otherwise."""


@functools.cache
def statements_for(
    tables: Tables, now: sa.ColumnElement[int], language: Language | None
) -> Statements:
    run: sa.BindParameter[str] = sa.bindparam("run", type_=sa.String)
    roster, runs = tables.roster, tables.runs
    is_live = live_in(roster, run, now)
    is_mine = sa.and_(is_live, roster.c.node_key == sa.bindparam("node", type_=sa.String))
    find = sa.select(
        sa.exists().where(roster.c.run_key == run, roster.c.expires_at <= now),
        sa.exists().where(runs.c.alive_until < now),
    )
    extend = roster.update().where(is_mine).values(expires_at=from_now(now))
    extend_same = extend.where(says_so(roster))
    states = tables.states
    columns = (states.c.version, states.c.write_id, new_state(tables), sa.null())
    look_at_state = sa.select(*columns).where(states.c.run_key == run)
    if language == "postgresql":
        return Statements(
            _announcement(tables, run, now),
            _change(tables, run, now),
            _pulse(tables, run, is_told=True),
            extend,
            extend_same,
            find,
            _pulse(tables, run, is_told=False),
            _look(tables, run),
            look_at_state,
            *_writes(tables, run, now),
        )
    announcement = _announcement_to_sqlite if language == "sqlite" else _announcement_to_mysql
    pulse, look = pulse_statement(tables, run, now), look_statement(tables, run)
    announce = announcement(tables, run, now)
    return Statements(
        announce, announce, pulse, extend, extend_same, find, pulse, look, look_at_state
    )


@functools.cache
def values_statement(tables: Tables, keys: int) -> sa.Select[Any]:
    """Key and value of so many keys, ``key0`` and so on, of a ``run``'s store."""
    store = tables.store
    run = sa.bindparam("run", type_=sa.String)
    wanted = [sa.bindparam(f"key{number}", type_=sa.String) for number in range(keys)]
    return sa.select(store.c.name_key, store.c.value).where(
        store.c.run_key == run, store.c.name_key.in_(wanted)
    )


def _changes(
    tables: Tables, now: sa.ColumnElement[int], greatest: Callable[..., Any] = sa.func.greatest
) -> dict[str, sa.ColumnElement[Any]]:
    """Number an arrival, and keep the run's records."""
    runs = tables.runs
    until = now + sa.bindparam("lifetime", type_=sa.BigInteger)
    return {
        "revision": sa.bindparam("new_revision", type_=sa.String),
        "arrivals": runs.c.arrivals + 1,
        # Others may keep the same run for longer.
        "alive_until": greatest(runs.c.alive_until, until),
    }


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
    """One statement, which also makes the run's row where it is missing."""
    runs = tables.runs
    same = (
        tables.roster.update()
        .where(_same(tables, run, now))
        .values(expires_at=from_now(now))
        .returning(sa.literal_column("1").label("one"))
        .cte("same")
    )
    changes = _changes(tables, now)
    first = {
        "run_key": run,
        "run_id": sa.bindparam("run_id", type_=Bytes),
        "revision": changes["revision"],
        "arrivals": sa.literal_column("1", sa.BigInteger),
        "alive_until": now + sa.bindparam("lifetime", type_=sa.BigInteger),
    }
    changed = (
        postgresql.insert(runs)
        .values(first)
        .on_conflict_do_update(
            index_elements=[runs.c.run_key],
            set_=changes,
            where=sa.not_(sa.exists(sa.select(same.c.one))),
        )
        .returning(runs.c.arrivals)
        .cte("changed")
    )
    put = _put(tables, run, now, changed)
    told = sa.select(put.c.arrival == changed.c.arrivals).select_from(put.join(changed, sa.true()))
    # First met inside of an ON CONFLICT, it would lose its schema.
    return (told.add_cte(same).union_all(sa.select(sa.null()).select_from(same)),)


def _change(
    tables: Tables, run: sa.ColumnElement[str], now: sa.ColumnElement[int]
) -> tuple[sa.Executable, ...]:
    """The run's row first, as everywhere: who waits for its lock holds no other."""
    roster, runs = tables.roster, tables.runs
    changed = (
        runs.update()
        .where(runs.c.run_key == run)
        .values(_changes(tables, now))
        .returning(runs.c.arrivals)
        .cte("changed")
    )
    row = new_row(run, now)
    new = {name: row[name] for name in ("expires_at", "label_key", "round_label", "data")}
    is_mine = roster.c.node_key == row["node_key"]
    change = roster.update().where(live_in(roster, run, now), is_mine, changed.c.arrivals > 0)
    return (change.values(new).returning(sa.false()),)


def _put(
    tables: Tables, run: sa.ColumnElement[str], now: sa.ColumnElement[int], changed: sa.CTE
) -> sa.CTE:
    """Write the entry where an arrival was numbered."""
    roster = tables.roster
    columns: dict[str, Any] = {**new_row(run, now), "arrival": changed.c.arrivals}
    insert = postgresql.insert(roster).from_select(
        list(columns), sa.select(*columns.values()).select_from(changed)
    )
    new: dict[str, Any] = {
        name: insert.excluded[name] for name in columns if name not in roster.primary_key
    }
    # Who is live keeps its place.
    was_live = sa.and_(roster.c.withdrawn == 0, roster.c.expires_at > now)
    new["arrival"] = sa.case((was_live, roster.c.arrival), else_=insert.excluded.arrival)
    return (
        insert.on_conflict_do_update(index_elements=list(roster.primary_key), set_=new)
        .returning(roster.c.arrival)
        .cte("put")
    )


def _writes(
    tables: Tables, run: sa.ColumnElement[str], now: sa.ColumnElement[int]
) -> tuple[sa.Executable, sa.Executable]:
    """Make the document, and change it."""
    states, runs = tables.states, tables.runs
    new: dict[str, Any] = {
        "write_id": sa.bindparam("new_write_id", type_=sa.String),
        "written_at": now,
        "state": sa.bindparam("new_state", type_=Bytes),
    }
    create = postgresql.insert(states).values(run_key=run, version=1, **new)
    swap = (
        states.update()
        .where(
            states.c.run_key == run,
            states.c.version == sa.bindparam("old_version", type_=sa.BigInteger),
            states.c.write_id == sa.bindparam("old_write_id", type_=sa.String),
        )
        .values(version=states.c.version + 1, **new)
    )

    def told(write: Any) -> sa.Executable:
        written = write.returning(states.c.version).cte("written")
        is_kept = sa.exists(
            sa.select(runs.c.run_key).where(runs.c.run_key == run, runs.c.alive_until > now)
        )
        notify = sa.cast(sa.func.pg_notify(sa.bindparam("state_topic"), ""), sa.Text)
        return sa.select(is_kept, notify).select_from(written)

    return told(create.on_conflict_do_nothing()), told(swap)


def _pulse(tables: Tables, run: sa.ColumnElement[str], *, is_told: bool) -> sa.Select[Any]:
    """:func:`pulse_statement` as it costs PostgreSQL half. With ``is_told`` it also finds
    :func:`new_state`, and wakes who waits for the roster, where it was changed and is no crowd, or
    all have confirmed."""
    roster, states, runs, now = tables.roster, tables.states, tables.runs, _AFTER_WAITING.c.now
    live = (
        sa.select(
            _count_of(roster.c.node_key == sa.bindparam("peer")).label("peers"),
            sa.func.count().label("live"),
            _count_of(roster.c.label_key == sa.bindparam("label")).label("confirmed"),
            sa.func.min(roster.c.expires_at).label("expiry"),
        )
        .where(live_in(roster, run, now))
        .lateral("live")
    )
    is_changed = runs.c.revision == sa.bindparam("new_revision", type_=sa.String)
    notify = sa.cast(sa.func.pg_notify(sa.bindparam("topic", type_=sa.String), ""), sa.Text)
    has_label = sa.bindparam("label", type_=sa.String) != ""
    is_last = sa.and_(has_label, live.c.confirmed == live.c.live)
    is_told_of = sa.and_(is_changed, sa.or_(live.c.live <= CROWD + 1, is_last))
    tell = sa.case((is_told_of, notify), else_=None)
    return sa.select(
        states.c.version,
        states.c.write_id,
        now - states.c.written_at,
        runs.c.revision,
        live.c.peers,
        live.c.live,
        live.c.confirmed,
        live.c.expiry - now,
        *([new_state(tables), tell] if is_told else []),
    ).select_from(_beside_rows_of_run(_AFTER_WAITING.join(live, sa.true()), tables, run))


def _count_of(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.func.count().filter(condition)


def _look(tables: Tables, run: sa.ColumnElement[str]) -> sa.Select[Any]:
    """:func:`look_statement` as it costs PostgreSQL half."""
    always = sa.select(sa.literal_column("1").label("one")).subquery("always")
    columns = (tables.states.c.version, tables.states.c.write_id, new_state(tables))
    return sa.select(*columns, tables.runs.c.revision).select_from(
        _beside_rows_of_run(always, tables, run)
    )


def _beside_rows_of_run(
    origin: sa.FromClause, tables: Tables, run: sa.ColumnElement[str]
) -> sa.Join:
    """With the document and the run, each of which may be missing."""
    states, runs = tables.states, tables.runs
    with_state = origin.outerjoin(states, states.c.run_key == run)
    return with_state.outerjoin(runs, runs.c.run_key == run)


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
        runs.update().where(runs.c.run_key == run, sa.not_(is_same)).values(_changes(tables, now)),
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
    is_same = sa.exists(sa.select(roster.c.node_key).where(_same(tables, run, now)))
    # Its largest of two is called otherwise.
    changes = _changes(tables, now, sa.func.max)
    return (
        runs.update().where(runs.c.run_key == run, sa.not_(is_same)).values(changes),
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
