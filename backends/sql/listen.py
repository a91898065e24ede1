"""LISTEN: being told of commits by PostgreSQL.

* One connection for all threads of a backend or store, held only while somebody waits. One of the
  waiting threads, whichever comes first, reads from it and wakes the others.
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
from typing import Any

import psycopg

from rdzv.backends.sql.base import ChangeSignal, Pace, Polling

FOLLOWER_SECONDS_MAX = 1.0
"""A thread that does not read looks so often whether it has to."""
LINGER_SECONDS = 1.0
"""The connection is kept so long for the next wait."""
TRY_AGAIN_SECONDS = 10.0
"""How long a server is spared that was crowded, and a pooler is taken for one."""
LOOK_AROUND = """
WITH clients AS (SELECT usename, datname FROM pg_stat_activity
                  WHERE datid IS NOT NULL AND usesysid IS NOT NULL),
     limits AS (SELECT current_setting('max_connections')::int AS most,
                       (SELECT count(*) FROM clients) AS used
                UNION ALL
                SELECT rolconnlimit, (SELECT count(*) FROM clients WHERE usename = session_user)
                  FROM pg_roles WHERE rolname = session_user
                UNION ALL
                SELECT datconnlimit,
                       (SELECT count(*) FROM clients WHERE datname = current_database())
                  FROM pg_database WHERE datname = current_database())
SELECT pg_backend_pid(), EXISTS (SELECT FROM limits WHERE most >= 0 AND used * 2 > most)
"""
"""The server's number of this process, and whether connections are short. Of the connections of
others a common role sees whose they are and to what database, but not of which type."""


class Listener(ChangeSignal):
    """Tells by LISTEN, and where that cannot work by looking again and again."""

    def __init__(
        self,
        connect: Callable[[], Any],
        code: Callable[[BaseException], Any],
        request_seconds: float,
        pooled: Pace,
        crowded: Pace,
    ) -> None:
        self._connect, self._code = connect, code
        self._request_seconds = request_seconds
        self._pooled, self._crowded = Polling(pooled), Polling(crowded)
        self._polling: Polling | None = None
        self._polls_until = float("-inf")
        # Reentrant: a signal handler may close what its own thread is reading.
        self._changed = threading.Condition(threading.RLock())
        self._connection: Any = None
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._counts: dict[str, int] = {}
        self._opened = 0
        self._waiting = 0
        self._reader: int | None = None
        self._last_used = float("-inf")

    def mark(self, topics: Sequence[str]) -> Any:
        with self._changed:
            if time.monotonic() < self._polls_until:
                return None
            self._last_used = time.monotonic()
            if self._connection is None and not self._open():
                return None
            new = [topic for topic in topics if topic not in self._counts]
            if new:
                self._listen(new)
            return self._now(topics)

    def sleep(
        self,
        mark: Any,
        topics: Sequence[str],
        seconds: float,
        waited_seconds: float,
        is_over: Callable[[], bool],
    ) -> None:
        if mark is None:
            polling = self._polling or self._crowded
            polling.sleep(mark, topics, seconds, waited_seconds, is_over)
            return
        end = time.monotonic() + seconds
        with self._attending():
            while not is_over():
                with self._changed:
                    left = end - time.monotonic()
                    if left <= 0 or self._now(topics) != mark:
                        return
                    if self._reader is not None:
                        self._changed.wait(min(left, FOLLOWER_SECONDS_MAX))
                        continue
                    # Taken together: who closes leaves to the reader what it reads from.
                    self._reader = threading.get_ident()
                    connection, bell = self._connection, self._bell
                try:
                    self._read(connection, bell, left)
                finally:
                    with self._changed:
                        self._reader = None
                        self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            connection, self._connection = self._connection, None
            bell, self._bell = self._bell, None
            self._counts.clear()
            self._polls_until = float("-inf")
            self._changed.notify_all()
            if bell is not None:
                # Wakes the reader, which closes what it reads from by itself.
                with contextlib.suppress(OSError):
                    bell[1].close()
            if connection is not None and self._reader in (None, threading.get_ident()):
                connection.close()
                if bell is not None:
                    bell[0].close()

    def close_idle(self) -> bool:
        with self._changed:
            if self._connection is None:
                return True
            if not self._waiting and time.monotonic() - self._last_used >= LINGER_SECONDS:
                self.close()
                return True
            return False

    @contextlib.contextmanager
    def _attending(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._last_used = time.monotonic()

    def _now(self, topics: Sequence[str]) -> tuple[int, ...]:
        opened = self._opened if self._connection is not None else -1
        return (opened, *(self._counts.get(topic, -1) for topic in topics))

    def _open(self) -> bool:
        try:
            connection = self._connect()
        except psycopg.Error as error:
            if self._code(error) != "53300":
                raise
            return self._poll(self._crowded)
        try:
            process, is_crowded = connection.execute(LOOK_AROUND).fetchone()
            polling = None
            if process != connection.pgconn.backend_pid:
                polling = self._pooled
            elif is_crowded:
                polling = self._crowded
            if polling is not None:
                connection.close()
                return self._poll(polling)
        except BaseException:
            connection.close()
            raise
        connection.add_notify_handler(lambda told: self._count(told.channel))
        self._connection, self._bell = connection, socket.socketpair()
        self._opened += 1
        return True

    def _poll(self, polling: Polling) -> bool:
        self._polling, self._polls_until = polling, time.monotonic() + TRY_AGAIN_SECONDS
        return False

    def _listen(self, topics: Sequence[str]) -> None:
        connection = self._connection
        connection.deadline = time.monotonic() + self._request_seconds
        try:
            connection.execute("; ".join(f"LISTEN {topic}" for topic in topics))
        except BaseException:
            self.close()
            raise
        self._counts.update(dict.fromkeys(topics, 0))

    def _read(self, connection: Any, bell: Any, seconds: float) -> None:
        """Wait for what the server tells, and count it. Only one thread at a time is here."""
        try:
            poller = select.poll()
            for descriptor in (connection.pgconn.socket, bell[0].fileno()):
                poller.register(descriptor, select.POLLIN)
            poller.poll(max(1, round(seconds * 1000)))
            with self._changed:
                if self._connection is connection:
                    connection.pgconn.consume_input()
                    while (told := connection.pgconn.notifies()) is not None:
                        self._count(told.relname.decode())
        except psycopg.Error:
            self.close()
            raise
        finally:
            with self._changed:
                if self._connection is not connection:
                    connection.close()
                    bell[0].close()

    def _count(self, topic: str) -> None:
        with self._changed:
            if topic in self._counts:
                self._counts[topic] += 1
                self._changed.notify_all()
