"""LISTEN: being told of commits by PostgreSQL.

* One connection for all threads of a backend or store, one of the pool's. One of the waiting
  threads, whichever comes first, takes it out of the pool to read from it, and wakes the others;
  between two waits it is there for every call, which also counts what the server tells meanwhile.
* Whoever listens first, and then looks, misses nothing.
* Where it cannot work, or would take what others need, waits look again and again instead: behind
  a pooler, which hands out its own process numbers and gives the connection to others after each
  transaction; and where more than half of the server's connections are in use.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import psycopg
import sqlalchemy as sa

from rdzv.backends.sql.base import Answer, ChangeSignal, Look, Pace, Polling, Rest
from rdzv.backends.sql.pool import Pool
from rdzv.backends.sql.shortage import COUNT, Limits

FOLLOWER_SECONDS_MAX = 1.0
"""A thread that does not read looks so often whether it has to."""
BUSY_SECONDS = 0.02
"""A thread looks so often whether the connection is free that another one asks on."""
LET_GO_SECONDS = 0.5
"""How long who wants to listen to more waits for the connection."""
TRY_AGAIN_SECONDS = 10.0
"""How long a server is spared that was crowded, and a pooler is taken for one."""


class StaleConnection(psycopg.OperationalError):
    """It was closed before anything was asked on it that may not be asked again."""


@contextlib.contextmanager
def unless_stale(driver: Any) -> Iterator[None]:
    """Tell a connection that was lost in time for another try; only around what may be repeated."""
    try:
        yield
    except psycopg.OperationalError as error:
        if driver.closed and time.monotonic() < driver.deadline:
            raise StaleConnection(str(error)) from error
        raise


class Speaker(Protocol):
    """Who knows the driver."""

    request_seconds: float

    def code(self, error: BaseException) -> Any:
        """The server's code of an error."""

    def limits_by(self, driver: Any) -> Limits:
        """The limits of connections, by the driver's connection."""

    def text(self, driver: Any, statement: sa.Executable, values: dict[str, Any]) -> str:
        """A statement as it is sent."""

    def answers(self, driver: Any, message: str) -> list[Answer]:
        """To the statements of a message, in which a stale connection is told."""


