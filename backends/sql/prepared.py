"""Statements that a connection to PostgreSQL has prepared, so that the server neither reads nor
plans them again: what is left of a message is which of them, and the values.

* They belong to the server's process, so only a connection that no pooler stands behind has any.
  Where one stands there unseen after all, the server says that it knows of no such statement, or
  that it has one already: then nothing is prepared any more. A name is made of its statement's
  text, so what another process has prepared under it is the same.
* A plan is made at the start, when the tables may be empty, and kept. So only what is read by an
  index whatever the tables hold is prepared, and the server is told so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

PLAN_ONCE = "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off"
"""For the session. Else the server would make some plans by the values first, and read the whole of
a table that was empty when it made the plan."""
UNKNOWN_STATEMENT = "26000"
KNOWN_ALREADY = "42P05"
RESULT_HAS_CHANGED = "0A000"
"""Of a statement that was prepared before a table was altered."""
CODES = frozenset({UNKNOWN_STATEMENT, KNOWN_ALREADY, RESULT_HAS_CHANGED})
"""With them a server says so, of others that it cannot do what it is asked at all."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One statement of a connection's."""

    name: str
    definition: str
    """What prepares it."""
    parameters: tuple[str, ...]
    """The names of its values, in order."""

    @classmethod
    def of(cls, text: str, fixed: Mapping[str, str]) -> Prepared:
        """By its text with ``%(parameter)s`` in it, of which some have a ``fixed`` literal."""
        places = _Places(fixed)
        body = text % places
        name = f"rdzv_{hashlib.blake2b(body.encode(), digest_size=16).hexdigest()}"
        return cls(name, f"PREPARE {name} AS {body}", tuple(places.numbers))

    def call(self, literals: Mapping[str, str]) -> str:
        """What carries it out with these literals."""
        return f"EXECUTE {self.name}({', '.join([literals[name] for name in self.parameters])})"


class _Places(dict[str, str]):
    """What stands for each parameter: numbers in order of appearance."""

    def __init__(self, fixed: Mapping[str, str]) -> None:
        super().__init__(fixed)
        self.numbers: dict[str, int] = {}

    def __missing__(self, name: str) -> str:
        return f"${self.numbers.setdefault(name, len(self.numbers) + 1)}"


NOTHING_PREPARED: Mapping[Any, Prepared] = MappingProxyType({})
