"""All clauses about backends: importing this fills their books."""

from __future__ import annotations

from rdzv.conformance import backend_roster_cases, backend_state_cases, backend_watch_cases

__all__ = ["backend_roster_cases", "backend_state_cases", "backend_watch_cases"]
