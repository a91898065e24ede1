"""The SQL backend: state by row version, one roster row a node, ages by the database's clock.

A token is a row version and the id of the write that made it. The version orders; the id makes a
token unusable after its document was lost and made anew, and lets a writer recognise its own
write when the answer was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.backends.sql import files
from rdzv.backends.sql.dialects import dialect_for
from rdzv.backends.sql.engine import Database
from rdzv.backends.sql.options import SqlOptions
from rdzv.backends.sql.runs import Run, delete_some, unique
from rdzv.backends.sql.schema import hashed, tables
from rdzv.errors import RendezvousSettingsError, RendezvousStateError
from rdzv.ports import Closable, Entry, Listed, Located, Pulse, Question, Roster, Token, Watch

PURGE_ROWS_MAX = 100


class SqlBackend(RendezvousBackend, Roster, Watch, Located, Closable):
    """The records of one run in a database.

    ``endpoint`` is an SQLAlchemy URL or the path of an SQLite file; for the names ``postgresql``
    and ``mysql`` also ``host:port/database``. Nothing is opened before the first call, or
    :meth:`open`. Raises ``RendezvousSettingsError`` for what cannot work.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        options: SqlOptions | None = None,
        *,
        name: str = "sql",
        filesystem_type: Callable[[Path], str] = files.filesystem_type,
    ) -> None:
        if not run_id:
            raise RendezvousSettingsError("the run id is empty: give one with --rdzv-id")
        options = options or SqlOptions()
        dialect = dialect_for(endpoint, options, filesystem_type, name=name)
        self._name = name
        self._database = Database(dialect, tables(options.table_prefix, options.schema))
        self._run = Run(self._database, run_id, options.lifetime_seconds)
        self._states = _States(self._database, self._run.key)
        self._roster = _RosterRows(self._database, self._run.key)
        self._state_topic, self._roster_topic = map(self._run.topic, ("state", "roster"))

    @property
    def name(self) -> str:
        return self._name

    @property
    def endpoint(self) -> str:
        return self._database.endpoint

    def route(self) -> tuple[str, int] | None:
        return self._database.dialect.route()

    def open(self) -> None:
        """Connect, and make the tables where they are missing.

        Raises ``RendezvousSettingsError`` where no later try can succeed, and what every other
        method raises.
        """
        self._database.open()

    def close(self) -> None:
        self._database.close()

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._database.read(self._states.get)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        write_id = unique()

        def work(connection: sa.Connection) -> tuple[bytes, Token, bool] | None:
            new_token = self._states.put(connection, bytes(state), token, write_id)
            if new_token is None:
                found = self._states.get(connection)
                return None if found is None else (*found, False)
            self._run.touch(connection, must=token is None)
            self._database.notify(connection, self._state_topic)
            return state, new_token, True

        answer = self._database.write(work, lambda c: self._states.is_mine(c, write_id))
        if token is None and answer is not None and answer[2]:
            self._run.sweep()
        return answer

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        node_key, ttl = hashed(entry.node_id), _milliseconds(ttl_seconds)

        def work(connection: sa.Connection) -> tuple[bool, Pulse]:
            known = self._roster.live(connection, node_key)
            # It may expire between two statements, above all while the second waits for a lock.
            if known == entry and self._roster.extend(connection, node_key, ttl):
                self._run.touch(connection)
                return False, self._roster.pulse(connection, True, question)
            arrival = self._change_roster(connection)
            if known is None or not self._roster.change(connection, node_key, entry, ttl):
                self._roster.put(connection, entry, ttl, arrival)
                self._roster.purge(connection)
            return known is None, self._roster.pulse(connection, True, question)

        is_new, pulse = self._database.write(work)
        if is_new:
            self._run.sweep()
        return pulse

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        node_key, ttl = hashed(node_id), _milliseconds(ttl_seconds)

        def work(connection: sa.Connection) -> Pulse:
            present = self._roster.extend(connection, node_key, ttl)
            if present:
                self._run.touch(connection)
            return self._roster.pulse(connection, present, question)

        return self._database.write(work)

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        ttl = _milliseconds(ttl_seconds)

        def work(connection: sa.Connection) -> None:
            arrival = self._change_roster(connection)
            self._roster.put(connection, Entry(node_id, b""), ttl, arrival, withdrawn=True)

        self._database.write(work)

    def _change_roster(self, connection: sa.Connection) -> int:
        self._database.notify(connection, self._roster_topic)
        return self._run.change_roster(connection)

    def entries(self) -> list[Listed]:
        return self._database.read(self._roster.entries)

    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: Any = None
    ) -> tuple[bytes, Token] | None:
        def look() -> bool | None:
            found, roster = self._database.read(self._roster.marks)
            is_changed = found != token or (revision is not None and roster != revision)
            return True if is_changed else None

        topics = [self._state_topic, *([] if revision is None else [self._roster_topic])]
        self._database.wait(look, timeout_seconds, topics)
        found = self.get_state()
        return None if found is None or found[1] == token else found


