"""Training jobs on SQL databases, beside what the suite of the conformance kit tries on each."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from integration.sql_targets import SqlTarget

from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.target import Target
from rdzv.conformance.torchrun_cases import OUTAGE_SECONDS, undisturbed
from rdzv.conformance.torchrun_kit import Job

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

MANY = 8


@pytest.mark.parametrize("backend", ["postgresql", "mysql"])
def test_nodes_that_wait_meet_after_the_server_restarted_with_its_data(
    request: pytest.FixtureRequest, backend: str
) -> None:
    """The one that waits finds its announcement again, and nobody starts a worker twice."""
    server: Any = server_or_not_run(request, backend)
    with (
        closing(SqlTarget(backend, server, read_timeout="60")) as target,
        Job(target, "2:2", collective=False) as job,
    ):
        first = job.start("first", traced=True)
        first.wait_for_trace("announced")
        server.kill()
        job.hold_for("it goes on to wait", lambda: first.exit_code is None, OUTAGE_SECONDS)
        server.restart(keep_data=True)
        second = job.start("second")
        job.wait_for_world(first, second)
        assert undisturbed([first, second])
        job.finish(first, second)


def test_eight_agents_train_on_one_file(target: Target) -> None:
    with Job(target, f"{MANY}:{MANY}") as job:
        agents = [job.start(f"node{number}") for number in range(MANY)]
        assert set(job.wait_for_world(*agents).agents) == set(agents)
        assert undisturbed(agents)
        job.finish(*agents)
