"""The connections of one backend or store: few, and none for longer than it is used.

A server gives each connection a process or a thread, and has a hundred of them for everybody. So
one that has not been used for a moment is closed, by a thread that ends with it; and one that was
opened for a beat, which comes alone, is closed with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

logger = logging.getLogger(__name__)


SLOW_CALLS = 5
"""Where calls are slow, what comes between two of them is slow too: an unused connection is kept
for as long as so many calls, or a crowd that is slow would become slower by connecting anew."""
SLOW_SECONDS_MAX = 10.0


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
        self._last_call_seconds = 0.0
        self._spares_until = float("-inf")
        self._kept_until = float("-inf")

    @contextmanager
    def connection(self, deadline: float, *, alone: bool = False) -> Iterator[sa.Connection]:
        """A connection; given back, or closed where it may not be as it was. Where the call
        comes ``alone``, none is kept for the next one."""
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise sa.exc.TimeoutError("all connections of this process are in use")
        try:
            begun = time.monotonic()
            is_lonely = alone and self._is_over(begun)
            connection = self._take()
            is_good = False
            try:
                yield connection
                connection.rollback()
                is_good = True
            finally:
                is_short = time.monotonic() < self._spares_until
                self.give_back(connection, is_good and not (is_lonely or is_short), begun)
        finally:
            self._slots.release()

    def spare(self, seconds: float) -> None:
        """For so long keep no connection that nobody uses: others lack them. One that is open
        serves one more call."""
        self._spares_until = time.monotonic() + seconds
        self._kept_until = float("-inf")

    def keep(self, seconds: float) -> None:
        """For so long close no connection because nobody uses it."""
        self._kept_until = time.monotonic() + seconds

    @property
    def has_idle(self) -> bool:
        """Whether a connection is open that nobody uses."""
        return bool(self._idle)

    def close_idle(self) -> bool:
        """Close what has not been used for a while; whether nothing is left to be closed."""
        with self._lock:
            if not self._is_over(time.monotonic()):
                return not self._idle
        self._close_all()
        return True

    def _is_over(self, now: float) -> bool:
        if self._idle_seconds is None or now < self._kept_until:
            return False
        slowly = min(SLOW_CALLS * self._last_call_seconds, SLOW_SECONDS_MAX)
        return now - self._last_used > max(self._idle_seconds, slowly)

    def _close_all(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            _close(connection)

    def dispose(self) -> None:
        """Close all; what is in use, when it is given back."""
        self._is_disposed = True
        self._close_all()

    def take(self, connection: sa.Connection) -> bool:
        """Take this very connection out, for longer than a call; whether it was there and
        unused."""
        with self._lock:
            if connection not in self._idle:
                return False
            self._idle.remove(connection)
            return True

    def _take(self) -> sa.Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self.engine.connect()

    def give_back(
        self, connection: sa.Connection, is_kept: bool, begun: float | None = None
    ) -> None:
        """End the use of a connection, which is closed where it may not be as it was; ``begun``
        is when a call began that used it."""
        with self._lock:
            self._last_used = time.monotonic()
            if begun is not None:
                self._last_call_seconds = self._last_used - begun
            if is_kept and not (self._is_disposed or connection.invalidated or connection.closed):
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
