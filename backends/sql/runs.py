"""The life of a run's records: kept while somebody gives a sign of life, swept afterwards.

The time a run's records may go is its ``alive_until``. Beats and writes move it, but only after
each twentieth of the lifetime, so that a beat does not write a row that all nodes share. There is
no server that would sweep: who arrives sweeps after others, a bounded number of rows each time.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rdzv.backends.sql.engine import Database
from rdzv.backends.sql.schema import hashed
from rdzv.errors import RendezvousError

logger = logging.getLogger(__name__)

TOUCHES_PER_LIFETIME = 20
SWEEP_RUNS_MAX = 4
SWEEP_ROWS_MAX = 500


class Run:
    """The row of one run in ``runs``, and its place in all other tables."""

    def __init__(self, database: Database, run_id: str, lifetime_seconds: float) -> None:
        self.key = hashed(run_id)
        self.raw_id = run_id.encode("utf-8", "surrogatepass")
        self._database = database
        tables, dialect = database.tables, database.dialect
        runs = tables.runs
        self._touch_seconds = lifetime_seconds / TOUCHES_PER_LIFETIME
        # The next touch may come that much later than the last sign of life.
        self.lifetime = lifetime = round((lifetime_seconds + self._touch_seconds) * 1000)
        """In milliseconds, from the last touch on."""
        self._touched_at, self._failed_count = float("-inf"), 0
        until = dialect.now + lifetime
        # Others may keep the same run for longer.
        longest = sa.case((runs.c.alive_until < until, until), else_=runs.c.alive_until)
        self._insert = dialect.insert_if_absent(
            runs,
            {
                "run_key": self.key,
                "run_id": self.raw_id,
                "revision": sa.bindparam("new_revision"),
                "arrivals": 0,
                "alive_until": until,
            },
        )
        self._touch = runs.update().where(runs.c.run_key == self.key).values(alive_until=longest)
        self._change = self._touch.values(
            revision=sa.bindparam("new_revision"), arrivals=runs.c.arrivals + 1
        )
        self._lock = sa.select(runs.c.run_key).where(runs.c.run_key == self.key).with_for_update()
        self._arrivals = sa.select(runs.c.arrivals).where(runs.c.run_key == self.key)
        self._is_kept = self._arrivals.where(runs.c.alive_until > dialect.now)
        self._overdue = sa.select(runs.c.run_key).where(runs.c.alive_until < dialect.now)
        self._overdue = self._overdue.order_by(runs.c.alive_until).limit(SWEEP_RUNS_MAX)
        self._still_overdue = (
            sa.select(runs.c.run_key)
            .where(
                runs.c.run_key.in_(sa.bindparam("found", expanding=True)),
                runs.c.alive_until < dialect.now,
            )
            .with_for_update(skip_locked=dialect.can_skip_locked)
        )

    def topic(self, kind: str, name: str = "") -> str:
        """What a wait for something of this run is woken by."""
        return f"rdzv_{hashed(f'{self.key}/{kind}/{name}')}"

    def lock(self, connection: sa.Connection) -> None:
        """Let nobody else who locks this run, or changes its roster, go on before the end of the
        transaction."""
        if connection.execute(self._lock).one_or_none() is None:
            connection.execute(self._insert, {"new_revision": unique()})
            connection.execute(self._lock)

    def touch(self, connection: sa.Connection) -> None:
        """Keep the run's records, where that is due."""
        if self.is_touch_due:
            self._touch_now(connection)

    def keep(self, connection: sa.Connection, is_kept: bool | None = None) -> None:
        """The same, and also where the run has no row, without which nobody would ever sweep its
        records, or its time is over by the database's clock; ``is_kept`` if it is known that
        neither is so. Then it waits for nobody who holds the row."""
        if not self.is_touch_due:
            if is_kept is None:
                is_kept = connection.execute(self._is_kept).one_or_none() is not None
            if is_kept:
                return
        self._touch_now(connection)

    def _touch_now(self, connection: sa.Connection) -> None:
        if connection.execute(self._touch).rowcount == 0:
            connection.execute(self._insert, {"new_revision": unique()})
        self.touched()

    @property
    def is_touch_due(self) -> bool:
        """Whether a sign of life has to move the time that the run's records may go."""
        # A failed transaction may have been the one that touched, and a database that was
        # replaced knows nothing of it.
        is_due = time.monotonic() - self._touched_at >= self._touch_seconds
        return is_due or self._database.failed_count != self._failed_count

    def touched(self) -> None:
        """The records are kept from now on."""
        self._touched_at, self._failed_count = time.monotonic(), self._database.failed_count

    def make(self) -> None:
        """Make the row where it is missing."""
        values = {"new_revision": unique()}
        self._database.write(lambda c: c.execute(self._insert, values))

    def change_roster(self, connection: sa.Connection) -> int:
        """Move the roster's revision; return a number larger than any returned before."""
        values = {"new_revision": unique()}
        if connection.execute(self._change, values).rowcount == 0:
            connection.execute(self._insert, values)
            connection.execute(self._change, values)
        self.touched()
        return int(connection.execute(self._arrivals).scalar_one())

    def sweep(self) -> None:
        """Remove records of runs that are over; bounded, and never an error to its caller."""
        try:
            overdue = self._database.read(lambda c: c.scalars(self._overdue).all())
            if overdue:
                self._database.write(lambda c: self._remove(c, overdue))
        except RendezvousError:
            logger.debug("sweeping %s failed", self._database.endpoint, exc_info=True)

    def _remove(self, connection: sa.Connection, found: Sequence[str]) -> None:
        tables = self._database.tables
        # Again, now that nobody else can: one of them may have come back to life.
        overdue = set(connection.scalars(self._still_overdue, {"found": list(found)}))
        rows = SWEEP_ROWS_MAX
        for key in sorted(overdue):
            for table in tables.of_a_run:
                rows -= delete_some(connection, table, table.c.run_key == key, rows)
            if rows <= 0:
                return
            for table in (tables.states, tables.runs):
                connection.execute(table.delete().where(table.c.run_key == key))


def delete_some(
    connection: sa.Connection, table: sa.Table, which: sa.ColumnElement[bool], rows_max: int
) -> int:
    """Delete at most ``rows_max`` of those rows; return how many there were."""
    if rows_max <= 0:
        return 0
    keys = list(table.primary_key)
    found = connection.execute(sa.select(*keys).where(which).limit(rows_max)).all()
    if found:
        match = sa.and_(*(column == sa.bindparam(f"key_{column.name}") for column in keys))
        values: list[dict[str, Any]] = [
            {f"key_{column.name}": value for column, value in zip(keys, row, strict=True)}
            for row in found
        ]
        # The condition once more: another may have renewed a row meanwhile.
        connection.execute(table.delete().where(match, which), values)
    return len(found)


def unique() -> str:
    """A text that nobody has used before."""
    return uuid.uuid4().hex
