"""Training jobs under torchrun on servers: a few always, all of them in the full run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.registered import RegisteredTarget
from rdzv.conformance.suites import TorchrunSuite, marked
from rdzv.conformance.target import Target


class RedisTarget(RegisteredTarget):
    """As torchrun's users choose it; a wipe loses what all runs have stored there."""

    def wipe(self) -> None:
        host, port = self.server.address
        with redis.Redis(host, port, socket_timeout=5.0) as client:
            client.flushall()


@marked(pytest.mark.full, "torchrun")
class TestRedisTorchrun(TorchrunSuite):
    @pytest.fixture
    def target(self, request: pytest.FixtureRequest) -> Iterator[Target]:
        server = server_or_not_run(request, "redis")
        target = RedisTarget("redis", server.endpoint(), server=server)
        yield target
        target.close()