class Listener(ChangeSignal):
    """Tells by LISTEN, and where that cannot work by looking again and again."""

    def __init__(self, speaker: Speaker, pooled: Pace, crowded: Pace) -> None:
        self._speaker = speaker
        self._pooled, self._crowded = Polling(pooled), Polling(crowded)
        self._polling: Polling | None = None
        self._polls_until = float("-inf")
        # Reentrant: a signal handler may close what its own thread is reading.
        self._changed = threading.Condition(threading.RLock())
        self._line: _Line | None = None
        self._counts: dict[str, int] = {}
        self._opened = 0
        self._waiting = 0
        self._asking = 0
        """How many want to listen to more, for which whoever reads lets go."""
        self._reader: int | None = None

    def mark(
        self, topics: Sequence[str], pool: Pool, deadline: float, look: Look | None = None
    ) -> Any:
        with self._changed:
            if time.monotonic() < self._polls_until:
                return None
            line = self._line
            if line is not None and (line.pool is not pool or not self._catch_up(line)):
                self.close()
                line = None
            new = [topic for topic in topics if topic not in self._counts]
            if line is None:
                # As it was before the look: what is told together with its answer counts.
                return self._open(topics, pool, deadline, look)
            is_listening = not new or self._listen_too(line, new)
            return self._now(topics) if is_listening else None

    def sleep(
        self,
        mark: Any,
        topics: Sequence[str],
        seconds: float,
        rest: Rest,
        is_over: Callable[[], bool],
    ) -> None:
        if mark is None:
            polling = self._polling or self._crowded
            polling.sleep(mark, topics, seconds, rest, is_over)
            return
        end = time.monotonic() + seconds
        with self._attending():
            while not is_over():
                with self._changed:
                    left = end - time.monotonic()
                    if left <= 0 or self._now(topics) != mark:
                        return
                    line = self._line
                    if line is None or line.driver.closed:
                        return
                    if self._reader is not None:
                        self._changed.wait(min(left, FOLLOWER_SECONDS_MAX))
                        continue
                    if self._asking or not line.take():
                        self._changed.wait(min(left, BUSY_SECONDS))
                        continue
                    self._reader = threading.get_ident()
                try:
                    self._read(line, left)
                finally:
                    with self._changed:
                        self._reader = None
                        self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            line, self._line = self._line, None
            self._counts.clear()
            self._polls_until = float("-inf")
            self._changed.notify_all()
            if line is not None:
                line.ring()
                # Who reads from it gives it back by itself.
                if self._reader is None:
                    line.end()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            if self._line is not None:
                self._line.ring()

    def close_idle(self) -> bool:
        with self._changed:
            if self._line is not None and self._line.driver.closed:
                self.close()
            return not self._waiting

    @contextlib.contextmanager
    def _attending(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def _now(self, topics: Sequence[str]) -> tuple[int, ...]:
        opened = self._opened if self._line is not None else -1
        return (opened, *(self._counts.get(topic, -1) for topic in topics))

    def _open(self, topics: Sequence[str], pool: Pool, deadline: float, look: Look | None) -> Any:
        """A mark that was taken before the look; None where the server will not tell."""
        self._counts = dict.fromkeys(topics, 0)
        try:
            with pool.connection(deadline) as connection:
                driver: Any = connection.connection.driver_connection
                with unless_stale(driver):
                    self._polling = self._begin_to_listen(driver, topics, look)
        except (sa.exc.DBAPIError, psycopg.Error) as error:
            if self._speaker.code(error) != "53300":
                raise
            # It is of no use to try again and again, as other calls do.
            self._polling = self._crowded
        if self._polling is not None:
            self._polls_until = time.monotonic() + TRY_AGAIN_SECONDS
            if self._polling is self._crowded:
                pool.spare(TRY_AGAIN_SECONDS)
            return None
        self._line = _Line(pool, connection, driver)
        self._opened += 1
        return (self._opened, *(0 for _ in topics))

    def _begin_to_listen(
        self, driver: Any, topics: Sequence[str], look: Look | None
    ) -> Polling | None:
        """How to wait instead, where the server is not to tell."""
        driver.deadline = time.monotonic() + self._speaker.request_seconds
        limits = self._speaker.limits_by(driver)
        if not limits.is_direct:
            return self._pooled
        driver.add_notify_handler(self._told)
        message = f"BEGIN; {_listening(topics)}; COMMIT; {COUNT}"
        if look is None:
            counted = self._speaker.answers(driver, message)[-1]
        else:
            message += f"; {self._speaker.text(driver, look.statement, look.values)}"
            *_, counted, look.answer = self._speaker.answers(driver, message)
        process, processes = counted.rows[0]
        is_pooled = process != driver.pgconn.backend_pid
        if is_pooled or limits.are_short(driver, processes):
            driver.execute("UNLISTEN *")
            driver.remove_notify_handler(self._told)
            return self._pooled if is_pooled else self._crowded
        return None

    def _listen(self, driver: Any, topics: Sequence[str]) -> None:
        driver.deadline = time.monotonic() + self._speaker.request_seconds
        driver.execute(_listening(topics))
        self._counts.update(dict.fromkeys(topics, 0))

    def _listen_too(self, line: _Line, topics: Sequence[str]) -> bool:
        """Whether that could be asked for now: another thread may be using the connection."""
        if not self._borrow(line):
            return False
        is_good = False
        try:
            with unless_stale(line.driver):
                self._listen(line.driver, topics)
            is_good = True
        finally:
            line.give_back(is_good)
            if not is_good:
                self.close()
        return True

    def _catch_up(self, line: _Line) -> bool:
        """Count what was told while nobody read: whoever uses the connection does so by itself.
        Whether the connection is still there."""
        is_good = not line.driver.closed
        if is_good and line.take():
            try:
                line.driver.pgconn.consume_input()
                self._drain(line)
            except psycopg.Error:
                is_good = False
            finally:
                line.give_back(is_good)
        return is_good

    def _borrow(self, line: _Line) -> bool:
        """Take the connection, if need be from whoever reads from it; whether it could be had."""
        end = time.monotonic() + LET_GO_SECONDS
        self._asking += 1
        try:
            while self._line is line:
                if line.take():
                    return True
                if time.monotonic() >= end:
                    return False
                line.ring()
                self._changed.wait(BUSY_SECONDS)
            return False
        finally:
            self._asking -= 1

    def _read(self, line: _Line, seconds: float) -> None:
        """Wait for what the server tells, and count it. Only one thread at a time is here."""
        is_good = False
        try:
            # What came with the answer to a question is in no socket any more.
            if not self._drain(line):
                poller, bell = select.poll(), line.bell[0].fileno()
                for descriptor in (line.driver.pgconn.socket, bell):
                    poller.register(descriptor, select.POLLIN)
                found = poller.poll(max(1, round(seconds * 1000)))
                with self._changed:
                    if self._line is line:
                        if any(descriptor == bell for descriptor, _ in found):
                            line.hush()
                        line.driver.pgconn.consume_input()
                        self._drain(line)
            is_good = True
        except psycopg.Error:
            self.close()
            raise
        finally:
            line.give_back(is_good)
            with self._changed:
                if self._line is not line:
                    line.end()

    def _drain(self, line: _Line) -> bool:
        is_told = False
        while (told := line.driver.pgconn.notifies()) is not None:
            self._count(told.relname.decode())
            is_told = True
        return is_told

    def _told(self, told: psycopg.Notify) -> None:
        self._count(told.channel)

    def _count(self, topic: str) -> None:
        with self._changed:
            if topic in self._counts:
                self._counts[topic] += 1
                self._changed.notify_all()


def _listening(topics: Sequence[str]) -> str:
    return "; ".join(f"LISTEN {topic}" for topic in topics)


class _Line:
    """The connection on which the server tells, and what wakes its reader besides."""

    def __init__(self, pool: Pool, connection: sa.Connection, driver: Any) -> None:
        self.pool, self.driver = pool, driver
        self._connection = connection
        self.bell = socket.socketpair()
        for end in self.bell:
            end.setblocking(False)

    def take(self) -> bool:
        """Take it out of the pool; whether it was there."""
        return self.pool.take(self._connection)

    def give_back(self, is_good: bool) -> None:
        """End what :meth:`take` has begun."""
        self.pool.give_back(self._connection, is_good)

    def ring(self) -> None:
        """Wake the reader."""
        # A bell that is full rings already, one that is closed has been heard.
        with contextlib.suppress(OSError):
            self.bell[1].send(b".")

    def hush(self) -> None:
        """End the ringing."""
        with contextlib.suppress(BlockingIOError):
            while self.bell[0].recv(64):
                pass

    def end(self) -> None:
        """Nobody rings or hears any more. May be called twice."""
        for end in self.bell:
            end.close()
