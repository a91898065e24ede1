"""A roster and a way to wait, made for backends that have only ``get_state`` and ``set_state``.

Theory. State and roster share the one document, in a frame of JSON:

* The *core's token* is the state's own version in the frame (a number and a random part), so a
  beat, which rewrites the frame, does not look like a change of state.
* Every write of the frame is a compare-and-set with the backend's own token, repeated against
  what it lost to, with jitter. A beat therefore costs O(nodes) bytes and may have to be repeated:
  ``BARE_NODES_MAX`` nodes are what this is good for.
* There is no clock to expire an entry by. Each entry counts its beats, and every observer judges
  by its own monotonic clock how long *it* has seen the counter stand still. An entry that it found
  at its first look and has not yet seen move is live but not ``proven``: it blocks a round and is
  no candidate. So the revision, which tells an observer to list again, moves with that, too.
* There is no age of the state either: a node acts on a change when it sees it.
"""

from __future__ import annotations

import base64
import json
import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.errors import RendezvousConnectionError, RendezvousStateError
from rdzv.ports import Entry, Listed, Pulse, Question, Roster, Token, Watch

BARE_NODES_MAX = 32
"""Nodes up to which a backend without a roster of its own is tested."""
WRITE_ATTEMPTS_MAX = 200
WRITE_BACK_OFF_SECONDS = 0.005
WRITE_BACK_OFF_MAX_SECONDS = 0.25
POLL_FIRST_SECONDS = 0.02
POLL_MAX_SECONDS = 1.0
FORGET_AFTER_TTLS = 3
"""An entry that stood still for this many of its lifetimes is taken out by the next announcer."""

_MAGIC = b"rdzv-frame1\n"


@dataclass(frozen=True, slots=True)
class _Row:
    data: bytes
    label: str
    ttl_seconds: float
    beats: int
    arrival: int
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class _Frame:
    state: bytes | None = None
    version: int = 0
    nonce: str = ""
    revision: int = 0
    rows: dict[str, _Row] = field(default_factory=dict)

    @property
    def token(self) -> Token | None:
        return None if self.state is None else (self.version, self.nonce)


@dataclass(slots=True)
class _Sighting:
    """What one observer has seen of one entry, by its own clock."""

    beats: int
    since: float
    proven: bool


