"""The rows of a run's roster: statements, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rdzv.backends.sql.engine import Database
from rdzv.backends.sql.runs import delete_some
from rdzv.backends.sql.schema import Bytes, Tables, hashed
from rdzv.errors import RendezvousStateError
from rdzv.ports import Entry, Listed, Pulse, Question, Token

PURGE_ROWS_MAX = 100
PULSE_COLUMNS = 8
"""Of each row that :func:`pulse_of` reads; a dialect may ask for more behind them."""


class RosterRows:
    """The statements about a run's roster."""

    def __init__(self, database: Database, run_key: str) -> None:
        tables, now = database.tables, database.dialect.now
        roster = tables.roster
        self._endpoint, self._table = database.endpoint, roster
        self._put = database.dialect.upsert(
            roster, {**new_row(sa.literal(run_key), now), "arrival": sa.bindparam("new_arrival")}
        )
        in_run = roster.c.run_key == run_key
        is_live = live_in(roster, sa.literal(run_key), now)
        is_node = roster.c.node_key == sa.bindparam("node")
        self._is_over = sa.and_(in_run, roster.c.expires_at <= now)
        self._live = sa.select(roster.c.node_id, roster.c.data, roster.c.round_label).where(
            is_live, is_node
        )
        self._extend = roster.update().where(is_live, is_node).values(expires_at=from_now(now))
        self._extend_same = self._extend.where(says_so(roster))
        self._change = self._extend.values(
            data=sa.bindparam("new_data"),
            round_label=sa.bindparam("new_label"),
            label_key=sa.bindparam("new_label_key"),
        )
        self._entries = (
            sa.select(roster.c.node_id, roster.c.data, roster.c.round_label, roster.c.withdrawn)
            .where(in_run, roster.c.expires_at > now)
            .order_by(roster.c.withdrawn, roster.c.arrival, roster.c.node_key)
        )
        self._pulse = pulse_statement(tables, sa.literal(run_key), now)

    def live(self, connection: sa.Connection, node_key: str) -> Entry | None:
        """The node's live entry."""
        row = connection.execute(self._live, {"node": node_key}).one_or_none()
        return None if row is None else self._entry(*row)

    def extend(
        self, connection: sa.Connection, node_key: str, ttl: int, said: Entry | None = None
    ) -> bool:
        """Let the live entry live on, where it is the one that was ``said``; whether there is
        one."""
        if said is None:
            extended = connection.execute(self._extend, {"node": node_key, "ttl": ttl})
        else:
            values = {"node": node_key, **entry_values(said, ttl)}
            extended = connection.execute(self._extend_same, values)
        return extended.rowcount == 1

    def change(self, connection: sa.Connection, node_key: str, entry: Entry, ttl: int) -> bool:
        """Overwrite the live entry, which keeps its place; whether there is one."""
        values = {"node": node_key, **entry_values(entry, ttl)}
        return connection.execute(self._change, values).rowcount == 1

    def put(
        self,
        connection: sa.Connection,
        entry: Entry,
        ttl: int,
        arrival: int,
        withdrawn: bool = False,
    ) -> None:
        """Write the node's row, in place of whatever was there."""
        values = row_values(entry, ttl, int(withdrawn))
        connection.execute(self._put, {**values, "new_arrival": arrival})

    def purge(self, connection: sa.Connection) -> None:
        """Remove some entries and tombstones whose time is over."""
        delete_some(connection, self._table, self._is_over, PURGE_ROWS_MAX)

    def pulse(self, connection: sa.Connection, present: bool, question: Question) -> Pulse:
        row = connection.execute(self._pulse, asked(question)).one()
        return pulse_of(row, present, question)

    def entries(self, connection: sa.Connection) -> list[Listed]:
        return [
            Listed(self._entry(node_id, data, label), bool(withdrawn))
            for node_id, data, label, withdrawn in connection.execute(self._entries)
        ]

    def _entry(self, node_id: Any, data: Any, label: Any) -> Entry:
        try:
            if isinstance(data, bytes):
                return Entry(
                    node_id.decode("utf-8", "surrogatepass"),
                    data,
                    label.decode("utf-8", "surrogatepass"),
                )
        except (AttributeError, UnicodeDecodeError):
            pass
        raise RendezvousStateError(
            f"{self._endpoint} holds a roster entry that rdzv has not written: see who else "
            "writes to its tables"
        )


