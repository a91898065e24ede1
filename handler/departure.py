"""Saying goodbye: an agent that ends takes its roster entry back, so that its peers learn at once.

Rules:

* At the end of the process every handler that was not shut down withdraws, within a bound.
* torch installs its signal handlers only after the first rendezvous. While ``next_rendezvous()``
  blocks the main thread and SIGTERM is at its default, a handler of ours withdraws, puts the
  default back and raises the signal again; any other disposition is left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

WITHDRAW_TIMEOUT_SECONDS = 2.0

_departures: weakref.WeakSet[Departure] = weakref.WeakSet()


class Departure:
    """What one handler still owes its peers. ``withdraw`` is called at most once."""

    def __init__(self, withdraw: Callable[[], None]) -> None:
        self._withdraw: Callable[[], None] | None = withdraw
        self._process_id = os.getpid()
        _departures.add(self)

    def cancel(self) -> None:
        """The handler has withdrawn by itself."""
        self._withdraw = None
        _departures.discard(self)

    def now(self) -> None:
        """Withdraw, and wait for it ``WITHDRAW_TIMEOUT_SECONDS`` at most. Never raises."""
        withdraw, self._withdraw = self._withdraw, None
        # The end of a forked child is not the end of the node.
        if withdraw is None or os.getpid() != self._process_id:
            return
        thread = threading.Thread(target=_quietly, args=(withdraw,), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # Late in the life of a process Python starts no thread any more.
            _quietly(withdraw)
            return
        thread.join(WITHDRAW_TIMEOUT_SECONDS)

    @contextlib.contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """While inside, SIGTERM at its default withdraws before it ends the process."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            yield
            return

        def leave(number: int, frame: FrameType | None) -> None:
            self.now()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is leave:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _quietly(withdraw: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        withdraw()


def _depart_all() -> None:
    for departure in list(_departures):
        departure.now()


atexit.register(_depart_all)
