"""Who gets which rank. The only place that computes ranks; pure.

Rules:

* Rank 0 goes to a survivor (a participant of the previous round) whenever there is one: a
  newcomer without a checkpoint must not broadcast its weights.
* ``stable``: survivors keep their rank where it still exists; gaps are filled by the survivors
  that lost theirs, then by newcomers, in natural order.
* ``natural``: everyone by rank hint, then natural order of addresses (node9 before node10).
* ``topology``: everyone with the same topology label side by side, groups in natural order of
  the label, inside a group as ``natural``; the group of rank 0 comes first.
* Every order is total, so all nodes that know the same facts compute the same ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from rdzv.state import Node, RosterEntry

RANK_ORDERS = ("stable", "natural", "topology")

KEYS_KEPT_MAX = 16_384
"""A crowd is put in order again and again while it grows."""
_DIGITS = re.compile(r"(\d+)")


@functools.lru_cache(KEYS_KEPT_MAX)
def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that reads numbers as numbers.

    >>> sorted(["node10", "node9", "node"], key=natural_key)
    ['node', 'node9', 'node10']
    """
    parts = [part for part in _DIGITS.split(text) if part]
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def assign_ranks(
    entries: Sequence[RosterEntry], previous: Sequence[Node], rank_order: str = "stable"
) -> tuple[Node, ...]:
    """The participants of the next round in rank order.

    ``previous`` are the participants of the last round in rank order, gone ones included.
    """
    before = {node.id: rank for rank, node in enumerate(previous)}
    ordered = sorted(entries, key=_natural_order)
    if rank_order == "natural":
        chosen = _survivor_first(ordered, before)
    elif rank_order == "topology":
        chosen = _grouped(ordered, before)
    else:
        chosen = _stable(ordered, before)
    return tuple(entry.node for entry in chosen)


def _natural_order(entry: RosterEntry) -> tuple[object, ...]:
    hint = (entry.rank_hint is None, entry.rank_hint or 0)
    return (*hint, natural_key(entry.node.address), natural_key(entry.node.id))


def _survivor_first(ordered: list[RosterEntry], before: dict[str, int]) -> list[RosterEntry]:
    survivors = [entry for entry in ordered if entry.node.id in before]
    if not survivors:
        return ordered
    return [survivors[0], *(entry for entry in ordered if entry is not survivors[0])]


def _grouped(ordered: list[RosterEntry], before: dict[str, int]) -> list[RosterEntry]:
    first = _survivor_first(ordered, before)[0] if ordered else None
    head = first.topology if first else ""

    def key(entry: RosterEntry) -> tuple[object, ...]:
        return (
            entry.topology != head,
            natural_key(entry.topology),
            entry is not first,
            _natural_order(entry),
        )

    return sorted(ordered, key=key)


def _stable(ordered: list[RosterEntry], before: dict[str, int]) -> list[RosterEntry]:
    places: list[RosterEntry | None] = [None] * len(ordered)
    displaced, newcomers = [], []
    for entry in ordered:
        rank = before.get(entry.node.id)
        if rank is None:
            newcomers.append(entry)
        elif rank < len(places):
            places[rank] = entry
        else:
            displaced.append(entry)
    displaced.sort(key=lambda entry: before[entry.node.id])
    if places and places[0] is None and not displaced:
        for rank, holder in enumerate(places):
            if holder is not None:
                places[0], places[rank] = holder, None
                break
    fillers = iter(displaced + newcomers)
    return [holder if holder is not None else next(fillers) for holder in places]
