"""The conformance kit on PostgreSQL."""

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

from .sql_targets import SqlTarget

SHORT = marked(pytest.mark.full, "faults", "concurrency")


class _Postgresql:
    @pytest.fixture
    def target(self, request: pytest.FixtureRequest) -> Iterator[Target]:
        target = SqlTarget("postgresql", server_or_not_run(request, "postgresql"))
        yield target
        target.close()


@SHORT
class TestPostgresqlBackend(_Postgresql, BackendSuite):
    pass


@SHORT
class TestPostgresqlRoster(_Postgresql, RosterSuite):
    pass


@SHORT
class TestPostgresqlWatch(_Postgresql, WatchSuite):
    pass


@SHORT
class TestPostgresqlStore(_Postgresql, StoreSuite):
    pass


@marked(pytest.mark.full, "membership", "closing", "outages", "torch's handler")
class TestPostgresqlHandler(_Postgresql, HandlerSuite):
    pass
