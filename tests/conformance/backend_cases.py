"""What the core asks of a backend (:mod:`rdzv.ports`), as cases that run on any backend.

A case is a function of one argument, a :class:`Space`. A backend joins by handing over a space
that is empty when the case begins, for every case in ``CASES``.
"""

from __future__ import annotations

# Importing the modules fills the list.
from rdzv.conformance import backend_roster_cases, backend_state_cases, backend_watch_cases
from rdzv.conformance.backend_kit import CASES, Case, Space

__all__ = [
    "CASES",
    "Case",
    "Space",
    "backend_roster_cases",
    "backend_state_cases",
    "backend_watch_cases",
]
