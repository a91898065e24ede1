"""What a database has to answer that differs from another's: the interface, and what is shared.

A :class:`Dialect` belongs to one :class:`rdzv.backends.sql.engine.Database`. To add a database,
write a subclass and name it in :func:`rdzv.backends.sql.dialects.dialect_for`. Statements
elsewhere, but for those of :mod:`rdzv.backends.sql.at_once`, use only what all of them have: no
RETURNING (MySQL), no text a user chose as a key, no clock but :attr:`Dialect.now`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from rdzv.backends.sql.pool import Pool
from rdzv.backends.sql.schema import Tables
from rdzv.errors import RendezvousError

Language = Literal["postgresql", "mysql", "sqlite"]

PATIENCE_SECONDS = 2.0
"""Who waits again so soon is still waiting for the same."""
KNOWLEDGE_SECONDS_MAX = 5.0
"""A longer wait looks in between: whoever removes rows by hand wakes nobody."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What an error of the driver means to the caller."""

    error: RendezvousError
    reopen: bool
    """Whether all connections must be given up and the tables looked after anew."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one statement."""

    count: int
    """Rows that it found or changed."""
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a wait looks: at a part of the time it has lasted, within bounds."""

    first_seconds: float
    last_seconds: float
    growth: float

    def seconds(self, waited_seconds: float) -> float:
        """How long to pause after so long a wait."""
        return min(max(self.first_seconds, waited_seconds * self.growth), self.last_seconds)


@dataclass(frozen=True, slots=True)
class Rest:
    """What a wait knows of itself when it pauses."""

    waited_seconds: float
    least_seconds: float
    """So long it does not look by itself."""

    def seconds(self, pace: Pace) -> float:
        """How long to pause, if nothing is told."""
        return max(pace.seconds(self.waited_seconds), self.least_seconds)


class Patience:
    """Since when something has been waited for, over several waits in a row."""

    def __init__(self) -> None:
        self._last: tuple[object, float, float] = (None, 0.0, 0.0)

    def begun(self, awaited: object) -> float:
        """When waiting for it has begun, now or before."""
        now = time.monotonic()
        last, begun, ended = self._last
        is_same = awaited is not None and last == awaited and now - ended < PATIENCE_SECONDS
        return begun if is_same else now

    def end(self, awaited: object, begun: float) -> None:
        """A wait has ended without it; ``awaited`` None where it came."""
        self._last = (awaited, begun, time.monotonic())


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a look has found, and the mark that was taken before."""

    mark: Any
    seen: object
    looked_at: float

    def holds(self, mark: Any, awaited: object, now: float) -> bool:
        """Whether ``awaited`` was found by a look since which nothing was told."""
        is_told_of = self.mark is not None and self.mark == mark
        is_same = self.seen is not None and self.seen == awaited
        return is_told_of and is_same and now - self.looked_at < KNOWLEDGE_SECONDS_MAX


NO_KNOWLEDGE = Knowledge(None, None, 0.0)


@dataclass
class Look:
    """A statement that may go along with another message, and its answer once it did."""

    statement: sa.Executable
    values: dict[str, Any]
    answer: Answer | None = None


class ChangeSignal(ABC):
    """Tells that something may have been committed by anyone."""

    @abstractmethod
    def mark(
        self, topics: Sequence[str], pool: Pool, deadline: float, look: Look | None = None
    ) -> Any:
        """To be taken before looking: what is committed later ends the :meth:`sleep` with it.
        A ``look`` is asked after that where it costs no message, else left as it is.
        Raises the driver's errors."""

    @abstractmethod
    def sleep(
        self,
        mark: Any,
        topics: Sequence[str],
        seconds: float,
        rest: Rest,
        is_over: Callable[[], bool],
    ) -> None:
        """Return when one of the topics may have changed since the mark, after ``seconds``, or
        soon after ``is_over`` or :meth:`close`. Raises the driver's errors."""

    def wake(self) -> None:
        """Let sleepers look whether it is over; for those who do not look anyway."""
        return

    @abstractmethod
    def close(self) -> None:
        """Give up the connection; the next mark opens one, and is a value never seen before."""

    def close_idle(self) -> bool:
        """Forget a connection that the pool has closed; whether nobody waits."""
        return True


