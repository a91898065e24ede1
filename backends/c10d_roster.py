"""The roster of a run in a torch store, which has no clock and expires nothing.

Theory. Each node has two keys of its own: an *entry*, changed by compare-and-set, and a *beat*,
which it alone rewrites. An observer judges a node by how long its own monotonic clock has seen the
beat stand still, in unbroken contact with the store; whoever finds that it stood still for the time
that the node itself has set marks the entry as expired, for all. One counter, the *tally*, holds
the revision and the number of live entries, another for each round how many have confirmed it: so
a pulse costs the same whatever the number of nodes. A log of arrivals is what a listing reads.

Somebody has to watch them all. Up to ``SMALL`` nodes everybody does. Beyond that three *keepers*
do, with each of their beats; all others watch the keepers and take the place of one that is lost.
Whoever lists becomes a keeper, so the nodes that act on a loss are those that watch for it.

A writer that dies between an entry and the tally leaves a wrong count. Keepers put it right.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rdzv.backends.c10d_chain import ABSENT, ATTEMPTS_MAX
from rdzv.errors import RendezvousConnectionError, RendezvousStateError
from rdzv.ports import Entry, Listed

SMALL = 8
KEEPERS = 3
REVISION = 1 << 20
"""The tally counts live entries below this number, and revisions in multiples of it."""
HEAL_SECONDS = 2.0
"""A count that is wrong for so long is not merely on its way."""
SILENCE_OF_TTL = 0.6
"""A silence of this part of an entry's life breaks contact."""
LOG_SLACK = 64

LIVE, WITHDRAWN, EXPIRED = "live", "withdrawn", "expired"
NO_ENTRY = Entry("", b"")


@dataclass(frozen=True, slots=True)
class Record:
    """A node's entry as it is stored."""

    raw: bytes
    status: str = EXPIRED
    entry: Entry = NO_ENTRY
    arrival: str = ""

    def says(self, status: str, entry: Entry, arrival: str) -> bool:
        """Whether it says just that, whoever has written it."""
        return (self.status, self.entry, self.arrival) == (status, entry, arrival)

    @property
    def live(self) -> bool:
        return self.status == LIVE

    @property
    def label(self) -> str:
        """The round that it counts for."""
        return self.entry.round_label if self.live else ""


NO_RECORD = Record(b"")


@dataclass(slots=True)
class _Sighting:
    beat: bytes
    since: float


