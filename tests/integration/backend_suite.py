"""The shared backend cases, with assertions that tell what was compared."""

from __future__ import annotations

from rdzv.conformance.backend_cases import CASES, Case, Space
from rdzv.conformance.store_kit import Background, in_threads

__all__ = ["CASES", "Background", "Case", "Space", "in_threads"]
