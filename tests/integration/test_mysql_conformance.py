"""The conformance kit on MariaDB, or MySQL where a URL names one."""

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


class _Mysql:
    @pytest.fixture
    def target(self, request: pytest.FixtureRequest) -> Iterator[Target]:
        target = SqlTarget("mysql", server_or_not_run(request, "mysql"))
        yield target
        target.close()


@SHORT
class TestMysqlBackend(_Mysql, BackendSuite):
    pass


@SHORT
class TestMysqlRoster(_Mysql, RosterSuite):
    pass


@SHORT
class TestMysqlWatch(_Mysql, WatchSuite):
    pass


@SHORT
class TestMysqlStore(_Mysql, StoreSuite):
    pass


@marked(pytest.mark.full, "rendezvous", "membership", "closing", "outages", "torch's handler")
class TestMysqlHandler(_Mysql, HandlerSuite):
    pass