class _States:
    """The statements about a run's document."""

    def __init__(self, database: Database, run_key: str) -> None:
        states, now = database.tables.states, database.dialect.now
        self._endpoint = database.endpoint
        mine = states.c.run_key == run_key
        write_id: sa.BindParameter[str] = sa.bindparam("new_write_id")
        self._get = sa.select(states.c.state, states.c.version, states.c.write_id).where(mine)
        self._is_mine = sa.select(sa.literal(1)).where(mine, states.c.write_id == write_id)
        self._create = database.dialect.insert_if_absent(
            states,
            {
                "run_key": run_key,
                "version": 1,
                "write_id": write_id,
                "written_at": now,
                "state": sa.bindparam("new_state"),
            },
        )
        self._swap = (
            states.update()
            .where(
                mine,
                states.c.version == sa.bindparam("old_version"),
                states.c.write_id == sa.bindparam("old_write_id"),
            )
            .values(
                version=states.c.version + 1,
                write_id=write_id,
                written_at=now,
                state=sa.bindparam("new_state"),
            )
        )

    def get(self, connection: sa.Connection) -> tuple[bytes, Token] | None:
        row = connection.execute(self._get).one_or_none()
        if row is None:
            return None
        state, version, write_id = row
        if not isinstance(state, bytes):
            raise RendezvousStateError(
                f"{self._endpoint} holds a document that rdzv has not written (no bytes but "
                f"{type(state).__name__}): see who else writes to its tables"
            )
        return state, _token(version, write_id)

    def put(
        self, connection: sa.Connection, state: bytes, token: Token | None, write_id: str
    ) -> Token | None:
        """Write the document; return its token, or None where the write has lost."""
        values: dict[str, object] = {"new_state": state, "new_write_id": write_id}
        if token is None:
            # The count of rows that were inserted is not to be had from every driver.
            connection.execute(self._create, values)
            return _token(1, write_id) if self.is_mine(connection, write_id) else None
        expected = _parsed(token)
        if expected is None:
            return None
        version, old_write_id = expected
        values |= {"old_version": version, "old_write_id": old_write_id}
        swapped = connection.execute(self._swap, values).rowcount == 1
        return _token(version + 1, write_id) if swapped else None

    def is_mine(self, connection: sa.Connection, write_id: str) -> bool:
        return connection.scalar(self._is_mine, {"new_write_id": write_id}) is not None


