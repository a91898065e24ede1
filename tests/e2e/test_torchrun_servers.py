"""Training jobs under torchrun on servers: a few always, all of them in the full run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from integration.etcd_targets import EtcdTarget
from integration.server_targets import RedisTarget
from integration.sql_targets import SqlTarget

from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.suites import TorchrunSuite, marked
from rdzv.conformance.target import Target
from rdzv.conformance.torchrun_cases import OUTAGE_SECONDS, undisturbed
from rdzv.conformance.torchrun_kit import Job


@marked(pytest.mark.full, "torchrun")
class TestRedisTorchrun(TorchrunSuite):
    @pytest.fixture
    def target(self, request: pytest.FixtureRequest) -> Iterator[Target]:
        server = server_or_not_run(request, "redis")
        target = RedisTarget(server, read_timeout="60")
        yield target
        target.close()


class _SqlTorchrun:
    backend: str

    @pytest.fixture
    def target(self, request: pytest.FixtureRequest) -> Iterator[Target]:
        server = server_or_not_run(request, self.backend)
        target = SqlTarget(self.backend, server, read_timeout="60")
        yield target
        target.close()


@marked(pytest.mark.full, "torchrun")
class TestPostgresqlTorchrun(_SqlTorchrun, TorchrunSuite):
    backend = "postgresql"


@marked(pytest.mark.full, "torchrun")
class TestMysqlTorchrun(_SqlTorchrun, TorchrunSuite):
    backend = "mysql"


@marked(pytest.mark.full, "torchrun")
class TestEtcdTorchrun(TorchrunSuite):
    @pytest.fixture
    def target(self, request: pytest.FixtureRequest) -> Iterator[Target]:
        target = EtcdTarget(server_or_not_run(request, "etcd"), read_timeout="60")
        yield target
        target.close()


def target_on(technology: str, server: Any) -> Target:
    if technology == "redis":
        return RedisTarget(server, read_timeout="60")
    if technology == "etcd":
        return EtcdTarget(server, read_timeout="60")
    return SqlTarget(technology, server, read_timeout="60")


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("technology", ["redis", "postgresql", "mysql", "etcd"])
def test_nodes_that_wait_meet_after_the_server_restarted_with_its_data(
    request: pytest.FixtureRequest, technology: str
) -> None:
    """The one that waits finds its announcement again, and nobody starts a worker twice."""
    server: Any = server_or_not_run(request, technology)
    with (
        closing(target_on(technology, server)) as target,
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
