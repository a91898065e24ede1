"""The shared backend cases, with assertions that tell what was compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "rdzv.conformance.backend_kit",
    "rdzv.conformance.backend_roster_cases",
    "rdzv.conformance.backend_state_cases",
    "rdzv.conformance.backend_watch_cases",
    "rdzv.conformance.store_kit",
)

from rdzv.conformance.backend_cases import CASES, Case, Space  # noqa: E402 - after the rewrite
from rdzv.conformance.store_kit import Background, in_threads  # noqa: E402

__all__ = ["CASES", "Background", "Case", "Space", "in_threads"]
