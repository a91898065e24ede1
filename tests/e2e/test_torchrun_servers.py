"""Training jobs under torchrun on servers: a few always, all of them in the full run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integration.etcd_targets import EtcdTarget
from integration.server_targets import RedisTarget
from integration.sql_targets import SqlTarget

from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.suites import TorchrunSuite, marked
from rdzv.conformance.target import Target


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