class Polling(ChangeSignal):
    """Nobody tells: who waits looks again and again."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def mark(
        self, topics: Sequence[str], pool: Pool, deadline: float, look: Look | None = None
    ) -> None:
        return None

    def sleep(
        self,
        mark: Any,
        topics: Sequence[str],
        seconds: float,
        rest: Rest,
        is_over: Callable[[], bool],
    ) -> None:
        time.sleep(max(0.0, min(seconds, rest.seconds(self._pace))))

    def close(self) -> None:
        """There is no connection."""


class Dialect(ABC):
    """One kind of database at one address."""

    endpoint: str
    """What the user would recognise, with secrets masked."""
    now: sa.ColumnElement[int]
    """Milliseconds since 1970 by the database's clock, one value within a statement."""
    driver_error: type[Exception]
    """The base of the driver's errors, for calls that SQLAlchemy does not wrap."""
    request_seconds: float
    """No call lasts much longer."""
    open_seconds: float
    """So long the first call waits for a server that is overcrowded."""
    connections_max: int
    """At most so many for one backend or store, beside the one of a wait."""
    idle_seconds: float | None = None
    """After so long an unused connection is closed; None for never."""
    opened_seconds: float = 0.0
    """So long who will join keeps a connection that is not used yet; known after
    :meth:`prepare`."""
    can_skip_locked: bool = False
    """Whether a statement can pass by rows that others have locked."""
    can_share: bool = False
    """Whether a connection is dear enough for a backend and its store to share what they have."""
    sends_as: Language | None = None
    """In what language :mod:`rdzv.backends.sql.at_once` is to speak to :meth:`send`; None where
    that does not work."""
    roster_pace: Pace | None = None
    """How often a wait for the roster looks by itself, where not every change wakes it."""
    keys_per_statement_max: int = 500
    value_bytes_max: int = 64 * 1024 * 1024

    @abstractmethod
    def prepare(self, tables: Tables, pool: Pool, deadline: float, joins: bool) -> None:
        """Make sure that the tables are there and may be used as they must be; safe while many
        processes do it at once. For who ``joins``, also what would take time in a join. The pool
        is that of :meth:`engine`.

        Raises ``RendezvousSettingsError`` for what will never work at this address, and else what
        :meth:`explain` makes of the driver's error.
        """

    @abstractmethod
    def engine(self) -> sa.Engine:
        """A new engine, without a pool, for what :meth:`prepare` has prepared."""

    @abstractmethod
    def is_replaced(self) -> bool:
        """Whether what was prepared is no more, although connections may still seem to work.
        False before :meth:`prepare` and after :meth:`forget`."""

    @abstractmethod
    def forget(self) -> None:
        """The caller has been told of the loss: what is there next is as good."""

    @abstractmethod
    def begin(
        self, connection: sa.Connection, write: bool, seconds: float, along: Look | None = None
    ) -> None:
        """Start a transaction that writes, or allow reading statements. From now on nothing on
        this connection lasts longer than ``seconds``, waiting for a lock included. The statement
        ``along`` is the first one of a transaction that writes, where it then costs no message of
        its own; else it is left as it is."""

    def send(
        self,
        connection: sa.Connection,
        written: Sequence[sa.Executable],
        read: Sequence[sa.Executable],
        values: dict[str, Any],
        seconds: float,
    ) -> list[Answer]:
        """The answers to a transaction of ``written``, and to what is ``read`` after it, all in
        one message. Only for what may be repeated, and may be lost if the server crashes before
        anything else is written; with nothing written there is no transaction."""
        raise NotImplementedError

    @abstractmethod
    def explain(self, error: BaseException) -> Trouble:
        """What to tell the caller of a driver's error."""

    def is_transient(self, error: BaseException) -> bool:
        """Whether the error says that nothing was done, and that a repeat may help at once."""
        return False

    @abstractmethod
    def signal(self) -> ChangeSignal:
        """A new change signal."""

    def notify(self, connection: sa.Connection, topics: Sequence[str]) -> None:
        """Let the commit of this transaction wake those who wait for one of the topics, where
        they have not other means."""
        return

    @abstractmethod
    def insert_if_absent(self, table: sa.Table, values: dict[str, Any]) -> sa.Insert:
        """Insert the row unless there is one."""

    @abstractmethod
    def upsert(self, table: sa.Table, values: dict[str, Any]) -> sa.Insert:
        """Insert the row, or overwrite the one with the same primary key."""

    @abstractmethod
    def route(self) -> tuple[str, int] | None:
        """Host and port of the server; None where there is none."""
