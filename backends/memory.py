"""The reference backend: every node in one process, in the fewest lines.

What :mod:`rdzv.ports` says in words, this module says in code. Nodes meet by sharing one
:class:`MemorySpace`. Its lock makes every call one atomic step; tokens and revisions are drawn
from one counter that even :meth:`MemorySpace.wipe` does not set back, so none is used twice.
Nothing blocks but :meth:`MemoryBackend.wait_for_change`, and time is what ``clock`` says.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.ports import Entry, Listed, Pulse, Question, Roster, Token, Watch


@dataclass(slots=True)
class _Document:
    state: bytes
    token: str
    written_at: float


@dataclass(slots=True)
class _Row:
    entry: Entry
    expires_at: float
    arrival: int
    withdrawn: bool = False


@dataclass(slots=True)
class _Run:
    revision: int
    document: _Document | None = None
    rows: dict[str, _Row] = field(default_factory=dict)


class MemorySpace:
    """What the backends of all nodes share.

    ``clock`` is the space's own clock in seconds: ages and expiry are measured by it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self._runs: dict[str, _Run] = {}
        self._counter = itertools.count(1)

    def next_number(self) -> int:
        """A number that this space has never drawn before."""
        return next(self._counter)

    def run(self, run_id: str) -> _Run:
        """The run's records, made empty where there are none; the caller holds ``changed``."""
        if run_id not in self._runs:
            self._runs[run_id] = _Run(revision=self.next_number())
        return self._runs[run_id]

    def wipe(self) -> None:
        """Lose everything, as a server does that restarts without its data."""
        with self.changed:
            self._runs.clear()
            self.changed.notify_all()


class MemoryBackend(RendezvousBackend, Roster, Watch):
    """One run in a :class:`MemorySpace`. Backends of one space and run id see each other."""

    def __init__(self, space: MemorySpace, run_id: str) -> None:
        self._space = space
        self._run_id = run_id

    @property
    def name(self) -> str:
        return "memory"

    @property
    def _run(self) -> _Run:
        return self._space.run(self._run_id)

    def get_state(self) -> tuple[bytes, Token] | None:
        with self._space.changed:
            document = self._run.document
            return None if document is None else (document.state, document.token)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        with self._space.changed:
            document = self._run.document
            current = None if document is None else document.token
            # A token that was never ours is no error: the write has lost, that is all.
            if current != token:
                return None if document is None else (document.state, document.token, False)
            token = f"memory-{self._space.next_number()}"
            self._run.document = _Document(bytes(state), token, self._space.clock())
            self._space.changed.notify_all()
            return state, token, True

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            row = self._live(entry.node_id)
            if row is None:
                row = _Row(entry, self._space.clock() + ttl_seconds, self._space.next_number())
                self._run.rows[entry.node_id] = row
                self._changed()
            elif row.entry != entry:
                row.entry = entry
                self._changed()
            row.expires_at = self._space.clock() + ttl_seconds
            return self._pulse(True, question)

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            row = self._live(node_id)
            if row is not None:
                row.expires_at = self._space.clock() + ttl_seconds
            return self._pulse(row is not None, question)

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        with self._space.changed:
            expires_at = self._space.clock() + ttl_seconds
            tombstone = _Row(Entry(node_id, b""), expires_at, self._space.next_number(), True)
            self._run.rows[node_id] = tombstone
            self._changed()

    def entries(self) -> list[Listed]:
        with self._space.changed:
            now = self._space.clock()
            rows = [row for row in self._run.rows.values() if row.expires_at > now]
            rows.sort(key=lambda row: (row.withdrawn, row.arrival))
            return [Listed(row.entry, row.withdrawn) for row in rows]

    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: object = None
    ) -> tuple[bytes, Token] | None:
        def is_changed() -> bool:
            document = self._run.document
            current = None if document is None else document.token
            return current != token or revision not in (None, self._run.revision)

        with self._space.changed:
            self._space.changed.wait_for(is_changed, max(0.0, timeout_seconds))
            found = self.get_state()
            return None if found is None or found[1] == token else found

    def _live(self, node_id: str) -> _Row | None:
        row = self._run.rows.get(node_id)
        if row is None or row.withdrawn or row.expires_at <= self._space.clock():
            return None
        return row

    def _changed(self) -> None:
        now, rows = self._space.clock(), self._run.rows
        for node_id in [node_id for node_id, row in rows.items() if row.expires_at < now]:
            del rows[node_id]
        self._run.revision = self._space.next_number()
        self._space.changed.notify_all()

    def _pulse(self, present: bool, question: Question) -> Pulse:
        now = self._space.clock()
        run, document = self._run, self._run.document
        rows = [row for row in run.rows.values() if not row.withdrawn and row.expires_at > now]
        live = [row.entry for row in rows]
        label = question.round_label
        return Pulse(
            token=None if document is None else document.token,
            live=len(live),
            revision=run.revision,
            present=present,
            peer_live=self._live(question.peer_id) is not None,
            confirmed=sum(entry.round_label == label for entry in live) if label else 0,
            state_age_seconds=None if document is None else now - document.written_at,
            next_expiry_seconds=min((row.expires_at - now for row in rows), default=None),
        )
