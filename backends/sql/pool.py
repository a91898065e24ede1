"""The connections of one backend or store: few, and none for longer than it is used.

A server gives each connection a process or a thread, and has a hundred of them for everybody. So
one that has not been used for a moment is closed, by a thread that ends with it; and one that was
opened for a single call, such as a beat, is closed with the call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

logger = logging.getLogger(__name__)


class Pool:
    """Connections of one engine, which has no pool of its own."""

    def __init__(self, engine: sa.Engine, connections_max: int, idle_seconds: float | None) -> None:
        self.engine = engine
        self._idle_seconds = idle_seconds
        self._slots = threading.Semaphore(connections_max)
        # Reentrant: a signal handler may close what its own thread is taking.
        self._lock = threading.RLock()
        self._idle: list[sa.Connection] = []
        self._is_disposed = False
        self._last_used = time.monotonic()

    @contextmanager
    def connection(self, deadline: float) -> Iterator[sa.Connection]:
        """A connection; given back, or closed where it may not be as it was."""
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise sa.exc.TimeoutError("all connections of this process are in use")
        try:
            connection = self._take()
            is_good = False
            try:
                yield connection
                connection.rollback()
                is_good = True
            finally:
                self._give_back(connection, is_good)
        finally:
            self._slots.release()

    @property
    def has_idle(self) -> bool:
        """Whether a connection is open that nobody uses."""
        return bool(self._idle)

    def close_idle(self, seconds: float = 0.0) -> bool:
        """Close what has not been used for so long; whether nothing is left to be closed."""
        with self._lock:
            if time.monotonic() - self._last_used < seconds:
                return not self._idle
            idle, self._idle = self._idle, []
        for connection in idle:
            _close(connection)
        return True

    def dispose(self) -> None:
        """Close all; what is in use, when it is given back."""
        self._is_disposed = True
        self.close_idle()

    def _take(self) -> sa.Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self.engine.connect()

    def _give_back(self, connection: sa.Connection, is_good: bool) -> None:
        now = time.monotonic()
        with self._lock:
            is_lonely = self._idle_seconds is not None and (
                now - self._last_used > self._idle_seconds
            )
            self._last_used = now
            if is_good and not (
                is_lonely or self._is_disposed or connection.invalidated or connection.closed
            ):
                self._idle.append(connection)
                return
        _close(connection)


def _close(connection: sa.Connection) -> None:
    try:
        if not connection.invalidated:
            connection.invalidate()
        connection.close()
    except Exception:
        # What cannot be closed is dropped.
        logger.debug("closing a connection failed", exc_info=True)


class Reaper:
    """Calls ``reap`` after each pause until it says that nothing is left, in a thread that then
    ends."""

    def __init__(self, reap: Callable[[], bool], seconds: float) -> None:
        self._reap, self._seconds = reap, seconds
        self._wanted = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._is_stopped = self._is_wanted = False

    def start(self) -> None:
        """Begin, where it has not begun yet."""
        with self._wanted:
            self._is_stopped, self._is_wanted = False, True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="rdzv-sql", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    # Late in the life of a process Python starts no thread any more.
                    return
                self._thread = thread

    def stop(self) -> None:
        """End soon."""
        with self._wanted:
            self._is_stopped = True
            self._wanted.notify_all()

    def _run(self) -> None:
        while True:
            with self._wanted:
                if not self._is_stopped:
                    self._wanted.wait(self._seconds)
                self._is_wanted = False
            is_done = self._reap()
            with self._wanted:
                if self._is_stopped or (is_done and not self._is_wanted):
                    self._thread = None
                    return
