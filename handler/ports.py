"""What the core asks of the world: the one file a backend's author reads.

A backend is one object for one run. Its required part is torch's own interface,
:class:`torch.distributed.elastic.rendezvous.dynamic_rendezvous.RendezvousBackend`: ``name``,
``get_state()`` and ``set_state(state, token)``. Every other ability is an abstract class here;
the core looks for each of them once, when the handler is built, and never asks for a name.
What a backend lacks, ``rdzv.adapters`` makes out of ``get_state`` and ``set_state``.

Rules that hold for every method:

* It may be called from any thread, several at a time.
* It returns or raises within the backend's own read timeout. It never waits for ever.
* It raises ``RendezvousConnectionError`` when the backend could not be asked or its answer was
  lost, ``RendezvousStateError`` when what is stored cannot be what a backend stored, and nothing
  else. After an error the object is usable again as soon as the backend is.
* It never repeats a write whose answer was lost; ``set_state`` finds out by reading again.
* What one run writes is invisible to every other run, whatever characters a run id has.
* Ages and expiry are measured by the backend's clock, never by a caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Token = Any
"""A fencing token: opaque to the core, which only compares it with ``==`` and hands it back."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a node says of itself. ``data`` is the core's and opaque to a backend."""

    node_id: str
    data: bytes
    round_label: str = ""
    """The round this node has confirmed, or "": a backend only counts equal ones."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of a listing."""

    entry: Entry
    withdrawn: bool = False
    """A tombstone: the node has said that it leaves. ``entry.data`` may be empty then."""
    proven: bool = True
    """Whether the entry is known to be kept alive. False only where there is no expiry to rely on
    and this observer has not yet seen the entry move."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the caller of :meth:`Roster.announce` or :meth:`Roster.beat` wants to know besides."""

    peer_id: str = ""
    round_label: str = ""
    ageless: Token | None = None
    """The age of the document with this token need not be told: nobody would use it."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A backend's answer of constant size to a keep-alive, all taken at one moment."""

    token: Token | None
    """The token that ``get_state()`` would return now; None when there is no document."""
    live: int
    """Entries that are neither expired nor withdrawn, the caller's own included."""
    revision: Any
    """Compares unequal after any ``announce`` that changed something and any ``withdraw``. An
    expiry need not move it: it shows in ``live``."""
    present: bool
    """Whether the caller's entry was live when the call came (after ``announce``: True)."""
    peer_live: bool = False
    """Whether ``question.peer_id`` is live."""
    confirmed: int = 0
    """Live entries whose ``round_label`` is ``question.round_label``; 0 for an empty label."""
    state_age_seconds: float | None = None
    """Seconds since the document was last written, by the backend's clock; None without one."""
    next_expiry_seconds: float | None = None
    """Seconds until the first live entry expires if no beat comes, by the backend's clock; None
    without one. A hint when to look: without it a loss is noticed up to one beat later."""


class Roster(ABC):
    """Who is here now: one small entry per live node, written only by that node."""

    @abstractmethod
    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        """Write the caller's entry and let it live ``ttl_seconds`` from now.

        A node that is live keeps its place in the order of arrival; one that had expired or
        withdrawn arrives anew. A backend may let a sign of life count that came within the last
        sixteenth of ``ttl_seconds``, here and in :meth:`beat`, instead of another one. Costs O(1),
        whatever the number of nodes.
        """

    @abstractmethod
    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        """Let the caller's live entry live ``ttl_seconds`` from now.

        An entry that has expired or was withdrawn stays so: the answer then says
        ``present=False``, and the call was a mere question. Never writes the state, never moves
        ``revision``. Costs O(1).
        """

    @abstractmethod
    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        """Take the entry back and leave a tombstone for ``ttl_seconds``, so that leaving is told
        from vanishing. Leaves one for a node without an entry too."""

    @abstractmethod
    def entries(self) -> Sequence[Listed]:
        """All live entries in the order of arrival, then the tombstones, in one consistent read."""


class Watch(ABC):
    """Being told of a change instead of asking again and again."""

    @abstractmethod
    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: Any = None
    ) -> tuple[bytes, Token] | None:
        """Wait until the document's token differs from ``token``, or, where ``revision`` is
        given, until the roster's revision differs from it, or until ``timeout_seconds`` are over.

        Returns what ``get_state()`` returns when the token differs, else None. A change made at
        any time after the caller learnt ``token`` ends the wait: look first, then sleep.
        """


class FirstLook(ABC):
    """A watch that can begin with a look: the two together cost less than one after the other."""

    @abstractmethod
    def look_and_watch(self) -> tuple[bytes, Token] | None:
        """What ``get_state()`` returns, for a caller that will wait for changes of it next."""


class GetsReady(ABC):
    """A backend that can do before a join what would take time in it."""

    @abstractmethod
    def get_ready(self) -> None:
        """For a caller that will join soon: who merely looks, or has a store, needs none of it.
        Raises what opening raises."""


class Located(ABC):
    """Where the backend is."""

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """For messages: what the user would recognise, with secrets masked."""

    @abstractmethod
    def route(self) -> tuple[str, int] | None:
        """Host and port whose route tells which address of this machine its peers can reach;
        None where the backend is no network service."""


class Closable(ABC):
    """A backend or store that holds connections."""

    @abstractmethod
    def close(self) -> None:
        """Give up connections and threads. Never raises; calls after it may open them anew."""


class Peekable(ABC):
    """A store that tells in one request what is there now."""

    @abstractmethod
    def peek(self, keys: Iterable[str]) -> list[bytes | None]:
        """The values of all keys, in order, None for an absent one. Never waits for one."""


class Namespaced(ABC):
    """A store that can make room for one round by itself.

    Stores without it are wrapped in ``torch.distributed.PrefixStore``, behind which torch hides
    queues and ``list_keys``.
    """

    @abstractmethod
    def namespace(self, prefix: str) -> Store:
        """A store with a timeout of its own whose keys are exactly those below ``prefix``."""
