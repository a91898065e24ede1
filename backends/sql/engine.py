"""Connections, transactions and waiting, the same for every database.

* A transaction is short, and no connection is taken out of the pool between two calls: a blocked
  wait costs no connection of the pool and silences nobody.
* An error before the commit means that nothing was written. Only the answer to the commit itself
  can be lost; then the caller's ``was_applied`` looks, on a new connection, for what was written.
* What is gone is noticed: when the tables or the file were removed or replaced, the call that
  finds out raises, so that its caller knows that contact was lost, and the next one starts anew.
* A wait takes a mark, looks, and sleeps until the mark has changed: nothing is missed.
* ``fork`` closes all connections first, because SQLite's locks belong to a process but its notes
  about them are copied. It waits for running calls for a moment; where one does not end, the
  child's copy refuses to work.
* A call from a signal handler that interrupts another call of the same thread is refused at once:
  it would wait for a lock that its own thread holds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import sqlalchemy as sa

from rdzv.backends.sql.dialects import ChangeSignal, Dialect
from rdzv.backends.sql.schema import Tables
from rdzv.errors import RendezvousConnectionError, RendezvousError, RendezvousSettingsError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sa.Connection], T]

FORK_WAIT_SECONDS_MAX = 2.0
POLL_GROWTH = 0.005
"""A wait polls at this part of the time it has lasted, within the dialect's bounds."""


class AnswerLost(RendezvousConnectionError):
    """The commit was not answered and could not be looked for; ``result`` stands if it was made."""

    def __init__(self, text: str, result: Any) -> None:
        super().__init__(text)
        self.result = result


