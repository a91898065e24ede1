"""All clauses about handlers on a backend: importing this fills their book, in this order."""

from __future__ import annotations

from rdzv.conformance import handler_round_cases

# isort: split
from rdzv.conformance import handler_member_cases

# isort: split
from rdzv.conformance import handler_closing_cases

# isort: split
from rdzv.conformance import handler_outage_cases

# isort: split
from rdzv.conformance import handler_torch_cases

__all__ = [
    "handler_closing_cases",
    "handler_member_cases",
    "handler_outage_cases",
    "handler_round_cases",
    "handler_torch_cases",
]
