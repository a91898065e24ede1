"""One watch of a run's document for all who wait for a change of it, or want to know its age.

Theory. A watch and a look are made once, and then the server tells of every write. So a node that
waits again and again, as it does while a round forms, asks for nothing. The look comes after the
watch, so nothing is missed; what a member tells that lags behind the look is passed over.

A watch that begins while somebody waits is on the document itself, which is told then. Who only
runs needs no documents, which grow with the nodes: at its next renewal the watch goes over to the
mark. Who waits again before another renewal looks at each change.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rdzv.backends.etcd_age import StateAges
from rdzv.backends.etcd_client import WATCH_SECONDS_MAX, EtcdConnections
from rdzv.backends.etcd_operations import range_of
from rdzv.errors import RendezvousError

DOCUMENTS_SECONDS = 30.0
"""So long a watch is on the document, before it is renewed."""
PAUSE_SECONDS_FIRST, PAUSE_SECONDS_LAST = 0.1, 1.0

Found = tuple[bytes, str]


@dataclass(frozen=True, slots=True)
class News:
    """What was seen last: the document, or that there is none."""

    revision: int
    """Of the server, when it was written, was removed, or was not there."""
    token: str | None
    found: Found | None
    """None too where only the mark was told."""
    looked_at: float = 0.0
    """By ``time.monotonic()``: when it was asked for. 0 where the server told."""

    def is_new_to(self, token: str | None, revision: int, since: float) -> bool:
        """Whether somebody who knew that token, of that revision, has not seen it.

        What is older than the token is a member's that lags behind, or was heard before the token
        was; except where the server was asked since, and has lost its data.
        """
        return self.token != token and (self.revision > revision or self.looked_at >= since)


class Follower:
    """Watches by a thread, from the first call until the connections are closed.

    ``told`` makes document and token of a pair of the document's key, ``token_of`` the token of
    one of the mark's.
    """

    def __init__(
        self,
        connections: EtcdConnections,
        keys: tuple[bytes, bytes],
        told: Callable[[Any], Found],
        token_of: Callable[[Any], str],
        ages: StateAges,
    ) -> None:
        self._etcd, self._told, self._token_of, self._ages = connections, told, token_of, ages
        self._document, self._mark = keys
        self._changed = threading.Condition()
        self._news: News | None = None
        self._failures = 0
        self._waiting_until = 0.0
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def wait(self, token: str | None, revision: int, seconds: float, closings: int) -> News | None:
        """The news, as soon as there are any to who knows that token; None after these seconds,
        or where the watch has failed: then look. ``closings``: of when the wait began."""
        since = time.monotonic()
        with self._changed:
            self._waiting_until = max(self._waiting_until, since + seconds)
            self._start()
            failures = self._failures

            def is_over() -> bool:
                failed = self._failures != failures or self._etcd.closings != closings
                return failed or self._known(token, revision, since) is not None

            self._changed.wait_for(is_over, seconds)
            return self._known(token, revision, since)

    def listen(self) -> None:
        """Hear of writes from now on, if that is not so already."""
        with self._changed:
            self._start()

    def _known(self, token: str | None, revision: int, since: float) -> News | None:
        news = self._news
        return news if news is not None and news.is_new_to(token, revision, since) else None

    def _start(self) -> None:
        is_there = self._thread is not None and self._process == os.getpid()
        if not is_there:
            self._process, self._news = os.getpid(), None
            self._thread = threading.Thread(
                target=self._run, args=(self._etcd.closings,), name="rdzv-etcd-watch", daemon=True
            )
            self._thread.start()

    def _run(self, closings: int) -> None:
        pause_seconds = PAUSE_SECONDS_FIRST
        try:
            while self._etcd.closings == closings:
                begun, seconds = time.monotonic(), WATCH_SECONDS_MAX
                tells_documents = begun < self._waiting_until
                if tells_documents:
                    seconds = min(seconds, DOCUMENTS_SECONDS)
                has_ended = False
                with suppress(RendezvousError):
                    self._hear(tells_documents, seconds, closings)
                    has_ended = time.monotonic() - begun > seconds / 2
                if has_ended:
                    # By its own deadline: whoever paused now would hear of a change later than
                    # its peers do.
                    pause_seconds = PAUSE_SECONDS_FIRST
                    continue
                self._lost()
                if self._etcd.closings == closings:
                    time.sleep(pause_seconds * random.uniform(0.5, 1.0))
                    pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_LAST)
        finally:
            with self._changed:
                self._thread = None
            self._lost()

    def _hear(self, tells_documents: bool, seconds: float, closings: int) -> None:
        etcd, looked = self._etcd, 0
        key = self._document if tells_documents else self._mark
        for event in etcd.watch(key, None, 0, seconds, puts=False, closings=closings):
            if isinstance(event, int):
                asked_at = time.monotonic()
                answer = etcd.read(etcd.get(key))
                looked = int(answer.header.revision)
                kvs = range_of(answer, 0).kvs
                self._saw(kvs[0] if kvs else None, looked, tells_documents, asked_at)
                self._ages.hears_from(looked + 1)
            elif event.kv.mod_revision > looked:
                is_put = event.type == event.PUT
                kv = event.kv if is_put else None
                self._saw(kv, event.kv.mod_revision, tells_documents)

    def _saw(self, kv: Any, revision: int, tells_documents: bool, looked_at: float = 0.0) -> None:
        found: Found | None = None
        token: str | None = None
        if kv is not None:
            revision = kv.mod_revision
            if tells_documents:
                found = self._told(kv)
            token = found[1] if found else self._token_of(kv)
        with self._changed:
            before = self._news
            self._news = News(revision, token, found, looked_at)
            self._changed.notify_all()
        # A renewed watch has missed a moment at most; of an older document nobody knows.
        is_recent = not looked_at or (before is not None and before.revision < revision)
        if token is not None and is_recent:
            self._ages.heard(token)

    def _lost(self) -> None:
        # What is written from here on would be heard late: the lease tells better.
        self._ages.hears_from(0)
        with self._changed:
            self._news = None
            self._failures += 1
            self._changed.notify_all()
