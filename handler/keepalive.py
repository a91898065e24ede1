"""The one background thread of a handler: it owns the session and runs the protocol.

Rules:

* Everything that talks to the backend for the rendezvous happens in this thread, one step after
  another, so the session needs no lock. Others read single fields of it, which are replaced whole.
* Whoever asks something of the thread waits for a future with a deadline. So nothing that hangs
  below (name resolution, a driver) can hold the agent beyond it.
* The thread survives every exception, and logs once for each change of health.
* A barrier that its caller has abandoned is given up: a node that nobody waits for must not be
  counted in a round.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rdzv.driver import Driver, Stopped
from rdzv.effects import Effect, Session
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.protocol import give_up, join
from rdzv.running import keep_alive
from rdzv.state import State

logger = logging.getLogger("rdzv")

GIVE_UP_RETRY_SECONDS = 1.0

Steps = Callable[[], Generator[Effect, Any, Any]]


class _Kind(Enum):
    ASK = "between two beats"
    JOIN = "beats follow if it succeeds"
    LEAVE = "no beat follows"


@dataclass(frozen=True, slots=True)
class _Order:
    kind: _Kind
    steps: Steps
    future: Future[Any]


class KeepAlive:
    """The background thread. ``name`` is what logs call this node; ``on_overtaken`` is called in
    the thread when the run has gone on to a round without this node."""

    def __init__(
        self, driver: Driver, session: Session, name: str, on_overtaken: Callable[[], None]
    ) -> None:
        self._on_overtaken = on_overtaken
        self._driver = driver
        self._session = session
        self._name = name
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._running = False
        self._healthy = True
        self._noticed = False
        self._refills = 0
        self._stopped = False
        self.fatal: RendezvousError | None = None
        """What ended the outage budget; None as long as it is not spent."""
        self._thread = threading.Thread(target=self._serve, name=f"rdzv-{name}", daemon=True)
        self._thread.start()

    def join_round(self, join_timeout_seconds: float) -> Future[State]:
        """Enter the barrier. The future holds the document of the round, or the error."""

        def steps() -> Generator[Effect, Any, State]:
            return join(self._session, self._session.clock() + join_timeout_seconds)

        return self._order(_Kind.JOIN, steps)

    def ask(self, steps: Steps) -> Future[Any]:
        """Run the steps of a protocol generator between two beats."""
        return self._order(_Kind.ASK, steps)

    def abandon(self, joining: Future[State]) -> None:
        """Nobody waits for this :meth:`join_round` any more."""
        if not joining.cancel():
            self._session.abandoned = True

    def leave(self) -> Future[Any]:
        """Take this node out of the barrier or its round, and let its keep-alives end."""
        self._session.abandoned = True
        return self._order(_Kind.LEAVE, lambda: give_up(self._session))

    def stop(self) -> None:
        """Perform nothing further. Does not wait: the thread may be inside a driver's call."""
        self._stopped = True
        self._driver.stop()
        self._orders.put(None)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the thread to end after :meth:`stop`; tells whether it has."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _order(self, kind: _Kind, steps: Steps) -> Future[Any]:
        future: Future[Any] = Future()
        if self._stopped:
            future.set_exception(Stopped("the rendezvous handler was shut down"))
        else:
            self._orders.put(_Order(kind, steps, future))
        return future

    def _serve(self) -> None:
        try:
            self._serve_until_stopped()
        finally:
            self._stopped = True
            while not self._orders.empty():
                order = self._orders.get()
                if order is not None:
                    order.future.cancel()

    def _serve_until_stopped(self) -> None:
        while not self._stopped:
            try:
                order = self._orders.get(timeout=self._idle_seconds())
            except queue.Empty:
                self._beat()
                continue
            if order is None:
                return
            self._obey(order)

    def _idle_seconds(self) -> float | None:
        if not self._running:
            return None
        # A queue cannot wait for ever on an infinite number, nor for longer than a lock can.
        return min(3600.0, max(0.0, self._session.next_beat - self._session.clock()))

    def _obey(self, order: _Order) -> None:
        if order.kind is _Kind.JOIN:
            self._session.abandoned = False
        if not order.future.set_running_or_notify_cancel():
            return
        if order.kind is not _Kind.ASK:
            self._running = False
        try:
            result = self._driver.run(order.steps())
        except BaseException as error:
            order.future.set_exception(error)
            if order.kind is _Kind.JOIN:
                self._give_up()
            return
        if order.kind is _Kind.JOIN:
            self.fatal = None
            self._running, self._noticed = True, False
        order.future.set_result(result)

    def _beat(self) -> None:
        session = self._session
        if session.clock() < session.next_beat:
            return
        try:
            self._driver.run(keep_alive(session))
            self.fatal = None
            if session.overtaken:
                self._on_overtaken()
        except Stopped:
            return
        except RendezvousError as error:
            self.fatal = error
            session.next_beat = session.clock() + session.rules.keep_alive_interval_seconds
        except Exception:
            logger.exception("%s: the keep-alive failed and goes on", self._name)
            session.next_beat = session.clock() + session.rules.keep_alive_interval_seconds
        self._tell_health()
        self._tell_refill()
        self._tell_notice()

    def _tell_notice(self) -> None:
        """Why the workers will be stopped: torchrun itself does not say."""
        session = self._session
        known, self._noticed = self._noticed, session.notice.count > 0
        if known or not self._noticed:
            return
        state = session.state
        if session.overtaken or state is None:
            why = session.why
        elif state.waiting:
            why = f"{state.waiting} more can join"
        else:
            why = f"{', '.join(state.lost)} is lost"
        logger.warning("%s: %s; the workers will start again in a new round", self._name, why)

    def _tell_refill(self) -> None:
        known, self._refills = self._refills, self._session.refills
        if self._refills > known:
            logger.warning(
                "%s: the rendezvous backend had lost what it held of this run; this node puts it "
                "back. Running workers go on.",
                self._name,
            )

    def _tell_health(self) -> None:
        session = self._session
        healthy = session.failures == 0
        if healthy == self._healthy:
            return
        self._healthy = healthy
        if healthy:
            logger.info("%s: the rendezvous backend answers again", self._name)
        else:
            logger.warning(
                "%s: the rendezvous backend does not answer (%s). Running workers go on; the job "
                "fails if this lasts for %.0f s.",
                self._name,
                session.why,
                session.outage_timeout_seconds,
            )

    def _give_up(self) -> None:
        """Best effort: whoever called has its error already."""
        deadline = time.monotonic() + GIVE_UP_RETRY_SECONDS
        while not self._stopped:
            try:
                return self._driver.run(give_up(self._session))
            except Stopped:
                return
            except Exception as error:
                lost = isinstance(error, RendezvousConnectionError)
                if not lost or time.monotonic() >= deadline:
                    logger.debug("%s: could not withdraw: %s", self._name, error)
                    return
                threading.Event().wait(0.1)
