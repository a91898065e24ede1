"""The vocabulary between the protocol and whoever performs it: effects, answers, and the session.

A protocol generator yields an :data:`Effect` and is resumed with its answer, or with
``RendezvousConnectionError`` when the backend could not be asked or its answer was lost. The
driver performs effects on a real backend, the simulation on a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rdzv.machine import Rules
from rdzv.ports import Entry, Pulse, Question, Token
from rdzv.state import Listing, RosterEntry, State


@dataclass(frozen=True, slots=True)
class Read:
    """Read the document; ``watches`` if its changes will be waited for. Answer: :class:`Found`."""

    watches: bool = False


@dataclass(frozen=True, slots=True)
class Swap:
    """Write ``state`` if the document's token is ``token`` (None: if there is no document).
    Answer: the :class:`Found` document after the attempt, ours or not."""

    state: State
    token: Token | None


@dataclass(frozen=True, slots=True)
class Announce:
    """Write the own roster entry. Answer: ``Pulse``."""

    entry: Entry
    question: Question


@dataclass(frozen=True, slots=True)
class Beat:
    """Keep the own entry alive, or merely ask. Answer: ``Pulse``."""

    node_id: str
    question: Question


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take the own entry back. Answer: None."""

    node_id: str


@dataclass(frozen=True, slots=True)
class ListRoster:
    """Answer: a pair of the present (``tuple[Present, ...]``) and the withdrawn ids
    (``frozenset[str]``)."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Answer: the :class:`Found` document if its token is another one, else None, at the latest
    after ``timeout_seconds``. ``why`` is what a person would be told."""

    token: Token | None
    revision: Any
    timeout_seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for ``seconds``. Answer: None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Prepare:
    """This node is about to confirm the proposed round of ``state``, as its rank 0: begin what the
    others will need of it. Answer, well within a keep-alive interval: the port at which this node
    serves the round's workers by then, else 0."""

    state: State


Effect = Read | Swap | Announce | Beat | Withdraw | ListRoster | Wait | Pause | Prepare
Steps: TypeAlias = Generator[Effect, Any, None]
Asking: TypeAlias = Generator[Effect, Any, bool]


@dataclass(frozen=True, slots=True)
class Found:
    """The document and its token; ``swapped`` tells whether a :class:`Swap` wrote it."""

    state: State | None
    token: Token | None
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """What ``num_nodes_waiting()`` answers from ``at_seconds`` on (this node's clock)."""

    count: int = 0
    at_seconds: float = 0.0


SILENCE_INTERVALS = 1.5
"""A silence of so many keep-alive intervals breaks no contact, if the window is longer."""


@dataclass
class Session:
    """What one node knows. Owned by whoever runs its generators, one at a time.

    ``clock`` is this node's monotonic clock; ``jitter`` makes a random delay out of an upper
    bound, both in seconds; ``unique`` distinguishes its nonces from everybody else's.
    """

    rules: Rules
    entry: RosterEntry
    unique: str
    clock: Callable[[], float]
    jitter: Callable[[float], float]
    outage_timeout_seconds: float = 600.0
    proves_life_by_beats: bool = False
    """Where entries do not expire by themselves, a new coordinator must see them move."""

    state: State | None = None
    token: Token | None = None
    was_read: bool = False
    """Whether ``state`` and ``token`` are the latest that this node has heard of."""
    latest: State | None = None
    """The latest document with a round that was read; ``restored()`` puts it back."""
    refill: str = ""
    """``state.refill`` as it was read last."""
    pulse: Pulse | None = None
    pulse_at: float = 0.0
    asked_peer: str = ""
    listing: Listing | None = None
    listed_key: object = None
    contact_since: float | None = None
    last_contact: float | None = None
    next_beat: float = 0.0
    entered: bool = False
    """Admitted to the barrier or a round of this incarnation."""
    settles_at: float = float("inf")
    """When a newcomer will have waited for a whole keep-alive interval."""
    creates_at: float = 0.0
    """When a node that found no document and was not the first to arrive writes one."""
    announced: bool = False
    """Whether the entry is in the roster, as far as this node knows."""
    doubt_until: float = 0.0
    """Until then, an announcement that had failed may still overwrite the entry."""
    minimum_since: float | None = None
    quiet_until: float = 0.0
    deadline: float | None = None
    """When the join fails; None while parked."""
    parked: bool = False
    abandoned: bool = False
    """Set by whoever has called for the barrier and does not wait for it any more."""
    closed_seen_at: float | None = None
    changed_at: float | None = None
    """When the published reason to re-join came up, as dated by the backend's clock."""
    notice: Notice = field(default_factory=Notice)
    suspect_since: float | None = None
    look_at: float | None = None
    overtaken: bool = False
    """The run has gone on to a later round than the one this node runs."""
    run_closed: bool = False
    failures: int = 0
    refills: int = 0
    """How often this node has tried to put back a document that the backend had lost."""
    why: str = ""
    """What this node is waiting for, in words."""
    nonces: int = 0

    @property
    def id(self) -> str:
        """This node's id."""
        return self.entry.node.id

    @property
    def coordinates(self) -> bool:
        """Whether this node forms the next round."""
        return self.state is not None and self.state.coordinator == self.id

    def nonce(self) -> str:
        """A text that nobody has used before."""
        self.nonces += 1
        return f"{self.unique}-{self.nonces}"

    def touch(self) -> None:
        """The backend has answered just now."""
        now = self.clock()
        rules = self.rules
        interval, window = rules.keep_alive_interval_seconds, rules.liveness_window_seconds
        # What was silent to us may have been silent to others. An entry is up to one interval old
        # when a silence begins, and is refreshed within one after its end.
        longest = min(window, max(SILENCE_INTERVALS * interval, window - 2 * interval))
        if self.last_contact is not None and now - self.last_contact > longest:
            self.lose_contact()
        if self.contact_since is None:
            self.contact_since = now
        self.last_contact = now

    def lose_contact(self) -> None:
        """What this node has not seen until now proves nothing any more, and what it has written
        may be gone: it announces again."""
        self.announced = False
        self.contact_since = None
        self.forget_listing()
        self.listed_key = None

    def forget_listing(self) -> None:
        """Decide by the pulse alone until the roster is listed again."""
        self.listing = None

    def outage_seconds(self) -> float:
        """How long the backend has not answered; 0 while it does."""
        if not self.failures:
            return 0.0
        return self.clock() - (self.last_contact if self.last_contact is not None else 0.0)