class _Ticket:
    """One running call."""

    __slots__ = ("is_done", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.is_done = False


class Database:
    """One database as one backend or store uses it. All methods may be called by any thread."""

    def __init__(self, dialect: Dialect, table_prefix: str, timeout_seconds: float) -> None:
        self.dialect = dialect
        self.tables = Tables(table_prefix)
        self._timeout_seconds = timeout_seconds
        self._signal: ChangeSignal = dialect.signal()
        self._engine: sa.Engine | None = None
        self._closed_count = 0
        self.failed_count = 0
        self._is_broken_by_fork = False
        self._reset_locks()
        with _forks.lock:
            _forks.databases.add(self)

    @property
    def endpoint(self) -> str:
        """What the user would recognise, with secrets masked."""
        return self.dialect.endpoint

    def open(self) -> None:
        """Connect and make the tables where they are missing.

        Raises also ``RendezvousSettingsError``, for what no later try will mend.
        """
        with self._call(is_first=True) as deadline:
            self._ready_engine(deadline)

    def read(self, work: Work[T]) -> T:
        """What ``work`` returns; all its statements see the database at one moment."""
        with self._call() as deadline, self._connection(deadline, write=False) as connection:
            return work(connection)

    def write(self, work: Work[T], was_applied: Work[bool]) -> T:
        """What ``work`` returns, once all it wrote is committed.

        Raises :class:`AnswerLost` where that is not known. After any other error nothing was
        written.
        """
        with self._call() as deadline:
            with self._connection(deadline, write=True) as connection:
                result = work(connection)
                try:
                    connection.commit()
                    return result
                except sa.exc.DBAPIError as error:
                    lost = self._explained(error)
                    connection.invalidate()
            return self._look_for_answer(result, was_applied, lost, deadline)

    def wait(self, look: Callable[[], T | None], timeout_seconds: float) -> T | None:
        """What ``look`` returns, as soon as that is not None or the time is over.

        ``look`` is called at least once, and again after every commit.
        """
        begun = time.monotonic()
        end = begun + max(0.0, timeout_seconds)
        closed_count = self._closed_count
        while True:
            mark = self._mark()
            found = look()
            if found is not None or time.monotonic() >= end:
                return found
            while self._mark() == mark:
                now = time.monotonic()
                if now >= end:
                    break
                time.sleep(min(end - now, self._poll_seconds(now - begun)))
                if self._closed_count != closed_count:
                    raise RendezvousConnectionError(f"{self.endpoint}: closed while waiting")

    def close(self) -> None:
        """Close all connections; a later call opens them anew. Never raises."""
        self._closed_count += 1
        self._forget()

    def _poll_seconds(self, waited_seconds: float) -> float:
        first, last = self.dialect.poll_seconds_first, self.dialect.poll_seconds_last
        return min(max(first, waited_seconds * POLL_GROWTH), last)

    def _mark(self) -> Any:
        with self._call() as deadline:
            self._ready_engine(deadline)
            return self._signal.mark()

    @contextlib.contextmanager
    def _connection(self, deadline: float, *, write: bool) -> Iterator[sa.Connection]:
        engine = self._ready_engine(deadline)
        with engine.connect() as connection:
            self.dialect.begin(connection, write, deadline - time.monotonic())
            # What ``work`` leaves without a commit is rolled back here.
            yield connection

    def _look_for_answer(
        self, result: T, was_applied: Work[bool], lost: RendezvousError, deadline: float
    ) -> T:
        try:
            with self._connection(deadline, write=False) as connection:
                applied = was_applied(connection)
        except (sa.exc.SQLAlchemyError, OSError, RendezvousError):
            raise AnswerLost(str(lost), result) from lost
        if applied:
            return result
        raise lost

    def _ready_engine(self, deadline: float) -> sa.Engine:
        if self.dialect.is_replaced():
            self._forget(was_told=True)
            raise RendezvousConnectionError(
                f"{self.endpoint} was removed or replaced; the next call opens it anew"
            )
        engine = self._engine
        if engine is not None:
            return engine
        if not self._opening.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise RendezvousConnectionError(f"{self.endpoint} could not be opened in time")
        try:
            if self._engine is None:
                self.dialect.prepare(self.tables, deadline)
                self._engine = self.dialect.engine()
            return self._engine
        finally:
            self._opening.release()

    def _forget(self, *, was_told: bool = False) -> None:
        if was_told:
            self.dialect.forget()
        engine, self._engine = self._engine, None
        try:
            self._signal.close()
            if engine is not None:
                engine.dispose()
        except Exception:
            # What cannot be closed is dropped.
            logger.debug("closing connections to %s failed", self.endpoint, exc_info=True)

    def _explained(self, error: BaseException) -> RendezvousError:
        trouble = self.dialect.explain(error)
        if trouble.reopen:
            self._forget(was_told=True)
        return trouble.error

    @contextlib.contextmanager
    def _call(self, is_first: bool = False) -> Iterator[float]:
        """Count the call, give its deadline, and turn the driver's errors into ours."""
        deadline = time.monotonic() + self._timeout_seconds
        ticket = _Ticket(threading.get_ident())
        try:
            self._enter(ticket, deadline)
            with self._counted():
                yield deadline
        except (sa.exc.SQLAlchemyError, self.dialect.driver_error, OSError) as error:
            raise self._explained(error) from error
        except RendezvousSettingsError as error:
            if is_first:
                raise
            # It did work before: to a running job this is an outage.
            raise RendezvousConnectionError(str(error)) from error
        finally:
            # First of all, since a signal handler may raise anywhere below.
            ticket.is_done = True
            with self._idle:
                self._running.discard(ticket)
                self._idle.notify_all()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.failed_count += 1
            raise

    def _enter(self, ticket: _Ticket, deadline: float) -> None:
        if self._is_broken_by_fork:
            raise RendezvousConnectionError(
                f"{self.endpoint}: this process was forked in the middle of a call; start it by "
                "spawn, or fork before the first call"
            )
        with self._idle:
            if ticket.thread in self._busy_threads():
                raise RendezvousConnectionError(
                    f"{self.endpoint}: called by a signal handler in the middle of another call"
                )
            if not self._idle.wait_for(
                lambda: not self._is_forking, max(0.0, deadline - time.monotonic())
            ):
                raise RendezvousConnectionError(f"{self.endpoint}: the process is forking")
            self._running.add(ticket)

    def _busy_threads(self) -> set[int]:
        return {ticket.thread for ticket in self._running if not ticket.is_done}

    def _reset_locks(self) -> None:
        self._opening = threading.Lock()
        self._idle = threading.Condition()
        self._running: set[_Ticket] = set()
        self._is_forking = False

    def before_fork(self) -> None:
        """Let no call begin, wait for those that run, and close all connections."""
        with self._idle:
            self._is_forking = True
            own = threading.get_ident() in self._busy_threads()
            if own or not self._idle.wait_for(
                lambda: not self._busy_threads(), FORK_WAIT_SECONDS_MAX
            ):
                return
        self._forget()

    def after_fork(self, in_child: bool) -> None:
        """Let calls begin again."""
        if not in_child:
            with self._idle:
                self._is_forking = False
                self._idle.notify_all()
            return
        if self._busy_threads():
            # To close the parent's connections here could undo what it is writing.
            _never_closed.append((self._engine, self._signal))
            self._is_broken_by_fork = True
        self._engine, self._signal = None, self.dialect.signal()
        self._reset_locks()


class _Forks:
    """All databases of the process, for the hooks of ``fork``."""

    def __init__(self) -> None:
        # Held from before the fork until after it, by the thread that forks.
        self.lock = threading.RLock()
        self.databases: weakref.WeakSet[Database] = weakref.WeakSet()

    def before(self) -> None:
        self.lock.acquire()
        for database in list(self.databases):
            database.before_fork()

    def after(self, in_child: bool) -> None:
        try:
            for database in list(self.databases):
                database.after_fork(in_child)
        finally:
            self.lock.release()


_never_closed: list[object] = []
_forks = _Forks()
os.register_at_fork(
    before=_forks.before,
    after_in_parent=lambda: _forks.after(False),
    after_in_child=lambda: _forks.after(True),
)