class RosterView:
    """What one connection has seen of the roster; used by one thread at a time."""

    def __init__(self, store: Callable[[], Any], base: str, life: bytes) -> None:
        self._store = store
        self._base = base
        self.life = life
        self.known: set[str] = set()
        """Keys that were there: nobody deletes them in this life."""
        self.own: dict[str, tuple[bytes, float]] = {}
        """The nodes that beat here: their last beat, and when."""
        self._unique = uuid.uuid4().hex[:12]
        self._beats = 0
        self._sightings: dict[str, _Sighting] = {}
        self._contact_since = self._last_contact = time.monotonic()
        self.expiries = 0
        """How many entries were marked as expired here."""
        self.counted: int | None = None
        """The tally as the last change made it."""
        self._rows: dict[str, Record] = {}
        self._rows_tally = -1
        self._wrong_since: tuple[int, float] | None = None

    # Keys

    def key(self, kind: str, name: str) -> str:
        """The key of a node or round, whatever characters its name has."""
        return self._base + kind + "/" + digest(name)

    def are_there(self, keys: Iterable[str]) -> bool:
        """Whether keys are there that are never deleted, so that reading does not wait."""
        new = [key for key in keys if key not in self.known]
        if new and not self._store().check(new):
            return False
        self.known.update(new)
        return True

    def counter(self, label: str) -> str:
        """The key of the counter of a round; it is there after this."""
        key = self.key("confirmed", label)
        if key not in self.known:
            self._store().add(key, 0)
            self.known.add(key)
        return key

    # Contact

    def touch(self) -> None:
        """The store has answered just now."""
        now = time.monotonic()
        shortest = min((ttl_of(beat) for beat, _ in self.own.values()), default=15.0)
        if now - self._last_contact > max(0.5, SILENCE_OF_TTL * shortest):
            self._contact_since = now
        self._last_contact = now

    def left_seconds(self, key: str, beat: bytes) -> float:
        """For how long the node of this entry's key counts as live if it does not beat again."""
        now, seen = time.monotonic(), self._sightings.get(key)
        if seen is None or seen.beat != beat:
            seen = self._sightings[key] = _Sighting(beat, now)
        since = max(seen.since, self._contact_since)
        own = self.own.get(key)
        if own is not None and own[0] == beat:
            since = own[1]
        return ttl_of(beat) - (now - since)

    # Changes

    def beaten(self, key: str, ttl_seconds: float) -> None:
        """Write a beat for the node of this entry's key."""
        self._beats += 1
        beat = f"{self._unique}.{self._beats} {max(1, round(ttl_seconds * 1000))}".encode()
        self._store().set(self.beat_key(key), beat)
        self.known.add(self.beat_key(key))
        now = time.monotonic()
        self.own[key] = (beat, now)
        self._sightings[key] = _Sighting(beat, now)

    def beat_key(self, key: str) -> str:
        """The key of the beat that belongs to an entry's key."""
        return key.replace(f"{self._base}entry/", f"{self._base}beat/")

    def is_overdue(self, key: str) -> bool:
        """Whether this node's own beat came too late, as far as is known here."""
        own = self.own.get(key)
        return own is not None and time.monotonic() - own[1] >= ttl_of(own[0])

    def record(self, key: str) -> Record:
        """What is stored under an entry's key."""
        value: bytes = self._store().compare_set(key, ABSENT, ABSENT)
        return NO_RECORD if value == ABSENT else parsed(value)

    def replace(self, key: str, old: Record, new: Record) -> tuple[bool, Record]:
        """Put ``new`` in the place of ``old``, with all that is counted. Tells whether it did,
        and what is there now."""
        store = self._store()
        value: bytes = store.compare_set(key, old.raw, new.raw)
        if value != new.raw:
            return False, NO_RECORD if value in (ABSENT, b"") else parsed(value)
        self.known.add(key)
        if new.label != old.label:
            if new.label:
                store.add(self.counter(new.label), 1)
            if old.label:
                store.add(self.counter(old.label), -1)
        if new.arrival != old.arrival:
            self._log(f"{key.rpartition('/')[2]}.{new.arrival},".encode())
        self.counted = int(store.add(self._base + "tally", REVISION + new.live - old.live))
        return True, new

    def _log(self, line: bytes) -> None:
        store, key = self._store(), self._base + "log"
        if store.has_extended_api():
            store.append(key, line)
            return
        # What FileStore calls append loses lines. No two are equal, so this does not.
        log: bytes = store.get(key)
        while (found := store.compare_set(key, log, log + line)) != log + line:
            log = found

    def settle(self, key: str) -> None:
        """Count anew after a change of this entry of which it is not known how far it came."""
        row, store = self.record(key), self._store()
        if row == NO_RECORD:
            return
        self._log(f"{key.rpartition('/')[2]}.{row.arrival},".encode())
        for _ in range(ATTEMPTS_MAX):
            tally = int(store.get(self._base + "tally"))
            self._rows_tally = -1
            rows = self.rows(tally).values()
            for label in {row.label for row in rows if row.label}:
                counter = self.counter(label)
                wrong = store.get(counter)
                right = sum(row.label == label for row in rows)
                store.compare_set(counter, wrong, str(right).encode())
            new = (tally // REVISION + 1) * REVISION + sum(row.live for row in rows)
            if self._recount(tally, new):
                return

    def _recount(self, tally: int, new: int) -> bool:
        old, wanted = str(tally).encode(), str(new).encode()
        return bool(self._store().compare_set(self._base + "tally", old, wanted) == wanted)

    def announce(self, entry: Entry, ttl_seconds: float) -> None:
        """Let the entry be there and live."""
        key = self.key("entry", entry.node_id)
        overdue = self.is_overdue(key)
        self.beaten(key, ttl_seconds)
        found = self._rows.get(key, NO_RECORD)
        for _ in range(ATTEMPTS_MAX):
            arrival = found.arrival if found.live and not overdue else _arrival()
            if found.says(LIVE, entry, arrival) and self.record(key) == found:
                return
            new = made(LIVE, entry, arrival)
            done, found = self.replace(key, found, new)
            if done:
                self._rows[key] = new
                return
        raise RendezvousConnectionError(f"the entry of {entry.node_id} is changed all the time")

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        """Leave a tombstone."""
        key = self.key("entry", node_id)
        self.beaten(key, ttl_seconds)
        del self.own[key]
        found = self._rows.get(key, NO_RECORD)
        for _ in range(ATTEMPTS_MAX):
            new = made(WITHDRAWN, Entry(node_id, b""), found.arrival or _arrival())
            done, found = self.replace(key, found, new)
            if done:
                self._rows[key] = new
                return
        raise RendezvousConnectionError(f"the entry of {node_id} is changed all the time")

    def expire(self, key: str, old: Record) -> None:
        """Mark an entry whose node was not heard of, unless it has changed meanwhile."""
        self.expiries += 1
        new = made(EXPIRED, old.entry, old.arrival)
        done, now = self.replace(key, old, new)
        self._rows[key] = new if done else now

    # Listing

    def rows(self, tally: int) -> dict[str, Record]:
        """All entries by key, in the order of arrival, as of a tally that was just read."""
        if tally == self._rows_tally:
            return self._rows
        log: bytes = self._store().get(self._base + "log")
        places: dict[tuple[str, str], int] = {}
        for line in log.decode("ascii", "replace").split(","):
            name, dot, arrival = line.partition(".")
            if dot:
                places.setdefault((f"{self._base}entry/{name}", arrival), len(places))
        keys = list(dict.fromkeys(key for key, _ in places))
        raws = self._store().multi_get(keys) if keys else []
        rows = [(key, parsed(raw)) for key, raw in zip(keys, raws, strict=True)]
        rows.sort(key=lambda row: places.get((row[0], row[1].arrival), len(places)))
        self._rows = dict(rows)
        self._rows_tally = tally
        self.known.update(keys)
        self.known.update(map(self.beat_key, keys))
        return self._rows

    def beats(self, rows: dict[str, Record]) -> dict[str, bytes]:
        """The beats of those that are not expired."""
        keys = [key for key, row in rows.items() if row.status != EXPIRED]
        values = self._store().multi_get([self.beat_key(key) for key in keys]) if keys else []
        return dict(zip(keys, values, strict=True))

    def census(self, tally: int) -> Census:
        """Everybody, judged now; marks as expired who is."""
        rows = self.rows(tally)
        beats = self.beats(rows)
        self.touch()
        listed, gone, left = [], [], []
        for key, row in list(rows.items()):
            if row.status == EXPIRED:
                continue
            seconds = self.left_seconds(key, beats[key])
            if seconds <= 0:
                if row.live:
                    self.expire(key, row)
            elif row.live:
                listed.append(Listed(row.entry))
                left.append(seconds)
            else:
                gone.append(Listed(Entry(row.entry.node_id, b""), withdrawn=True))
        self._heal(tally, rows, len(listed))
        self._prune(rows, beats)
        return Census([*listed, *gone], len(listed), min(left, default=None))

    def _heal(self, tally: int, rows: dict[str, Record], live: int) -> None:
        """Put a count right that has been wrong for longer than a change takes."""
        wrong, now = tally % REVISION, time.monotonic()
        if wrong == sum(row.live for row in rows.values()):
            self._wrong_since = None
        elif self._wrong_since is None or self._wrong_since[0] != tally:
            self._wrong_since = (tally, now)
        elif now - self._wrong_since[1] > HEAL_SECONDS:
            right = (tally // REVISION + 1) * REVISION + live
            self._recount(tally, right)
            self._wrong_since = None

    def _prune(self, rows: dict[str, Record], beats: dict[str, bytes]) -> None:
        """Take the forgotten out of the log of arrivals, once they are most of it."""
        kept = {
            key: row
            for key, row in rows.items()
            if row.live or (row.status == WITHDRAWN and self.left_seconds(key, beats[key]) > 0)
        }
        if len(rows) <= 2 * len(kept) + LOG_SLACK:
            return
        log: bytes = self._store().get(self._base + "log")
        digests = {key.rpartition("/")[2].encode() for key in kept}
        chunks = [one for one in log.split(b",") if one.partition(b".")[0] in digests]
        self._store().compare_set(
            self._base + "log", log, b"".join(one + b"," for one in chunks) or b","
        )

    # Keepers

    def keeps(self, seats: bytes, live: int) -> bool:
        """Whether a node that beats here is to watch all others. Takes the seat of a keeper that
        is lost, or one that is free."""
        if live <= SMALL:
            return True
        mine, keepers = list(self.own), seats.decode().split()
        if any(key in keepers for key in mine):
            return True
        if not mine:
            return False
        lost = [key for key in keepers if not self._is_there(key)]
        if len(keepers) - len(lost) >= KEEPERS:
            return False
        return self._sit(seats, [*(key for key in keepers if key not in lost), mine[0]])

    def claim(self, seats: bytes) -> None:
        """Become a keeper in the place of the one that has been it for longest."""
        mine, keepers = list(self.own), seats.decode().split()
        if mine and not any(key in keepers for key in mine):
            self._sit(seats, [*keepers[-KEEPERS + 1 :], mine[0]])

    def _sit(self, old: bytes, keepers: list[str]) -> bool:
        new = " ".join(keepers).encode()
        return bool(self._store().compare_set(self._base + "seats", old, new) == new)

    def _is_there(self, key: str) -> bool:
        if not self.are_there([key, self.beat_key(key)]):
            return False
        raw, beat = self._store().multi_get([key, self.beat_key(key)])
        row = parsed(raw)
        if row.live and self.left_seconds(key, beat) <= 0:
            self.expire(key, row)
            return False
        return row.live


@dataclass(frozen=True, slots=True)
class Census:
    """Everybody, as judged at one moment."""

    listed: list[Listed]
    live: int
    next_expiry_seconds: float | None


def digest(name: str) -> str:
    """A text of any characters as a part of a key."""
    raw = name.encode("utf-8", "surrogatepass")
    return hashlib.sha256(raw).hexdigest()[:32]


def made(status: str, entry: Entry, arrival: str) -> Record:
    """The record of an entry; ``arrival`` tells one life of it from the next."""
    # Of two who write the same at once, one alone has done it: no two writes are equal.
    fields = [status, entry.node_id, entry.round_label, arrival, uuid.uuid4().hex[:12]]
    line = json.dumps(fields, separators=(",", ":"))
    return Record(line.encode() + b"\n" + entry.data, status, entry, arrival)


def parsed(raw: bytes) -> Record:
    """A record as it was stored. Raises ``RendezvousStateError`` for anything else."""
    line, _, data = raw.partition(b"\n")
    try:
        status, node_id, label, arrival, _ = json.loads(line)
    except (ValueError, TypeError) as error:
        raise RendezvousStateError(
            f"A roster entry of {len(raw)} bytes was not written by rdzv ({raw[:24]!r})."
        ) from error
    return Record(raw, status, Entry(node_id, data, label), arrival)


def ttl_of(beat: bytes) -> float:
    """How long a node lives after this beat, in seconds."""
    try:
        return int(beat.rpartition(b" ")[2]) / 1000
    except ValueError as error:
        raise RendezvousStateError(f"A beat was not written by rdzv ({beat[:24]!r}).") from error


def _arrival() -> str:
    return uuid.uuid4().hex[:12]
