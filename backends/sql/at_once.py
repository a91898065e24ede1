"""A backend's most frequent calls in one message each: see :meth:`Dialect.send`.

Of a crowd that arrives, each changes the one row that numbers the arrivals. Whoever holds its lock
over several exchanges lets all others wait for each turn of this process. Here the server goes
from the lock to the commit by itself. Who waits where nobody tells asks again and again, and is
answered without what SQLAlchemy does for each statement. All calls may be repeated.

SQLite has no messages. But a transaction there keeps all others out, so it is the shorter for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rdzv.backends.sql.base import Answer, Look
from rdzv.backends.sql.engine import Database
from rdzv.backends.sql.roster import PULSE_COLUMNS, known_as, parsed
from rdzv.backends.sql.runs import Run, unique
from rdzv.backends.sql.statements import statements_for
from rdzv.ports import Token


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
    state: Any
    """The document where it is another one than the caller knows; None where nobody has looked."""


class Write:
    """One write of the document, over the one with the ``token``, or where there is none."""

    def __init__(self, state: bytes, token: Token | None) -> None:
        self.token = token
        self.id = unique()
        self.values: dict[str, object] = {"new_state": state, "new_write_id": self.id}
        version, _ = parsed(token) or (0, "")
        self.new_token = f"{version + 1}:{self.id}"
        """Of the document once it is written."""


class AtOnce:
    """The roster of one run, and the look of who waits."""

    def __init__(self, database: Database, run: Run) -> None:
        """Of a database whose dialect :attr:`Dialect.sends_as` something."""
        self._database, self._run = database, run
        dialect = database.dialect
        self._statements = statements_for(database.tables, dialect.now, dialect.sends_as)
        self._constants = {
            "run": run.key,
            "run_id": run.raw_id,
            "lifetime": run.lifetime,
            "topic": run.topic("roster"),
            "state_topic": run.topic("state"),
        }

    def announce(
        self, values: dict[str, Any], *, is_change: bool = False, finds: bool = False
    ) -> Announced:
        """Write the entry, or let it live on where it is the same. ``is_change`` where the caller
        has announced another one of the node; ``finds`` also asks for what is over.

        The pulse is of the same transaction, which holds the run's lock: so of those who arrive at
        once one finds that it is alone, and writes the run's first document.
        """
        statements = self._statements
        announce = statements.change if is_change else statements.announce
        read = [statements.find] if finds else []
        values = {**values, **self._constants, "new_revision": unique()}

        def send() -> list[Answer]:
            written = [*announce, statements.pulse_after_announcing]
            return self._database.send(written, read, values)[len(announce) - 1 :]

        announced, pulse, *found = send()
        if not announced.rows:
            self._run.make()
            announce = statements.announce
            announced, pulse, *found = send()
        is_new: bool | None = announced.rows[0][0] if announced.rows else None
        has_expired, has_overdue = found[0].rows[0] if finds else (False, False)
        row = pulse.rows[0]
        state = row[PULSE_COLUMNS] if len(row) > PULSE_COLUMNS else None
        return Announced(is_new, has_expired, has_overdue, row, state)

    def beat(
        self, values: dict[str, Any], said: dict[str, Any] | None
    ) -> tuple[bool, Sequence[Any]]:
        """Let the entry live on, where it has the values that were ``said``; whether there was
        one, and the pulse."""
        statements, values = self._statements, {**values, **(said or {}), **self._constants}
        written = [statements.extend if said is None else statements.extend_same]
        read = [statements.pulse]
        extended, pulse = self._database.send(written, read, values, alone=True)
        return extended.count == 1, pulse.rows[0]

    def put(self, write: Write) -> Look | None:
        """What goes along with the transaction that makes the ``write``: see
        :attr:`Statements.create`; None where that is done one by one."""
        statement = self._statements.create if write.token is None else self._statements.swap
        if statement is None:
            return None
        values = {**write.values, **known_as(write.token), **self._constants}
        return Look(statement, values)

    def look(self, values: dict[str, Any], *, at_roster: bool = False) -> Sequence[Any]:
        """The row of :func:`look_statement`, with the roster's revision if ``at_roster``."""
        statement = self._statements.look if at_roster else self._statements.look_at_state
        [found] = self._database.send([], [statement], {**values, "run": self._run.key})
        return _row(found)

    def look_and_listen(
        self, values: dict[str, Any], topics: Sequence[str]
    ) -> tuple[Sequence[Any], Callable[[object], None]]:
        """The same, and what :meth:`Database.listen` returns."""
        statement, values = self._statements.look_at_state, {**values, "run": self._run.key}
        look = Look(statement, values)
        know = self._database.listen(topics, look)
        if look.answer is None:
            [look.answer] = self._database.send([], [statement], values)
        return _row(look.answer), know


def _row(found: Answer) -> Sequence[Any]:
    return found.rows[0] if found.rows else (None, None, None, None)
