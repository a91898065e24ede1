"""Clauses: the sentences that a backend or a store is held to, with the functions that try them.

A clause is a function whose name is the sentence. It takes the :class:`~rdzv.conformance.target`
under test, empty, and raises where the sentence does not hold. Modules of clauses make a decorator
of their own with :func:`book` and so enter what they define into one of the ``BOOKS``, from which
the suites take their tests. Nothing here knows pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Clause:
    """One sentence."""

    book: str
    group: str
    """What it is about: a column of the matrix."""
    function: Function
    needs: tuple[str, ...] = ()
    """Capabilities without which it need not hold, see :mod:`rdzv.conformance.capabilities`."""
    controls: tuple[str, ...] = ()
    """What must be possible to do to the server or to the way to it, see ``target.CONTROLS``."""
    timeout_seconds: float = 120.0
    """By then the clause has been tried, even on a slow machine: a hang is a failure."""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def id(self) -> str:
        """Unique among all clauses.

        >>> def a_stale_token_loses(target): ...
        >>> Clause("backend", "state", a_stale_token_loses).id
        'backend/state/a_stale_token_loses'
        """
        return f"{self.book}/{self.group}/{self.name}"

    @property
    def sentence(self) -> str:
        """The sentence, to be read."""
        return self.name.replace("_", " ")


BOOKS: dict[str, list[Clause]] = {}
"""All clauses by their book, in the order in which they were written."""


def book(
    name: str,
    group: str,
    *,
    needs: tuple[str, ...] = (),
    controls: tuple[str, ...] = (),
    timeout_seconds: float = 120.0,
) -> Callable[[Function], Function]:
    """A decorator that enters functions into the book ``name``. What is given here holds for each
    of them."""

    def enter(function: Function) -> Function:
        clause = Clause(name, group, function, needs, controls, timeout_seconds)
        clauses = BOOKS.setdefault(name, [])
        if any(known.name == clause.name for known in clauses):
            raise ValueError(f"two clauses are called {clause.name!r} in the book {name!r}")
        clauses.append(clause)
        return function

    return enter
