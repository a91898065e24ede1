"""The two records from which everything follows: the state of a run, and a node's roster entry.

Rules:

* A record is immutable. Whoever wants another one makes it with ``dataclasses.replace``.
* ``State.check`` and ``RosterEntry.check`` tell whether a record can exist at all; the codec calls
  them on everything that it reads and writes, so nothing else has to.
* A round is named by :class:`RoundId`, never by its number alone: a failover to an older copy of
  the state can complete the same number twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

NODES_MAX = 4096
"""Participants of a round, and the largest ``max_nodes`` that is accepted."""
PORT_MAX = 65535
REPLACED_INCARNATIONS_MAX = 8
"""How many closed incarnations a run id remembers to have had before."""
TEXT_CHARACTERS_MAX = 1024
"""Of a node id, an address, a label or a reason."""
_SURROGATES = re.compile("[\ud800-\udfff]")


class RecordError(ValueError):
    """A record that no correct node can have written; the text says why."""


@dataclass(frozen=True, slots=True)
class RoundId:
    """The identity of a round: drawn anew whenever one is proposed."""

    incarnation: str
    round: int
    nonce: str

    @property
    def label(self) -> str:
        """The identity as one text, for backends to compare and for store prefixes.

        >>> RoundId("a1", 3, "b2").label
        'a1.3.b2'
        """
        return f"{self.incarnation}.{self.round}.{self.nonce}"


@dataclass(frozen=True, slots=True)
class Node:
    """A participant. ``id`` is unique for ever; ``address`` is where its peers can reach it."""

    id: str
    address: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """A frozen round: its participants in rank order, not yet confirmed by all of them."""

    nonce: str
    participants: tuple[Node, ...]

    ranks: dict[str, int] = field(init=False, repr=False, compare=False)
    """By node id; so too in :class:`State`. Every node looks itself up at each step."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _ranks(self.participants))


@dataclass(frozen=True, slots=True)
class Closing:
    """Why a run was closed, and whether every participant had finished by then."""

    reason: str
    ended_well: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """The one document of a run, changed only by compare-and-set."""

    incarnation: str
    round: int = 0
    """The last final round; 0 before an incarnation's first."""
    nonce: str = ""
    participants: tuple[Node, ...] = ()
    """In rank order; empty only before an incarnation's first round."""
    proposal: Proposal | None = None
    coordinator: str = ""
    waiting: int = 0
    """How many nodes the next round would admit now, as last published."""
    lost: tuple[str, ...] = ()
    """Ids of participants known to be dead, sorted."""
    notice_age_seconds: float = 0.0
    """How long ago, when this document was written, ``waiting`` or ``lost`` had first given the
    participants a reason to re-join. With the document's own age it tells all of them one moment
    at which to act, without a clock in it."""
    closed: Closing | None = None
    port: int = 0
    """Where rank 0 serves the workers of this round, at its address; 0 where it tells that in the
    round's store."""
    refill: str = ""
    """Drawn anew by whoever puts the document back into a backend that had lost it. Then entries
    may be gone as well: who meets another ``refill`` than before has not watched until now."""
    replaces: tuple[str, ...] = ()
    """Closed incarnations of this run id, latest first; nothing of theirs means anything now."""

    ranks: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _ranks(self.participants))

    @property
    def round_id(self) -> RoundId | None:
        """The identity of the last final round; None before the first."""
        return RoundId(self.incarnation, self.round, self.nonce) if self.round else None

    @property
    def proposal_id(self) -> RoundId | None:
        """The identity that the frozen round will have; None when there is none."""
        if self.proposal is None:
            return None
        return RoundId(self.incarnation, self.round + 1, self.proposal.nonce)

    @property
    def participant_ids(self) -> tuple[str, ...]:
        """Ids in rank order."""
        return tuple(node.id for node in self.participants)

    def rank_of(self, node_id: str) -> int | None:
        """The rank of a node in the last final round; None when it is not in it."""
        return self.ranks.get(node_id)

    def check(self) -> None:
        """Raise :class:`RecordError` unless this document can exist."""
        _require(bool(self.incarnation), "no incarnation")
        _check_port(self.port, serves=self.round > 0)
        _require(self.round >= 0, "a negative round")
        _require((self.round == 0) == (not self.participants), "participants without a round")
        _require((self.round == 0) == (not self.nonce), "a round without a nonce")
        _check_nodes(self.participants)
        if self.proposal is not None:
            _require(bool(self.proposal.nonce), "a proposal without a nonce")
            _require(bool(self.proposal.participants), "an empty proposal")
            _require(self.closed is None, "a proposal in a closed run")
            _check_nodes(self.proposal.participants)
        ids = set(self.participant_ids)
        _require(all(lost in ids for lost in self.lost), "a lost node that was no participant")
        _require(list(self.lost) == sorted(set(self.lost)), "lost nodes out of order")
        _require(0 <= self.waiting <= NODES_MAX, "an impossible number of waiting nodes")
        _require(0 <= self.notice_age_seconds < float("inf"), "an impossible age")
        _require(len(self.replaces) <= REPLACED_INCARNATIONS_MAX, "too many old incarnations")
        _require(self.incarnation not in self.replaces, "an incarnation that replaces itself")
        reason = self.closed.reason if self.closed else ""
        proposed = self.proposal.nonce if self.proposal else ""
        texts = (self.incarnation, self.nonce, proposed, self.coordinator, self.refill, reason)
        _check_texts((*texts, *self.replaces))


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """What a node says of itself, written by nobody else."""

    node: Node
    rank_hint: int | None = None
    topology: str = ""
    left: RoundId | None = None
    """The round this node left last."""
    running: RoundId | None = None
    """The round it has confirmed; none while it waits."""
    settled: bool = False
    """It has waited for a whole keep-alive interval: no newcomer that fails as it starts."""
    finished: bool = False
    """Its agent has begun the exit barrier of ``running``."""
    port: int = 0
    """Where it serves the workers of ``running``, if it is rank 0 there and does so already."""

    def check(self) -> None:
        """Raise :class:`RecordError` unless this entry can exist."""
        _check_nodes((self.node,))
        _check_port(self.port, serves=self.running is not None)
        _check_texts((self.topology,))
        for round_id in (self.left, self.running):
            if round_id is not None:
                _require(round_id.round > 0, "an identity of no round")
                _require(bool(round_id.incarnation and round_id.nonce), "half an identity")
                _check_texts((round_id.incarnation, round_id.nonce))


