"""All clauses about faults: importing this fills their books."""

from __future__ import annotations

from rdzv.conformance import (
    fault_backend_cases,
    fault_history_cases,
    fault_roster_cases,
    fault_store_cases,
    fault_store_wait_cases,
)

__all__ = [
    "fault_backend_cases",
    "fault_history_cases",
    "fault_roster_cases",
    "fault_store_cases",
    "fault_store_wait_cases",
]