def from_now(now: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    """When what is written now expires."""
    return now + sa.bindparam("ttl", type_=sa.BigInteger)


def new_row(run: sa.ColumnElement[str], now: sa.ColumnElement[int]) -> dict[str, Any]:
    """A node's row, but for its place in the order of arrival; see :func:`row_values`."""
    return {
        "run_key": run,
        "node_key": sa.bindparam("node", type_=sa.String),
        "withdrawn": sa.bindparam("new_withdrawn", type_=sa.BigInteger),
        "expires_at": from_now(now),
        "label_key": sa.bindparam("new_label_key", type_=sa.String),
        "node_id": sa.bindparam("new_node_id", type_=Bytes),
        "round_label": sa.bindparam("new_label", type_=Bytes),
        "data": sa.bindparam("new_data", type_=Bytes),
    }


def says_so(roster: sa.Table) -> sa.ColumnElement[bool]:
    """Which rows say what :func:`entry_values` are of."""
    is_same_label = roster.c.round_label == sa.bindparam("new_label", type_=Bytes)
    return sa.and_(roster.c.data == sa.bindparam("new_data", type_=Bytes), is_same_label)


def live_in(
    roster: sa.Table, run: sa.ColumnElement[str], now: sa.ColumnElement[int]
) -> sa.ColumnElement[bool]:
    """Which rows are live entries."""
    return sa.and_(roster.c.run_key == run, roster.c.withdrawn == 0, roster.c.expires_at > now)


def pulse_statement(
    tables: Tables, run: sa.ColumnElement[str], now: sa.ColumnElement[int]
) -> sa.Select[Any]:
    """All of a pulse at one moment; what grows with the number of nodes is read from an index."""
    roster, states, runs = tables.roster, tables.states, tables.runs
    peer = roster.alias()
    has_label = sa.case((roster.c.label_key == sa.bindparam("label"), 1), else_=0)
    return sa.select(
        of_run(states.c.version, run),
        of_run(states.c.write_id, run),
        now - of_run(states.c.written_at, run),
        of_run(runs.c.revision, run),
        sa.select(sa.func.count())
        .where(
            peer.c.run_key == run,
            peer.c.node_key == sa.bindparam("peer"),
            peer.c.withdrawn == 0,
            peer.c.expires_at > now,
        )
        .scalar_subquery(),
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(has_label), 0),
        sa.func.min(roster.c.expires_at) - now,
    ).where(live_in(roster, run, now))


def look_statement(tables: Tables, run: sa.ColumnElement[str]) -> sa.Select[Any]:
    """What a wait looks at: version and write id of the document, :func:`new_state`, and the
    roster's revision."""
    states = tables.states
    new = sa.select(new_state(tables)).where(states.c.run_key == run)
    return sa.select(
        of_run(states.c.version, run),
        of_run(states.c.write_id, run),
        new.scalar_subquery(),
        of_run(tables.runs.c.revision, run),
    )


def new_state(tables: Tables) -> sa.ColumnElement[Any]:
    """The document where its version and write id are not the caller's: what it has is not sent to
    it again."""
    states = tables.states
    is_old = sa.and_(
        states.c.version == sa.bindparam("old_version", type_=sa.BigInteger),
        states.c.write_id == sa.bindparam("old_write_id", type_=sa.String),
    )
    return sa.case((is_old, None), else_=states.c.state)


def asked(question: Question) -> dict[str, object]:
    return {"peer": hashed(question.peer_id), "label": _label_key(question.round_label)}


def pulse_of(row: Sequence[Any], present: bool, question: Question) -> Pulse:
    version, write_id, age, revision, peers, live, confirmed, expiry = row[:PULSE_COLUMNS]
    return Pulse(
        token=token_of(version, write_id),
        live=live,
        revision=revision or "",
        present=present,
        peer_live=peers > 0,
        confirmed=int(confirmed) if question.round_label else 0,
        state_age_seconds=None if age is None else max(0, age) / 1000,
        next_expiry_seconds=None if expiry is None else max(0, expiry) / 1000,
    )


def of_run(column: sa.Column[Any], run: sa.ColumnElement[str]) -> sa.ScalarSelect[Any]:
    """The column in the one row that the run has; NULL where it has none."""
    return sa.select(column).where(column.table.c.run_key == run).scalar_subquery()


def token_of(version: Any, write_id: Any) -> Token | None:
    return None if version is None else f"{version}:{write_id}"


def parsed(token: Token) -> tuple[int, str] | None:
    """Version and write id; None for what is no token of this backend."""
    if not isinstance(token, str):
        return None
    version, _, write_id = token.partition(":")
    if not (version.isascii() and version.isdigit() and len(version) < 19):
        return None
    return int(version), write_id


def known_as(token: Token | None) -> dict[str, object]:
    """What :func:`look_statement` and a swap are told of the document that the caller has; -1
    where it has none, or what is no token of ours."""
    version, write_id = parsed(token) or (-1, "")
    return {"old_version": version, "old_write_id": write_id}


def entry_values(entry: Entry, ttl: int) -> dict[str, object]:
    return {
        "ttl": ttl,
        "new_data": bytes(entry.data),
        "new_label": _raw(entry.round_label),
        "new_label_key": _label_key(entry.round_label),
    }


def row_values(entry: Entry, ttl: int, withdrawn: int) -> dict[str, object]:
    return {
        "node": hashed(entry.node_id),
        "new_node_id": _raw(entry.node_id),
        "new_withdrawn": withdrawn,
        **entry_values(entry, ttl),
    }


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _label_key(label: str) -> str:
    return hashed(label) if label else ""


def milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))
