"""One watch of a run's document for all of a process who wait for a change of it, or want to know
its age.

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

from rdzv.backends.etcd_age import StateAges, document_of, token_of
from rdzv.backends.etcd_channel import Pool
from rdzv.backends.etcd_client import WATCH_SECONDS_MAX, EtcdConnections
from rdzv.backends.etcd_operations import range_of
from rdzv.errors import RendezvousError

DOCUMENTS_SECONDS = 30.0
"""So long a watch is on the document, before it is renewed."""
PAUSE_SECONDS_FIRST, PAUSE_SECONDS_LAST = 0.1, 1.0
LOOK_SECONDS_MAX = 0.5
"""So long the first look of a watch is waited for: whoever wants it can look by itself."""

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


class DocumentWatch:
    """Watches by a thread, from the first call until it is closed; it closes the connections."""

    def __init__(self, connections: EtcdConnections) -> None:
        self.users = 0
        self.ages = StateAges()
        self._etcd = connections
        self._document, self._mark = connections.base + b"s", connections.base + b"v"
        self._changed = threading.Condition()
        self._news: News | None = None
        self._asked_at = 0.0
        """By ``time.monotonic()``: when the look was begun from which on the server tells; 0 while
        there is none."""
        self._failures = 0
        self._waiting_until = 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def wait(
        self, token: str | None, revision: int, seconds: float, is_left: Callable[[], bool]
    ) -> News | None:
        """The news, as soon as there are any to who knows that token; None after these seconds,
        or where the watch has failed or was closed, or this waiter has left: then look."""
        since = time.monotonic()
        with self._changed:
            self._waiting_until = max(self._waiting_until, since + seconds)
            self._start()
            failures = self._failures

            def is_over() -> bool:
                failed = self._failures != failures or self._is_closed or is_left()
                return failed or self._known(token, revision, since) is not None

            self._changed.wait_for(is_over, seconds)
            return self._known(token, revision, since)

    def look(self, is_left: Callable[[], bool]) -> News | None:
        """What is there now, as a watch sees that begins with a look; None where none begins, or
        not at once: then look."""
        with self._changed:
            # Not before: a watch that is renewed meanwhile has still the old one's news.
            since = time.monotonic()
            self._waiting_until = max(self._waiting_until, since + DOCUMENTS_SECONDS)
            self._start()
            failures = self._failures

            def is_over() -> bool:
                failed = self._failures != failures or self._is_closed or is_left()
                return failed or self._news is not None or 0 < self._asked_at < since

            self._changed.wait_for(is_over, LOOK_SECONDS_MAX)
            return self._news if self._asked_at >= since else None

    def listen(self) -> None:
        """Hear of writes from now on, if that is not so already."""
        with self._changed:
            self._start()

    def look_who_left(self) -> None:
        """One of those who wait may have left."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread. Never raises."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._etcd.close()

    def _known(self, token: str | None, revision: int, since: float) -> News | None:
        news = self._news
        return news if news is not None and news.is_new_to(token, revision, since) else None

    def _start(self) -> None:
        if self._thread is None and not self._is_closed:
            thread = threading.Thread(
                target=self._run, args=(self._etcd.closings,), name="rdzv-etcd-watch", daemon=True
            )
            thread.start()  # it may fail: the next who wants to hear tries again
            self._thread = thread

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
            if self._etcd.closings != closings:  # a look at that moment has opened them anew
                self._etcd.close()

    def _hear(self, tells_documents: bool, seconds: float, closings: int) -> None:
        etcd, looked = self._etcd, 0
        key = self._document if tells_documents else self._mark
        for event in etcd.watch(key, None, 0, seconds, puts=False, closings=closings):
            if isinstance(event, int):
                with self._changed:
                    asked_at = self._asked_at = time.monotonic()
                answer = etcd.read(etcd.get(key))
                looked = int(answer.header.revision)
                kvs = range_of(answer, 0).kvs
                self._saw(kvs[0] if kvs else None, looked, tells_documents, asked_at)
                self.ages.hears_from(looked + 1)
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
                found = document_of(self._etcd, kv)
            token = found[1] if found else token_of(kv)
        with self._changed:
            before = self._news
            self._news = News(revision, token, found, looked_at)
            self._changed.notify_all()
        # A renewed watch has missed a moment at most; of an older document nobody knows.
        is_recent = not looked_at or (before is not None and before.revision < revision)
        if token is not None and is_recent:
            self.ages.heard(token)

    def _lost(self) -> None:
        # What is written from here on would be heard late: the lease tells better.
        self.ages.hears_from(0)
        with self._changed:
            self._news, self._asked_at = None, 0.0
            self._failures += 1
            self._changed.notify_all()


_watches: Pool[DocumentWatch] = Pool()


class Follower:
    """One node's share in the watch of its run, from the first call on until ``connections`` are
    closed, and anew then."""

    def __init__(self, connections: EtcdConnections) -> None:
        self._etcd = connections
        self._lock = threading.Lock()
        self._held: DocumentWatch | None = None
        self._process = os.getpid()
        connections.when_closed(self._leave)

    @property
    def ages(self) -> StateAges:
        """What is known of when documents were written."""
        return self._watch(None).ages

    def wait(self, token: str | None, revision: int, seconds: float, closings: int) -> News | None:
        """The news, as soon as there are any to who knows that token; None after these seconds,
        or where the watch has failed: then look. ``closings``: of when the wait began. Raises
        ``RendezvousConnectionError`` if it was closed since."""
        watch = self._watch(closings)
        return watch.wait(token, revision, seconds, lambda: self._etcd.closings != closings)

    def look(self) -> News | None:
        """What is there now, where that can be told by the way; None where it is to be asked for.
        Raises ``RendezvousConnectionError`` if it was closed meanwhile."""
        closings = self._etcd.closings
        watch = self._watch(closings)
        return watch.look(lambda: self._etcd.closings != closings)

    def listen(self) -> None:
        """Hear of writes from now on, if that is not so already."""
        self._watch(None).listen()

    def _watch(self, closings: int | None) -> DocumentWatch:
        self._leave_after_fork()
        with self._lock:
            self._etcd.check_open(closings)
            if self._held is None:
                self._held = _watches.borrow(
                    self._etcd.key, lambda: DocumentWatch(self._etcd.twin())
                )
            return self._held

    def _leave_after_fork(self) -> None:
        if self._process != os.getpid():  # the thread is the parent's, and perhaps a lock
            self._lock, self._held, self._process = threading.Lock(), None, os.getpid()

    def _leave(self) -> None:
        self._leave_after_fork()
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            held.look_who_left()
            _watches.give_back(held)