class _RosterRows:
    """The statements about a run's roster."""

    def __init__(self, database: Database, run_key: str) -> None:
        tables, now = database.tables, database.dialect.now
        roster, states, runs = tables.roster, tables.states, tables.runs
        self._endpoint, self._table = database.endpoint, roster
        ttl_from_now = now + sa.bindparam("ttl", type_=sa.BigInteger)
        self._put = database.dialect.upsert(
            roster,
            {
                "run_key": run_key,
                "node_key": sa.bindparam("node"),
                "withdrawn": sa.bindparam("new_withdrawn"),
                "expires_at": ttl_from_now,
                "label_key": sa.bindparam("new_label_key"),
                "arrival": sa.bindparam("new_arrival"),
                "node_id": sa.bindparam("new_node_id"),
                "round_label": sa.bindparam("new_label"),
                "data": sa.bindparam("new_data"),
            },
        )
        in_run = roster.c.run_key == run_key
        is_live = sa.and_(in_run, roster.c.withdrawn == 0, roster.c.expires_at > now)
        is_node = roster.c.node_key == sa.bindparam("node")
        self._is_over = sa.and_(in_run, roster.c.expires_at <= now)
        self._live = sa.select(roster.c.node_id, roster.c.data, roster.c.round_label).where(
            is_live, is_node
        )
        self._extend = roster.update().where(is_live, is_node).values(expires_at=ttl_from_now)
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

        self._marks = sa.select(
            _of_run(states.c.version, run_key),
            _of_run(states.c.write_id, run_key),
            _of_run(runs.c.revision, run_key),
        )
        self._pulse = _pulse_statement(database, run_key, is_live)

    def live(self, connection: sa.Connection, node_key: str) -> Entry | None:
        """The node's live entry."""
        row = connection.execute(self._live, {"node": node_key}).one_or_none()
        return None if row is None else self._entry(*row)

    def extend(self, connection: sa.Connection, node_key: str, ttl: int) -> bool:
        """Let the live entry live on; whether there is one."""
        return connection.execute(self._extend, {"node": node_key, "ttl": ttl}).rowcount == 1

    def change(self, connection: sa.Connection, node_key: str, entry: Entry, ttl: int) -> bool:
        """Overwrite the live entry, which keeps its place; whether there is one."""
        values = {"node": node_key, **_entry_values(entry, ttl)}
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
        values = {
            "node": hashed(entry.node_id),
            "new_node_id": _raw(entry.node_id),
            "new_arrival": arrival,
            "new_withdrawn": int(withdrawn),
            **_entry_values(entry, ttl),
        }
        connection.execute(self._put, values)

    def purge(self, connection: sa.Connection) -> None:
        """Remove some entries and tombstones whose time is over."""
        delete_some(connection, self._table, self._is_over, PURGE_ROWS_MAX)

    def marks(self, connection: sa.Connection) -> tuple[Token | None, str]:
        """The document's token and the roster's revision."""
        version, write_id, revision = connection.execute(self._marks).one()
        return _token(version, write_id), revision or ""

    def pulse(self, connection: sa.Connection, present: bool, question: Question) -> Pulse:
        values = {"peer": hashed(question.peer_id), "label": _label_key(question.round_label)}
        row = connection.execute(self._pulse, values).one()
        version, write_id, age, revision, peers, live, confirmed, expiry = row
        return Pulse(
            token=_token(version, write_id),
            live=live,
            revision=revision or "",
            present=present,
            peer_live=peers > 0,
            confirmed=int(confirmed) if question.round_label else 0,
            state_age_seconds=None if age is None else max(0, age) / 1000,
            next_expiry_seconds=None if expiry is None else max(0, expiry) / 1000,
        )

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


def _pulse_statement(
    database: Database, run_key: str, is_live: sa.ColumnElement[bool]
) -> sa.Select[Any]:
    """All of a pulse at one moment; what grows with the number of nodes is read from an index."""
    tables, now = database.tables, database.dialect.now
    roster, states, runs = tables.roster, tables.states, tables.runs
    peer = roster.alias()
    has_label = sa.case((roster.c.label_key == sa.bindparam("label"), 1), else_=0)
    return sa.select(
        _of_run(states.c.version, run_key),
        _of_run(states.c.write_id, run_key),
        now - _of_run(states.c.written_at, run_key),
        _of_run(runs.c.revision, run_key),
        sa.select(sa.func.count())
        .where(
            peer.c.run_key == run_key,
            peer.c.node_key == sa.bindparam("peer"),
            peer.c.withdrawn == 0,
            peer.c.expires_at > now,
        )
        .scalar_subquery(),
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(has_label), 0),
        sa.func.min(roster.c.expires_at) - now,
    ).where(is_live)


def _of_run(column: sa.Column[Any], run_key: str) -> sa.ScalarSelect[Any]:
    """The column in the one row that the run has; NULL where it has none."""
    return sa.select(column).where(column.table.c.run_key == run_key).scalar_subquery()


def _token(version: Any, write_id: Any) -> Token | None:
    return None if version is None else f"{version}:{write_id}"


def _parsed(token: Token) -> tuple[int, str] | None:
    """Version and write id; None for what is no token of this backend."""
    if not isinstance(token, str):
        return None
    version, _, write_id = token.partition(":")
    if not (version.isascii() and version.isdigit() and len(version) < 19):
        return None
    return int(version), write_id


def _entry_values(entry: Entry, ttl: int) -> dict[str, object]:
    return {
        "ttl": ttl,
        "new_data": bytes(entry.data),
        "new_label": _raw(entry.round_label),
        "new_label_key": _label_key(entry.round_label),
    }


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _label_key(label: str) -> str:
    return hashed(label) if label else ""


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))
