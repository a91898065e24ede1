"""Being told of a change: a thread that waits for the key that the next change creates."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rdzv.backends import c10d_threads
from rdzv.backends.c10d_chain import count_bell, laid_out, ring

CLOSE_PAUSE_SECONDS = 0.05
"""How long a backend that closes hopes for the bell before it rings itself."""
BELL_SECONDS = 86_400.0
"""How long a connection waits for the bell: torch logs a warning when such a wait ends in vain."""
RECONNECT_PAUSE_SECONDS = 1.0
DEAF_SECONDS = 2.0
"""Who was not told for so long of what a request has shown is not connected any more."""


class Listener:
    """Waits for the bell below ``base`` on a connection of its own. ``tell`` is called with the
    token of each document that it hears of, and when it did."""

    def __init__(
        self,
        connect: Callable[[float], Any],
        base: str,
        request_seconds: float,
        tell: Callable[[str | None, float], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._connect, self._base, self._request_seconds = connect, base, request_seconds
        self._tell, self._on_failure = tell, on_failure
        self.closed = threading.Event()
        self.listening = False
        """Whether every change has been heard since the last look."""
        self._heard: str | None = None
        self._behind: tuple[str | None, float] | None = None
        """What was the last that was heard when a request showed something else, and when."""
        self._thread = c10d_threads.start(self._run, "rdzv-c10d-bell", self.closed.set)

    def join(self, seconds: float) -> None:
        """Wait for its end, and break its connection if there is none within ``seconds``."""
        self._thread.join(seconds)
        c10d_threads.end(self._thread, seconds)

    def knows(self, token: object) -> bool:
        """Whether every change has been heard, and this token was the last."""
        return self.listening and token is not None and token == self._heard

    def compare(self, token: str | None) -> None:
        """Take note of what a request has shown. A connection that a firewall has forgotten looks
        like one on which nothing happens: when it has missed something, it is broken and made
        anew."""
        now = time.monotonic()
        if not self.listening or token is None or token == self._heard:
            self._behind = None
        elif self._behind is None or self._behind[0] != self._heard:
            self._behind = (self._heard, now)
        elif now - self._behind[1] > DEAF_SECONDS:
            self._behind, self.listening = None, False
            c10d_threads.disconnect(self._thread)

    def wake_up(self, store: Any) -> None:
        """End the wait, unless the bell rings soon anyhow: so that a thousand nodes that close at
        once do not wake each other a million times."""
        self._thread.join(CLOSE_PAUSE_SECONDS)
        if self._thread.is_alive():
            ring(store, self._base)

    def _run(self) -> None:
        while not self.closed.is_set():
            try:
                self._follow()
            except Exception:
                # Whoever waits looks by himself now and then, and hears of what is wrong there.
                self.listening = False
                self._on_failure()
                self.closed.wait(RECONNECT_PAUSE_SECONDS * random.uniform(0.5, 1.0))

    def _follow(self) -> None:
        store = self._connect(self._request_seconds)
        store.set_timeout(timedelta(seconds=self._request_seconds))
        base, last, at = self._base, b"", time.monotonic()
        laid_out(store, base)
        following = 0
        while not self.closed.is_set():
            head, bell = store.multi_get([base + "head", base + "bell"])
            if int(bell) < following:
                # Whoever rang it counts it a moment later, unless it has died.
                count_bell(store, base, following)
            if head != last:
                parts = head.split(b" ")
                token = parts[1].decode() if len(parts) == 3 else None
                self._heard = token
                self._tell(token, at)
                last = head
            self.listening = True
            following = max(int(bell), following) + 1
            store.wait([f"{base}bell/{following}"], timedelta(seconds=BELL_SECONDS))
            at = time.monotonic()