@dataclass(frozen=True, slots=True)
class Present:
    """A live entry of a listing; see :class:`rdzv.ports.Listed` for ``proven``."""

    entry: RosterEntry
    proven: bool = True


@dataclass(frozen=True, slots=True)
class Listing:
    """The roster as one observer saw it, and what its sight is worth."""

    present: tuple[Present, ...]
    """In the order of arrival."""
    withdrawn: frozenset[str]
    started_at_seconds: float
    """When the observer, by its own clock, asked for it."""
    contact_since_seconds: float
    """Since when the observer has been in unbroken contact with the backend."""

    index: dict[str, RosterEntry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {present.entry.node.id: present.entry for present in self.present}
        object.__setattr__(self, "index", index)

    def entry_of(self, node_id: str) -> RosterEntry | None:
        """The live entry of a node, or None."""
        return self.index.get(node_id)


def _ranks(nodes: tuple[Node, ...]) -> dict[str, int]:
    return {node.id: rank for rank, node in enumerate(nodes)}


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RecordError(otherwise)


def _check_nodes(nodes: tuple[Node, ...]) -> None:
    _require(len(nodes) <= NODES_MAX, f"more than {NODES_MAX} participants")
    ids, addresses = [node.id for node in nodes], [node.address for node in nodes]
    _require(len(set(ids)) == len(ids), "a node twice")
    _require(all(ids) and all(addresses), "a node without id or address")
    _check_texts(ids)
    _check_texts(addresses)


def _check_port(port: int, *, serves: bool) -> None:
    _require(0 <= port <= PORT_MAX, "an impossible port")
    _require(serves or not port, "a port without a round")


def _check_texts(texts: Sequence[str]) -> None:
    # All at once: every node reads thousands of them in each document.
    longest = max(map(len, texts), default=0)
    _require(longest <= TEXT_CHARACTERS_MAX, f"a text over {TEXT_CHARACTERS_MAX} characters")
    # Half a character: two of them, written side by side, would be read as another text.
    valid = all(map(str.isascii, texts)) or not any(map(_SURROGATES.search, texts))
    _require(valid, "a text that is no valid Unicode")