class FramedBackend(RendezvousBackend, Roster):
    """A bare backend with a roster inside its document."""

    def __init__(
        self, backend: RendezvousBackend, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._lock = threading.Lock()
        self._sightings: dict[str, _Sighting] = {}
        self._has_looked = False
        self._own: set[str] = set()

    @property
    def name(self) -> str:
        """See base class."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        frame = self.look()
        return None if frame.state is None else (frame.state, frame.token)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        nonce = uuid.uuid4().hex[:12]

        def change(frame: _Frame) -> _Frame | None:
            if frame.token != token or frame.nonce == nonce:
                return None
            return replace(frame, state=state, version=frame.version + 1, nonce=nonce)

        frame = self._write(change)
        if frame.state is None:
            return None
        return frame.state, frame.token, frame.nonce == nonce

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        """See base class."""

        def change(frame: _Frame) -> _Frame:
            rows = self._without_forgotten(frame.rows)
            old = rows.pop(entry.node_id, None)
            revision = frame.revision + 1
            arrival, beats = revision, 1
            if old is not None:
                beats = old.beats + 1
                arrival = revision if old.withdrawn else old.arrival
            rows[entry.node_id] = _Row(entry.data, entry.round_label, ttl_seconds, beats, arrival)
            return replace(frame, rows=rows, revision=revision)

        self._own.add(entry.node_id)
        return self._pulse(self._write(change), entry.node_id, question)

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        """See base class."""

        def change(frame: _Frame) -> _Frame | None:
            row = frame.rows.get(node_id)
            if row is None or row.withdrawn:
                return None
            beaten = replace(row, beats=row.beats + 1, ttl_seconds=ttl_seconds)
            return replace(frame, rows={**frame.rows, node_id: beaten})

        return self._pulse(self._write(change), node_id, question)

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        """See base class."""

        def change(frame: _Frame) -> _Frame:
            revision = frame.revision + 1
            row = _Row(b"", "", ttl_seconds, 0, revision, withdrawn=True)
            return replace(frame, rows={**frame.rows, node_id: row}, revision=revision)

        self._write(change)

    def entries(self) -> list[Listed]:
        """See base class."""
        frame = self.look()
        listed = []
        for node_id, row in sorted(
            frame.rows.items(), key=lambda item: (item[1].withdrawn, item[1].arrival)
        ):
            if row.withdrawn or self._is_live(node_id, row):
                entry = Entry(node_id, row.data, row.label)
                proven = self._is_proven(node_id)
                listed.append(Listed(entry, withdrawn=row.withdrawn, proven=proven))
        return listed

    def revision_of(self, frame: _Frame) -> Any:
        """The roster's revision as this observer sees it. It holds who is live, for one entry may
        move again in the moment in which another one stands still for too long."""
        live = {key for key, row in frame.rows.items() if self._is_live(key, row)}
        return frame.revision, frozenset(filter(self._is_proven, live))

    def look(self) -> _Frame:
        """The frame as it is now, with a note of which entries have moved."""
        answer = self._backend.get_state()
        frame = _Frame() if answer is None else _decode_frame(answer[0])
        self._see(frame)
        return frame

    def _write(self, change: Callable[[_Frame], _Frame | None]) -> _Frame:
        """Apply a change until it has been written or need not be; the frame that then holds."""
        answer: Any = self._backend.get_state()
        for attempt in range(WRITE_ATTEMPTS_MAX):
            frame = _Frame() if answer is None else _decode_frame(answer[0])
            changed = change(frame)
            if changed is None:
                self._see(frame)
                return frame
            written = self._backend.set_state(
                _encode_frame(changed), None if answer is None else answer[1]
            )
            if written is not None and written[2]:
                self._see(changed)
                return changed
            most = min(WRITE_BACK_OFF_MAX_SECONDS, WRITE_BACK_OFF_SECONDS * 2 ** min(attempt, 8))
            threading.Event().wait(random.uniform(0.0, most))
            answer = written if written is not None else self._backend.get_state()
        raise RendezvousConnectionError(
            f"The document was changed by others {WRITE_ATTEMPTS_MAX} times in a row. A backend "
            f"without a roster of its own serves up to {BARE_NODES_MAX} nodes."
        )

    def _see(self, frame: _Frame) -> None:
        now = self._clock()
        with self._lock:
            for node_id, row in frame.rows.items():
                seen = self._sightings.get(node_id)
                if seen is None:
                    # What was not there at the last look has been written since.
                    sighting = _Sighting(row.beats, now, proven=self._has_looked)
                    self._sightings[node_id] = sighting
                elif seen.beats != row.beats:
                    self._sightings[node_id] = _Sighting(row.beats, now, proven=True)
            for node_id in set(self._sightings) - set(frame.rows):
                del self._sightings[node_id]
            self._has_looked = True

    def _stood_still_seconds(self, node_id: str) -> float:
        with self._lock:
            seen = self._sightings.get(node_id)
            return 0.0 if seen is None else self._clock() - seen.since

    def _is_proven(self, node_id: str) -> bool:
        with self._lock:
            seen = self._sightings.get(node_id)
            return node_id in self._own or (seen is not None and seen.proven)

    def _is_live(self, node_id: str, row: _Row) -> bool:
        return not row.withdrawn and self._stood_still_seconds(node_id) < row.ttl_seconds

    def _without_forgotten(self, rows: dict[str, _Row]) -> dict[str, _Row]:
        return {
            node_id: row
            for node_id, row in rows.items()
            if self._stood_still_seconds(node_id) < FORGET_AFTER_TTLS * row.ttl_seconds
        }

    def _pulse(self, frame: _Frame, node_id: str, question: Question) -> Pulse:
        live = {key: row for key, row in frame.rows.items() if self._is_live(key, row)}
        label = question.round_label
        return Pulse(
            token=frame.token,
            live=len(live),
            revision=self.revision_of(frame),
            present=node_id in live,
            peer_live=question.peer_id in live,
            confirmed=sum(row.label == label for row in live.values()) if label else 0,
        )


class PollingWatch(Watch):
    """Waiting by asking again, with pauses that grow from ``POLL_FIRST_SECONDS`` to
    ``POLL_MAX_SECONDS``."""

    def __init__(
        self, backend: RendezvousBackend, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._clock = clock

    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: Any = None
    ) -> tuple[bytes, Token] | None:
        """See base class. Where the roster's revision cannot be seen without a beat, it returns
        after one pause, for the caller to ask."""
        deadline = self._clock() + timeout_seconds
        pause = POLL_FIRST_SECONDS
        while True:
            found, now_revision = self._ask()
            if found is not None and found[1] != token:
                return found
            if revision is not None and now_revision not in (None, revision):
                return None
            left = deadline - self._clock()
            if left <= 0:
                return None
            threading.Event().wait(min(left, pause * random.uniform(0.75, 1.0)))
            if revision is not None and now_revision is None:
                return None
            pause = min(POLL_MAX_SECONDS, pause * 1.5)

    def _ask(self) -> tuple[tuple[bytes, Token] | None, Any]:
        if isinstance(self._backend, FramedBackend):
            frame = self._backend.look()
            found = None if frame.state is None else (frame.state, frame.token)
            return found, self._backend.revision_of(frame)
        return self._backend.get_state(), None


def _encode_frame(frame: _Frame) -> bytes:
    rows = {
        node_id: [
            base64.b64encode(row.data).decode("ascii"),
            row.label,
            row.ttl_seconds,
            row.beats,
            row.arrival,
            row.withdrawn,
        ]
        for node_id, row in frame.rows.items()
    }
    state = None if frame.state is None else base64.b64encode(frame.state).decode("ascii")
    fields = {"s": state, "v": frame.version, "n": frame.nonce, "r": frame.revision, "e": rows}
    return _MAGIC + json.dumps(fields, separators=(",", ":")).encode()


def _decode_frame(data: bytes) -> _Frame:
    if not data.startswith(_MAGIC):
        raise RendezvousStateError(
            f"{len(data)} bytes beginning with {data[:16]!r} were not written by rdzv. They are "
            "left as they are: use another run id, or delete them if nothing else needs them."
        )
    try:
        fields = json.loads(data[len(_MAGIC) :])
        rows = {
            str(node_id): _Row(
                base64.b64decode(row[0], validate=True),
                str(row[1]),
                float(row[2]),
                int(row[3]),
                int(row[4]),
                bool(row[5]),
            )
            for node_id, row in fields["e"].items()
        }
        state = fields["s"]
        return _Frame(
            state=None if state is None else base64.b64decode(state, validate=True),
            version=int(fields["v"]),
            nonce=str(fields["n"]),
            revision=int(fields["r"]),
            rows=rows,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise RendezvousStateError(
            f"A damaged document of {len(data)} bytes ({type(error).__name__}: {error}). It is "
            "left as it is: use another run id, or delete it once no node of the run is alive."
        ) from error
