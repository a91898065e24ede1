"""How old a document is, on a server that shows nobody its clock.

Theory. etcd's only clock is that of its leases. So who writes documents has one, which is never
kept alive, and notes in the document what it had left. What it has left later tells the age, to a
second. A new leader, and a restart, give leases all their time again: then it seems younger.

Agents that are to act together need more than whole seconds. So who beats hears of writes by a
watch, and counts by its own monotonic clock from then on. What the lease tells corrects a process
that was stopped and heard late.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from rdzv.backends.etcd_client import EtcdConnections

TOKENS_REMEMBERED = 16
HEARING_SECONDS_MAX = 0.1
"""So long a pulse waits for the watch to tell of a write that the pulse has seen."""


@dataclass(frozen=True, slots=True)
class _Clock:
    lease: int
    seconds: int
    granted_at: float
    term: int
    """A leader that comes later gives the lease all its time again."""


class StateAges:
    """When documents were written, by this process's monotonic clock."""

    def __init__(self, connections: EtcdConnections) -> None:
        self._etcd = connections
        self._changed = threading.Condition()
        self._heard: OrderedDict[str, float] = OrderedDict()
        self._checked: OrderedDict[str, float] = OrderedDict()
        self._clock: _Clock | None = None
        self._since_revision = 0

    def hears_from(self, revision: int) -> None:
        """From there on a watch tells of every write; 0 while there is none."""
        with self._changed:
            self._since_revision = revision

    def heard(self, token: str) -> None:
        """Somebody has just been told that this document was written."""
        with self._changed:
            self._heard.setdefault(token, time.monotonic())
            while len(self._heard) > TOKENS_REMEMBERED:
                self._heard.popitem(last=False)
            self._changed.notify_all()

    def clock(self) -> tuple[int, int]:
        """A lease of this process that nothing hangs on but a sign that it is there, and how many
        milliseconds it has left now. Raises ``RendezvousConnectionError``."""
        now = time.monotonic()
        with self._changed:
            clock = self._clock
        is_ours = clock is not None and clock.term == self._etcd.term
        if clock is None or not is_ours or now - clock.granted_at > clock.seconds / 2:
            lease, seconds = self._etcd.grant(self._etcd.options.lease_seconds)
            # From before the request: rather too much has passed than too little.
            clock = _Clock(lease, seconds, now, self._etcd.term)
            with self._changed:
                self._clock = clock
        return clock.lease, round((clock.seconds - (time.monotonic() - clock.granted_at)) * 1000)

    def forget_clock(self) -> None:
        """The lease of :meth:`clock` is gone, or has been given all its time again."""
        with self._changed:
            self._clock = None

    def age_seconds(
        self, token: str, revision: int, lease: int, left_ms: int, *, thoroughly: bool
    ) -> float:
        """The age of the document, the newest now, of which the lease had so much left when it
        was written. Only ``thoroughly`` corrects what was heard late; that costs a request for
        each document. Raises ``RendezvousConnectionError``."""
        with self._changed:
            if token not in self._heard and 0 < self._since_revision <= revision:
                self._changed.wait_for(lambda: token in self._heard, HEARING_SECONDS_MAX)
            heard_at = self._heard.get(token)
            checked_at = self._checked.get(token)
        if heard_at is not None and not thoroughly:
            return time.monotonic() - heard_at
        if checked_at is None:
            checked_at = self._check(token, lease, left_ms)
        if heard_at is None:
            # To the second, and rather too old: a closed run is not held up.
            return max(0.0, time.monotonic() - checked_at)
        # What is certain, even if it was heard late.
        return time.monotonic() - min(heard_at, checked_at + 1.0)

    def _check(self, token: str, lease: int, left_ms: int) -> float:
        """Since when the document is there at most, by its lease, which is rounded down."""
        left = max(0, self._etcd.seconds_left(lease))
        checked_at = time.monotonic() - (left_ms / 1000 - left)
        with self._changed:
            self._checked[token] = checked_at
            while len(self._checked) > TOKENS_REMEMBERED:
                self._checked.popitem(last=False)
        return checked_at
