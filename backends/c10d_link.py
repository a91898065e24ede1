"""A connection to a torch store that nobody has to wait for longer than he wants to.

Torch's stores block in C++: a ``TCPStore`` that has asked a stalled server waits for its answer
until the connection breaks, whatever its timeout says. So each connection has a thread of its own,
and whoever asks waits for the thread with a deadline. What has not answered by then is abandoned:
its connection is broken, if it has one that can be, the next request opens another, and the
abandoned thread does nothing more once it is free.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import torch.distributed as dist

from rdzv.backends import c10d_threads
from rdzv.errors import RendezvousConnectionError

T = TypeVar("T")

STUCK_MAX = 8
"""So many threads may wait for a server that does not answer."""
STUCK_PAUSE_SECONDS = 30.0
"""Beyond that, another one is risked once in this time, and all other requests fail at once."""
CUT_SECONDS_MIN = 0.2
"""A connection that was broken has so long to be left by its thread."""

_Job = tuple[Callable[[Any], Any], "Future[Any]"]


class Abandoned(Exception):
    """Nobody waits for this request any more."""


class Link:
    """One connection and its thread. ``open_session`` connects and makes what jobs are given."""

    def __init__(self, open_session: Callable[[Link], Any], name: str) -> None:
        self._open_session = open_session
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.abandoned = False
        self._thread = c10d_threads.start(self._serve, name, self.abandon)

    @property
    def alive(self) -> bool:
        """Whether its thread has not ended."""
        return self._thread.is_alive()

    def ask(self, job: Callable[[Any], T], seconds: float) -> T:
        """The job's result. Raises what it raises, and ``RendezvousConnectionError`` for no answer
        within ``seconds``; after that this link is of no use any more."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        try:
            result: T = future.result(seconds)
        except FutureTimeoutError:
            if future.done():
                raise
            self.abandon()
            raise RendezvousConnectionError(f"no answer within {seconds:g} s") from None
        except Abandoned:
            raise RendezvousConnectionError("the connection was lost meanwhile") from None
        finally:
            del future
        return result

    def abandon(self) -> None:
        """Perform nothing further. Does not wait."""
        self.abandoned = True
        self._jobs.put(None)

    def cut(self) -> None:
        """Give up also what is being done. Does not wait."""
        self.abandon()
        c10d_threads.cut(self._thread)

    def join(self, seconds: float) -> None:
        """Wait for the end of a link that was abandoned or ended, and cut it if there is none
        within ``seconds``."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        if self.alive:
            self.abandon()
            c10d_threads.end(self._thread, seconds)

    def end(self, last: Callable[[Any], object]) -> None:
        """Perform what was asked before, then ``last``, whose errors go unheard, and no more."""
        self._jobs.put((last, Future()))
        self._jobs.put(None)

    def check(self) -> None:
        """Raises :class:`Abandoned` where nobody waits any more."""
        if self.abandoned:
            raise Abandoned

    def _serve(self) -> None:
        session: Any = None
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                self.check()
                if session is None:
                    session = self._open_session(self)
                future.set_result(job(session))
            except BaseException as error:
                future.set_exception(error)
            # The error refers to this frame: it must not refer back, or the connection would stay
            # until some collection of garbage.
            del item, job, future
        self.abandoned = True
        # Requests that came after the end would wait for nothing.
        while not self._jobs.empty():
            item = self._jobs.get()
            if item is not None:
                item[1].set_exception(RendezvousConnectionError("the connection was closed"))


class Links:
    """One link at a time, replaced after every failure. Safe to use from any thread."""

    def __init__(
        self, open_session: Callable[[Link], Any], name: str, on_failure: Callable[[], None]
    ) -> None:
        self._open_session = open_session
        self._name = name
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._stuck: list[Link] = []
        self._ending: list[Link] = []
        self._opened_at = 0.0

    def ask(self, job: Callable[[Any], T], seconds: float) -> T:
        """The job's result. A link whose job failed with an error of torch's is given up.

        Raises what the job raises, and ``RendezvousConnectionError`` for no answer in time.
        """
        try:
            link = self._current()
        except OSError as error:
            raise RendezvousConnectionError(str(error)) from error
        try:
            return link.ask(job, seconds)
        except (RendezvousConnectionError, RuntimeError, OSError, ValueError) as error:
            self._give_up(link)
            if isinstance(error, RendezvousConnectionError):
                raise
            raise RendezvousConnectionError(_reason(error)) from error

    def close(self, last: Callable[[Any], object] | None = None) -> None:
        """Give up the connection, after ``last`` was done on it; the next request opens anew."""
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                self._ending = [*(each for each in self._ending if each.alive), link]
        if link is not None and last is not None:
            link.end(last)
        elif link is not None:
            link.abandon()

    def join(self, seconds: float) -> None:
        """Wait for the threads of all connections that were given up, and break those that are
        still in use after ``seconds``."""
        with self._lock:
            given_up = self._ending + self._stuck
        deadline = time.monotonic() + seconds
        for link in given_up:
            link.join(max(CUT_SECONDS_MIN, deadline - time.monotonic()))

    def _current(self) -> Link:
        with self._lock:
            self._stuck = [link for link in self._stuck if link.alive]
            if self._link is not None and not self._link.abandoned:
                return self._link
            now = time.monotonic()
            if len(self._stuck) >= STUCK_MAX and now - self._opened_at < STUCK_PAUSE_SECONDS:
                raise RendezvousConnectionError(
                    f"no answer on any of {len(self._stuck)} connections"
                )
            self._link, self._opened_at = Link(self._open_session, self._name), now
            return self._link

    def _give_up(self, link: Link) -> None:
        self._on_failure()
        link.cut()
        with self._lock:
            if self._link is link:
                self._link = None
            if link not in self._stuck:
                self._stuck.append(link)


def _reason(error: Exception) -> str:
    """What torch says, without the C++ stack."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    speaks = isinstance(error, (dist.DistError, c10d_threads.WrongServiceError))
    return first if speaks else f"{type(error).__name__}: {first}"
