"""The SQL backend: state by row version, one roster row a node, ages by the database's clock.

A token is a row version and the id of the write that made it. The version orders; the id makes a
token unusable after its document was lost and made anew, and lets a writer recognise its own
write when the answer was lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.backends.sql import files
from rdzv.backends.sql.at_once import AtOnce, Write
from rdzv.backends.sql.dialects import dialect_for
from rdzv.backends.sql.engine import Database
from rdzv.backends.sql.options import SqlOptions
from rdzv.backends.sql.roster import (
    RosterRows,
    asked,
    entry_values,
    known_as,
    look_statement,
    milliseconds,
    pulse_of,
    row_values,
    token_of,
)
from rdzv.backends.sql.runs import Run
from rdzv.backends.sql.schema import hashed, tables
from rdzv.errors import RendezvousError, RendezvousSettingsError, RendezvousStateError
from rdzv.ports import (
    Closable,
    Entry,
    FirstLook,
    GetsReady,
    Listed,
    Located,
    Pulse,
    Question,
    Roster,
    Token,
    Watch,
)


class SqlBackend(RendezvousBackend, Roster, Watch, FirstLook, GetsReady, Located, Closable):
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
        self._roster = RosterRows(self._database, self._run.key)
        can_send = dialect.sends_as is not None
        self._at_once = AtOnce(self._database, self._run) if can_send else None
        self._known: Token | None = None
        """The document that the caller has."""
        self._news: tuple[Token | None, tuple[bytes, Token]] | None = None
        """What the caller had, and another one that an announcement has found."""
        self._said: dict[str, Entry] = {}
        """What is in the roster of nodes that this object has announced. A server that has crashed,
        or a standby in its place, may have an older entry of the node: then this one is gone."""
        self._state_topic, self._roster_topic = map(self._run.topic, ("state", "roster"))

    @property
    def name(self) -> str:
        return self._name

    @property
    def endpoint(self) -> str:
        return self._database.endpoint

    @property
    def database(self) -> Database:
        """For a store that shares its connections."""
        return self._database

    def route(self) -> tuple[str, int] | None:
        return self._database.dialect.route()

    def open(self) -> None:
        """Connect, and make the tables where they are missing.

        Raises ``RendezvousSettingsError`` where no later try can succeed, and what every other
        method raises.
        """
        self._database.open()

    def get_ready(self) -> None:
        """The same for a node; what a join needs is then asked of the server too."""
        self._database.open(joins=True)

    def close(self) -> None:
        self._database.close()

    def get_state(self) -> tuple[bytes, Token] | None:
        if self._at_once is None:
            return self._database.read(self._states.get)
        return self._found(self._at_once.look(known_as(None)))

    def look_and_watch(self) -> tuple[bytes, Token] | None:
        if self._at_once is None:
            return self.get_state()
        topics = [self._state_topic]
        row, know = self._at_once.look_and_listen(known_as(None), topics)
        found = self._found(row)
        know((self._known, None))
        return found

    def _found(self, row: Sequence[Any]) -> tuple[bytes, Token] | None:
        """What a look says to who knows of no document."""
        found, state, _ = self._states.seen(row, None)
        self._known = found
        return None if found is None else (state, found)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        write = Write(bytes(state), token)
        along = None if self._at_once is None else self._at_once.put(write)

        def work(connection: sa.Connection) -> tuple[bytes, Token, bool] | None:
            is_kept = None
            if along is None or along.answer is None:
                is_written = self._states.put(connection, write)
                if is_written:
                    self._database.notify(connection, self._state_topic)
            else:
                is_written = bool(along.answer.rows)
                is_kept = is_written and along.answer.rows[0][0]
            if not is_written:
                found = self._states.get(connection)
                return None if found is None else (*found, False)
            if token is None:
                self._run.keep(connection, is_kept)
            else:
                self._run.touch(connection)
            return state, write.new_token, True

        answer = self._database.write(
            work, lambda c: self._states.is_mine(c, write.id), along=along
        )
        if token is None and answer is not None and answer[2]:
            self._run.sweep()
        return answer

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        said = self._said.pop(entry.node_id, entry)
        pulse = self._announce(entry, said != entry, milliseconds(ttl_seconds), question)
        self._said[entry.node_id] = entry
        return pulse

    def _announce(self, entry: Entry, is_change: bool, ttl: int, question: Question) -> Pulse:
        if self._at_once is not None:
            return self._announce_at_once(self._at_once, entry, is_change, ttl, question)
        node_key = hashed(entry.node_id)

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

    def _announce_at_once(
        self, roster: AtOnce, entry: Entry, is_change: bool, ttl: int, question: Question
    ) -> Pulse:
        known = known_as(self._known)
        values = {**row_values(entry, ttl, 0), **asked(question), **known}
        # Who announces itself waits next.
        know = self._database.listen([self._state_topic])
        # Who confirms a round has asked before.
        announced = roster.announce(values, is_change=is_change, finds=not entry.round_label)
        if announced.is_new is not None:
            self._run.touched()
        elif self._run.is_touch_due:
            self._database.write(self._run.touch)
        if announced.is_new and announced.has_expired:
            # The announcement is made: what is left is removed by others.
            with contextlib.suppress(RendezvousError):
                self._database.write(self._roster.purge)
        if announced.is_new and announced.has_overdue:
            self._run.sweep()
        pulse = pulse_of(announced.pulse, True, question)
        know((pulse.token, None))
        if announced.state is not None and pulse.token is not None:
            self._news = self._known, (self._states.checked(announced.state), pulse.token)
        return pulse

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        node_key, ttl, said = hashed(node_id), milliseconds(ttl_seconds), self._said.get(node_id)
        if self._at_once is not None and not self._run.is_touch_due:
            values = {"node": node_key, "ttl": ttl, **asked(question)}
            same = None if said is None else entry_values(said, ttl)
            present, row = self._at_once.beat(values, same)
            return pulse_of(row, present, question)

        def work(connection: sa.Connection) -> Pulse:
            present = self._roster.extend(connection, node_key, ttl, said)
            if present:
                self._run.touch(connection)
            return self._roster.pulse(connection, present, question)

        return self._database.write(work, alone=True)

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        self._said.pop(node_id, None)
        ttl = milliseconds(ttl_seconds)

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
        self._known = token
        news, self._news = self._news, None
        # What an announcement has found is what a look would find, unless there is other news.
        if news is not None and news[0] == token and self._is_latest(news[1][1]):
            self._known = news[1][1]
            return news[1]
        seen: list[object] = [None]

        def look() -> tuple[bytes, Token] | bool | None:
            if self._at_once is not None:
                at_roster = revision is not None
                row = self._at_once.look(known_as(token), at_roster=at_roster)
            else:
                row = self._database.read(lambda c: self._states.look(c, token))
            found, state, roster = self._states.seen(row, token)
            seen[0] = (found, None if revision is None else roster)
            if found != token and found is not None:
                return state, found
            is_changed = found != token or (revision is not None and roster != revision)
            return False if is_changed else None

        topics = [self._state_topic, *([] if revision is None else [self._roster_topic])]
        found = self._database.wait(
            look,
            timeout_seconds,
            topics,
            awaited=(token, revision),
            seen=lambda: seen[0],
            pace=None if revision is None else self._database.dialect.roster_pace,
        )
        if not isinstance(found, tuple):
            return None
        self._known = found[1]
        return found

    def _is_latest(self, token: Token) -> bool:
        return self._database.is_known([self._state_topic], (token, None))


class _States:
    """The statements about a run's document."""

    def __init__(self, database: Database, run_key: str) -> None:
        states, now = database.tables.states, database.dialect.now
        self._endpoint = database.endpoint
        mine = states.c.run_key == run_key
        write_id: sa.BindParameter[str] = sa.bindparam("new_write_id")
        self._get = sa.select(states.c.state, states.c.version, states.c.write_id).where(mine)
        self._look = look_statement(database.tables, sa.literal(run_key))
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
        return self.checked(state), token_of(version, write_id)

    def look(self, connection: sa.Connection, token: Token | None) -> Sequence[Any]:
        return connection.execute(self._look, known_as(token)).one()

    def seen(self, row: Sequence[Any], token: Token | None) -> tuple[Token | None, bytes, str]:
        """The document's token; the document where it has another than ``token``; and the
        roster's revision."""
        version, write_id, state, revision = row
        found = token_of(version, write_id)
        is_there = found is not None and found != token
        return found, self.checked(state) if is_there else b"", revision or ""

    def checked(self, state: Any) -> bytes:
        if not isinstance(state, bytes):
            raise RendezvousStateError(
                f"{self._endpoint} holds a document that rdzv has not written (no bytes but "
                f"{type(state).__name__}): see who else writes to its tables"
            )
        return state

    def put(self, connection: sa.Connection, write: Write) -> bool:
        """Write the document; whether that has not lost."""
        if write.token is None:
            # The count of rows that were inserted is not to be had from every driver.
            connection.execute(self._create, write.values)
            return self.is_mine(connection, write.id)
        values = {**write.values, **known_as(write.token)}
        return bool(connection.execute(self._swap, values).rowcount == 1)

    def is_mine(self, connection: sa.Connection, write_id: str) -> bool:
        return connection.scalar(self._is_mine, {"new_write_id": write_id}) is not None
