"""The mark before a document, and the age that it tells on a server that shows nobody its clock.

Theory. etcd's only clock is that of its leases. So who writes documents has one, which is never
kept alive, and notes in the document what it had left. What it has left later tells the age, to a
second. A new leader, and a restart, give leases all their time again: then it seems younger.

Agents that are to act together need more than whole seconds. So who beats hears of writes by a
watch, and counts by its own monotonic clock from then on. What the lease tells corrects a process
that was stopped and heard late.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from rdzv.backends.etcd_client import EtcdConnections
from rdzv.errors import RendezvousStateError

TOKENS_REMEMBERED = 16
HEARING_SECONDS_MAX = 0.1
"""So long a pulse waits for the watch to tell of a write that the pulse has seen."""
CHECKING_SECONDS_MAX = 1.0
MARK = re.compile(rb"(?P<write>[0-9a-f]{32}) (?P<lease>\d{1,19}) (?P<left_ms>\d{1,13})")


def document_of(connections: EtcdConnections, kv: Any) -> tuple[bytes, str]:
    """The document and its token of what is under its key. Raises ``RendezvousStateError``."""
    mark, _, document = kv.value.partition(b"\n")
    if not MARK.fullmatch(mark):
        raise foreign(connections, "a document")
    return document, f"{kv.mod_revision}:{mark.decode()}"


def token_of(kv: Any) -> str:
    """The token of the document whose mark this is."""
    return f"{kv.mod_revision}:{kv.value.decode('ascii', 'replace')}"


def foreign(connections: EtcdConnections, what: str) -> RendezvousStateError:
    """The error about something that is not ours."""
    return RendezvousStateError(
        f"etcd at {connections.endpoint} holds {what} that rdzv has not written below "
        f"{connections.base.decode()}: see who else writes there, or use another key_prefix."
    )


@dataclass(frozen=True, slots=True)
class _Clock:
    lease: int
    seconds: int
    granted_at: float
    term: int
    """A leader that comes later gives the lease all its time again."""


class StateAges:
    """When documents were written, by this process's monotonic clock: for all its nodes that are in
    the same run."""

    def __init__(self) -> None:
        self._checking = threading.Lock()
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

    def clock(self, etcd: EtcdConnections) -> tuple[int, int]:
        """A lease of this process that nothing hangs on but a sign that it is there, and how many
        milliseconds it has left now. Raises ``RendezvousConnectionError``."""
        now = time.monotonic()
        with self._changed:
            clock = self._clock
        is_ours = clock is not None and clock.term == etcd.term
        if clock is None or not is_ours or now - clock.granted_at > clock.seconds / 2:
            lease, seconds = etcd.grant(etcd.options.lease_seconds)
            # From before the request: rather too much has passed than too little.
            clock = _Clock(lease, seconds, now, etcd.term)
            with self._changed:
                self._clock = clock
        return clock.lease, round((clock.seconds - (time.monotonic() - clock.granted_at)) * 1000)

    def forget_clock(self) -> None:
        """The lease of :meth:`clock` is gone, or has been given all its time again."""
        with self._changed:
            self._clock = None

    def age_seconds(self, etcd: EtcdConnections, kv: Any, *, thoroughly: bool) -> float:
        """The age of the document, the newest now, whose mark this is. Only ``thoroughly``
        corrects what was heard late; that costs a request for each document. Raises
        ``RendezvousConnectionError``, ``RendezvousStateError``."""
        mark = MARK.fullmatch(kv.value)
        if mark is None:
            raise foreign(etcd, "a version")
        token, revision = token_of(kv), kv.mod_revision
        with self._changed:
            if token not in self._heard and 0 < self._since_revision <= revision:
                self._changed.wait_for(lambda: token in self._heard, HEARING_SECONDS_MAX)
            heard_at = self._heard.get(token)
            checked_at = self._checked.get(token)
        if heard_at is not None and not thoroughly:
            return time.monotonic() - heard_at
        if checked_at is None:
            checked_at = self._check(etcd, token, int(mark["lease"]), int(mark["left_ms"]))
        if heard_at is None:
            # To the second, and rather too old: a closed run is not held up.
            return max(0.0, time.monotonic() - checked_at)
        # What is certain, even if it was heard late.
        return time.monotonic() - min(heard_at, checked_at + 1.0)

    def _check(self, etcd: EtcdConnections, token: str, lease: int, left_ms: int) -> float:
        """Since when the document is there at most, by its lease, which is rounded down."""
        # One asks for all; unless it takes long, as each has its own time.
        is_alone = self._checking.acquire(timeout=CHECKING_SECONDS_MAX)
        try:
            with self._changed:
                checked_at = self._checked.get(token)
            if checked_at is not None:
                return checked_at
            left = max(0, etcd.seconds_left(lease))
            checked_at = time.monotonic() - (left_ms / 1000 - left)
            with self._changed:
                self._checked[token] = checked_at
                while len(self._checked) > TOKENS_REMEMBERED:
                    self._checked.popitem(last=False)
            return checked_at
        finally:
            if is_alone:
                self._checking.release()
