"""A training job of many agents on SQLite, beside what the suite of the conformance kit tries."""

from __future__ import annotations

import pytest

from rdzv.conformance.target import Target
from rdzv.conformance.torchrun_cases import undisturbed
from rdzv.conformance.torchrun_kit import Job

MANY = 8


@pytest.mark.full
@pytest.mark.timeout(240)
def test_eight_agents_train_on_one_file(target: Target) -> None:
    with Job(target, f"{MANY}:{MANY}") as job:
        agents = [job.start(f"node{number}") for number in range(MANY)]
        assert set(job.wait_for_world(*agents).agents) == set(agents)
        assert undisturbed(agents)
        job.finish(*agents)
