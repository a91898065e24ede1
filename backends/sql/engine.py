"""Connections, transactions and waiting, the same for every database.

* A transaction is short. All blocked waits together hold one connection at most, on which the
  server tells, and none of the places of the pool: they silence nobody.
* An error before the commit means that nothing was written. Only the answer to the commit itself
  can be lost; then the caller's ``was_applied`` looks, on a new connection, for what was written.
  The commit may still be under way then: a server that waits for its disk or its standby ends it
  later. Who must not take that for a failure first waits for a lock that the writer held.
* What is gone is noticed: when the tables or the file were removed or replaced, the call that
  finds out raises, so that its caller knows that contact was lost, and the next one starts anew.
* The store of a backend shares its connections, where the database is a server.
* A wait takes a mark, looks, and sleeps until the mark has changed: nothing is missed. What is
  lost without a word is found by looking again now and then.
* What the database refused without having done anything, since it was overcrowded, resolved a
  deadlock or had closed the connection, is asked again within the call's own time.
* ``fork`` closes all connections first, because SQLite's locks belong to a process but its notes
  about them are copied. It waits for running calls for a moment; where one does not end, the
  child's copy refuses to work.
* A call from a signal handler that interrupts another call of the same thread is refused at once:
  it would wait for a lock that its own thread holds.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from rdzv.backends.sql import forks
from rdzv.backends.sql.base import (
    KNOWLEDGE_SECONDS_MAX,
    NO_KNOWLEDGE,
    Answer,
    ChangeSignal,
    Dialect,
    Knowledge,
    Look,
    Pace,
    Patience,
    Rest,
)
from rdzv.backends.sql.pool import Pool, Reaper
from rdzv.backends.sql.schema import Tables
from rdzv.errors import RendezvousConnectionError, RendezvousError, RendezvousSettingsError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sa.Connection], T]

FORK_WAIT_SECONDS_MAX = 2.0
LOOK_SHARE = 5.0
"""Where an answer comes late, many ask: who looks by itself pauses so many times as long as a look
took. So of a crowd that is too much for the server only some are asking at any moment, and who
has something to say gets through."""
RETRY_SECONDS_FIRST = 0.02
RETRY_SECONDS_LAST = 2.0


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

    def __init__(
        self,
        dialect: Dialect,
        tables: Tables,
        timeout_seconds: float = float("inf"),
        beside: Database | None = None,
    ) -> None:
        """``beside`` is a user of the same database whose connections this one shares."""
        self.dialect = dialect
        self._beside = beside
        self._is_closed = False
        self.tables = tables
        self._timeout_seconds = min(timeout_seconds, dialect.request_seconds)
        self._signal: ChangeSignal = dialect.signal()
        self._pool: Pool | None = None
        self._joins = False
        self._patience = Patience()
        self._knowledge = NO_KNOWLEDGE
        self._closed_count = 0
        self.failed_count = 0
        self._is_broken_by_fork = False
        self._reset_locks()
        forks.attend(self)

    @property
    def endpoint(self) -> str:
        """What the user would recognise, with secrets masked."""
        return self.dialect.endpoint

    def open(self, *, joins: bool = False) -> None:
        """Connect and make the tables where they are missing; for who ``joins`` a rendezvous next,
        now and whenever all is opened anew, also what would take time in that.

        Raises also ``RendezvousSettingsError``, for what no later try will mend.
        """
        deadline = time.monotonic() + self.dialect.open_seconds

        def attempt() -> None:
            pool = self._ready_pool(deadline, joins)
            if joins:
                pool.keep(self.dialect.opened_seconds)

        with self._call(is_first=True):
            self._repeat(attempt, deadline)

    def read(self, work: Work[T]) -> T:
        """What ``work`` returns; each of its statements sees the database at one moment."""

        def attempt() -> T:
            with self._connection(deadline, write=False) as connection:
                return work(connection)

        with self._call() as deadline:
            return self._repeat(attempt, deadline, is_read=True)

    def write(
        self,
        work: Work[T],
        was_applied: Work[bool] | None = None,
        *,
        alone: bool = False,
        along: Look | None = None,
    ) -> T:
        """What ``work`` returns, once all it wrote is committed.
        ``alone`` says that no other call will come soon. What goes ``along`` was answered when
        ``work`` is called, or is left to it.

        Raises :class:`AnswerLost` where that is not known. After any other error ``was_applied``,
        in a transaction of its own, has found nothing; without one, the commit may yet be made.
        """

        def attempt() -> T:
            if along is not None:
                along.answer = None
            with self._connection(deadline, write=True, alone=alone, along=along) as connection:
                result = work(connection)
                try:
                    connection.commit()
                    return result
                except sa.exc.DBAPIError as error:
                    if self.dialect.is_transient(error):
                        raise
                    lost = self._explained(error)
                    connection.invalidate()
            if was_applied is None:
                raise lost
            return self._look_for_answer(result, was_applied, lost)

        with self._call() as deadline:
            return self._repeat(attempt, deadline)

    def send(
        self,
        written: Sequence[sa.Executable],
        read: Sequence[sa.Executable],
        values: dict[str, Any],
        *,
        alone: bool = False,
    ) -> list[Answer]:
        """See :meth:`Dialect.send`, and for ``alone`` :meth:`write`."""

        def attempt() -> list[Answer]:
            pool = self._ready_pool(deadline)
            with pool.connection(deadline, alone=alone) as connection:
                seconds = deadline - time.monotonic()
                return self.dialect.send(connection, written, read, values, seconds)

        with self._call() as deadline:
            return self._repeat(attempt, deadline)

    def listen(self, topics: Sequence[str], look: Look | None = None) -> Callable[[object], None]:
        """Be told from now on; a ``look`` goes along where that works, and else is left as it is.
        To be called with what is found afterwards, as :meth:`wait` has it of ``seen``."""
        mark, now = self._mark(topics, look), time.monotonic()

        def know(seen: object) -> None:
            self._knowledge = Knowledge(mark, seen, now)

        return know

    def is_known(self, topics: Sequence[str], seen: object) -> bool:
        """Whether this was found last, and nothing was told since."""
        return self._knowledge.holds(self._mark(topics), seen, time.monotonic())

    def notify(self, connection: sa.Connection, *topics: str) -> None:
        """Let the commit of this transaction end waits for these topics."""
        self.dialect.notify(connection, topics)

    def wait(
        self,
        look: Callable[[], T | None],
        timeout_seconds: float,
        topics: Sequence[str],
        *,
        awaited: object = None,
        seen: Callable[[], object] = lambda: None,
        pace: Pace | None = None,
    ) -> T | None:
        """What ``look`` returns, as soon as that is not None or the time is over.

        ``look`` is called at least once, and again after every commit that notified of a topic;
        with a ``pace`` also at that. Who goes on to wait for the same ``awaited`` looks no more
        often than before. ``seen`` is what the last look has found: who waits for that to change,
        and has been told of nothing since, need not look once more.
        """
        end = time.monotonic() + max(0.0, timeout_seconds)
        if timeout_seconds <= 0:
            return look()
        begun = self._patience.begun(awaited)
        closed_count = self._closed_count
        while True:
            mark = self._mark(topics)
            asked_at = now = time.monotonic()
            found = None
            # Who waits at a pace is not told of everything.
            if pace is not None or not self._knowledge.holds(mark, awaited, now):
                found = look()
                now = time.monotonic()
                self._knowledge = Knowledge(mark, seen(), asked_at)
            if found is not None or now >= end:
                self._patience.end(awaited if found is None else None, begun)
                return found
            rest = Rest(now - begun, LOOK_SHARE * (now - asked_at))
            seconds = min(end - now, KNOWLEDGE_SECONDS_MAX)
            if pace is not None:
                # Only one of a run waits so.
                seconds = min(seconds, pace.seconds(rest.waited_seconds))
            self._sleep(mark, topics, seconds, rest, closed_count)

    def _sleep(
        self,
        mark: Any,
        topics: Sequence[str],
        seconds: float,
        rest: Rest,
        closed_count: int,
    ) -> None:
        def is_over() -> bool:
            return self._closed_count != closed_count

        # Not a call: a fork must not wait for it.
        try:
            self._waker.sleep(mark, topics, seconds, rest, is_over)
        except (sa.exc.SQLAlchemyError, self.dialect.driver_error, OSError) as error:
            if not is_over():
                raise self._explained(error) from error
        if is_over():
            raise RendezvousConnectionError(f"{self.endpoint}: closed while waiting")
        self._reap_later()

    def close(self) -> None:
        """Close all connections; a later call opens them anew. Never raises."""
        self._closed_count += 1
        self._is_closed = True
        if self._beside is None or self._beside._is_closed:
            self._forget()
        else:
            # The other one goes on with the connections; what waits here does not.
            self._waker.wake()

    @property
    def _waker(self) -> ChangeSignal:
        return self._signal if self._beside is None else self._beside._waker

    def _mark(self, topics: Sequence[str], look: Look | None = None) -> Any:
        def attempt() -> Any:
            if look is not None:
                look.answer = None
            return self._waker.mark(topics, self._ready_pool(deadline), deadline, look)

        with self._call() as deadline:
            return self._repeat(attempt, deadline)

    def _repeat(self, attempt: Callable[[], T], deadline: float, *, is_read: bool = False) -> T:
        pause = RETRY_SECONDS_FIRST
        may_be_stale = is_read
        while True:
            try:
                return attempt()
            except (sa.exc.SQLAlchemyError, self.dialect.driver_error) as error:
                left = deadline - time.monotonic()
                is_stale = may_be_stale and getattr(error, "connection_invalidated", False)
                if left <= 0 or not (is_stale or self.dialect.is_transient(error)):
                    raise
                may_be_stale = may_be_stale and not is_stale
            # Whatever it believed to have written is not there.
            self.failed_count += 1
            time.sleep(min(left, random.uniform(pause / 2, pause)))
            pause = min(2 * pause, RETRY_SECONDS_LAST)

    @contextlib.contextmanager
    def _connection(
        self, deadline: float, *, write: bool, alone: bool = False, along: Look | None = None
    ) -> Iterator[sa.Connection]:
        pool = self._ready_pool(deadline)
        with pool.connection(deadline, alone=alone) as connection:
            self.dialect.begin(connection, write, deadline - time.monotonic(), along)
            if write and not connection.in_transaction():
                # Else SQLAlchemy would neither commit nor roll back before it has executed
                # something by itself.
                connection.begin()
            # What ``work`` leaves without a commit is rolled back by the pool.
            yield connection

    def _reap_later(self) -> None:
        if self._beside is not None:
            self._beside._reap_later()
        elif self.dialect.idle_seconds is not None:
            self._reaper.start()

    def _reap(self) -> bool:
        pool = self._pool
        is_done = pool is None or pool.close_idle()
        return self._signal.close_idle() and is_done

    def _look_for_answer(self, result: T, was_applied: Work[bool], lost: RendezvousError) -> T:
        # The call's time may be over: it was spent on waiting for the answer.
        deadline = time.monotonic() + self._timeout_seconds
        try:
            with self._connection(deadline, write=True) as connection:
                applied = was_applied(connection)
        except (sa.exc.SQLAlchemyError, self.dialect.driver_error, OSError, RendezvousError):
            raise AnswerLost(str(lost), result) from lost
        if applied:
            return result
        raise lost

    def _ready_pool(self, deadline: float, joins: bool = False) -> Pool:
        if self._beside is not None:
            return self._beside._ready_pool(deadline, joins)
        if self.dialect.is_replaced():
            self._forget(was_told=True)
            raise RendezvousConnectionError(
                f"{self.endpoint} was removed or replaced; the next call opens it anew"
            )
        pool = self._pool
        if pool is not None and (self._joins or not joins):
            return pool
        if not self._opening.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise RendezvousConnectionError(f"{self.endpoint} could not be opened in time")
        try:
            # Another thread may close at any moment.
            known, dialect = self._pool, self.dialect
            joins = joins or self._joins
            if known is not None and joins == self._joins:
                return known
            pool = known or Pool(dialect.engine(), dialect.connections_max, dialect.idle_seconds)
            dialect.prepare(self.tables, pool, deadline, joins)
            self._joins = joins
            if known is None:
                self._pool = pool
            return pool
        finally:
            self._opening.release()

    def _forget(self, *, was_told: bool = False) -> None:
        if self._beside is not None:
            self._beside._forget(was_told=was_told)
            return
        if was_told:
            self.dialect.forget()
        pool, self._pool = self._pool, None
        try:
            self._reaper.stop()
            self._signal.close()
            if pool is not None:
                pool.dispose()
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
            pool = (self._beside or self)._pool
            if pool is not None and pool.has_idle:
                self._reap_later()
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
        self._is_closed = False
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
        self._reaper = Reaper(self._reap, self.dialect.idle_seconds or 0.0)

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
            _never_closed.append((self._pool, self._signal))
            self._is_broken_by_fork = True
        self._pool, self._signal = None, self.dialect.signal()
        # Its first marks are those that the parent's had.
        self._knowledge = NO_KNOWLEDGE
        self._reset_locks()


_never_closed: list[object] = []
