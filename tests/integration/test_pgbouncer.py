"""PostgreSQL behind PgBouncer, which gives each transaction to another of its connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rdzv.backends.sql import SqlBackend
from rdzv.conformance.store_kit import Background
from rdzv.conformance.suites import BackendSuite, RosterSuite, StoreSuite, WatchSuite, marked
from rdzv.conformance.target import Target

from .sql_targets import SqlTarget, listens


class _Pooled:
    @pytest.fixture
    def target(self, pooler: Any) -> Iterator[Target]:
        target = SqlTarget("postgresql", pooler)
        # What can be killed here is the pooler, which has no data to be lost.
        target.server = None
        yield target
        target.close()


FULL = marked(
    pytest.mark.full, "state", "roster", "watch", "values", "waits", "faults", "concurrency"
)


@FULL
class TestPooledBackend(_Pooled, BackendSuite):
    pass


@FULL
class TestPooledRoster(_Pooled, RosterSuite):
    pass


@FULL
class TestPooledWatch(_Pooled, WatchSuite):
    pass


@FULL
class TestPooledStore(_Pooled, StoreSuite):
    pass


def test_nobody_listens_and_changes_are_heard(pooler: Any) -> None:
    backend, other = (SqlBackend(pooler.endpoint(), "pooled") for _ in range(2))
    try:
        _, token, _ = backend.set_state(b"0")
        waiting = Background(lambda: backend.wait_for_change(token, 60.0)).still_blocked()
        found = other.set_state(b"1", token)
        assert waiting.result() == found[:2]
        assert not listens(backend), "a LISTEN would stay with a connection of the pooler's"
    finally:
        backend.close()
        other.close()
