"""All clauses about stores: importing this fills their book."""

from __future__ import annotations

from rdzv.conformance import store_value_cases, store_wait_cases

__all__ = ["store_value_cases", "store_wait_cases"]
