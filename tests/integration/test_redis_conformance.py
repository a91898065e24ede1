"""The conformance kit on real Redis servers, and in the full run on Valkey."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.suites import (
    BackendSuite,
    HandlerSuite,
    RosterSuite,
    StoreSuite,
    WatchSuite,
    marked,
)
from rdzv.conformance.target import Target

from .server_targets import RedisTarget


class _Redis:
    @pytest.fixture(params=["redis", pytest.param("valkey", marks=pytest.mark.full)])
    def target(self, request: pytest.FixtureRequest) -> Iterator[Target]:
        target = RedisTarget(server_or_not_run(request, request.param), request.param)
        yield target
        target.close()


class TestRedisBackend(_Redis, BackendSuite):
    pass


class TestRedisRoster(_Redis, RosterSuite):
    pass


class TestRedisWatch(_Redis, WatchSuite):
    pass


class TestRedisStore(_Redis, StoreSuite):
    pass


@marked(pytest.mark.full, "membership", "closing", "outages", "torch's handler")
class TestRedisHandler(_Redis, HandlerSuite):
    pass
