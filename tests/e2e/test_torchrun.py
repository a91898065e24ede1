"""Training jobs under torchrun on SQLite."""

from __future__ import annotations

import pytest

from rdzv.conformance.suites import TorchrunSuite
from rdzv.conformance.target import Target
from rdzv.conformance.torchrun_cases import a_job_scales_up_without_restarts_to_spare

SCALE_UP_ATTEMPTS = 20
USUAL_SCALE_UP_ATTEMPTS = 2


class TestSqliteTorchrun(TorchrunSuite):
    @pytest.fixture
    def target(self, target: Target) -> Target:
        return target


@pytest.mark.parametrize(
    "attempt",
    [
        pytest.param(attempt, marks=[] if attempt <= USUAL_SCALE_UP_ATTEMPTS else pytest.mark.full)
        for attempt in range(2, SCALE_UP_ATTEMPTS + 1)
    ],
)
def test_scale_up_without_restarts_to_spare_once_more(target: Target, attempt: int) -> None:
    """The suite has tried it once; a race shows only sometimes."""
    a_job_scales_up_without_restarts_to_spare(target)
