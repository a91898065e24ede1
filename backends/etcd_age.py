"""How old a document is, on a server that shows nobody its clock.

Theory. etcd's only clock is that of its leases. So every write of the document starts one, on
which nothing hangs, and what it has left tells the age of the document, in whole seconds and never
too old: a new leader, and a restart, give leases all their time again.

Agents that are to act together need more than whole seconds. So who beats hears of writes by a
watch, and counts by its own monotonic clock from then on. What the lease tells corrects a process
that was stopped and heard late.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rdzv.backends.etcd_client import WATCH_SECONDS_MAX, EtcdConnections
from rdzv.errors import RendezvousError

TOKENS_REMEMBERED = 16
HEARING_SECONDS_MAX = 0.1
"""So long a pulse waits for the watch to tell of a write that the pulse has seen."""
PAUSE_SECONDS = 1.0


class StateAges:
    """When documents were written, by this process's monotonic clock.

    ``token_of`` makes the token of the version key's value and revision.
    """

    def __init__(
        self, connections: EtcdConnections, key: bytes, token_of: Callable[[Any], str]
    ) -> None:
        self._etcd, self._key, self._token_of = connections, key, token_of
        self._changed = threading.Condition()
        self._heard: OrderedDict[str, float] = OrderedDict()
        self._checked: OrderedDict[str, float] = OrderedDict()
        self._since_revision = 0
        """From there on the watch tells of every write; 0 while there is none."""
        self._thread: threading.Thread | None = None

    def heard(self, token: str) -> None:
        """Somebody has just been told that this document was written."""
        with self._changed:
            self._heard.setdefault(token, time.monotonic())
            while len(self._heard) > TOKENS_REMEMBERED:
                self._heard.popitem(last=False)
            self._changed.notify_all()

    def age_seconds(self, token: str, revision: int, lease: int, granted_seconds: int) -> float:
        """The age of the document, the newest now. Raises ``RendezvousConnectionError``."""
        with self._changed:
            if token not in self._heard and 0 < self._since_revision <= revision:
                self._changed.wait_for(lambda: token in self._heard, HEARING_SECONDS_MAX)
            heard_at = self._heard.get(token)
            checked_at = self._checked.get(token)
        if checked_at is None:
            left = self._etcd.seconds_left(lease)
            # What is left was rounded down.
            passed = granted_seconds if left < 0 else max(0, granted_seconds - left - 1)
            checked_at = time.monotonic() - passed
            with self._changed:
                self._checked[token] = checked_at
                while len(self._checked) > TOKENS_REMEMBERED:
                    self._checked.popitem(last=False)
        written_at = checked_at if heard_at is None else min(heard_at, checked_at)
        return max(0.0, time.monotonic() - written_at)

    def listen(self) -> None:
        """Hear of writes from now on, if that is not so already."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(self._etcd.closings,), name="rdzv-etcd-age", daemon=True
                )
                self._thread.start()

    def _run(self, closings: int) -> None:
        """Until the connections are closed; the next who asks for an age begins anew."""
        try:
            while self._etcd.closings == closings:
                with suppress(RendezvousError):
                    self._hear()
                with self._changed:
                    # What is written from here on would be heard late: the lease tells better.
                    self._since_revision = 0
                if self._etcd.closings == closings:
                    time.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.0))
        finally:
            with self._changed:
                self._since_revision, self._thread = 0, None

    def _hear(self) -> None:
        answer = self._etcd.read(self._etcd.get(self._key, keys_only=True))
        since = answer.header.revision + 1
        with self._changed:
            self._since_revision = since
        for event in self._etcd.watch(self._key, None, since, WATCH_SECONDS_MAX, puts=True):
            if event is not None:
                self.heard(self._token_of(event.kv))
