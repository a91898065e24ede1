"""The conformance kit on the backends that need no server: all clauses, under every condition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.conformance.suites import BackendSuite, RosterSuite, StoreSuite, WatchSuite
from rdzv.conformance.target import Target

from .sqlite_space import JournalTarget, SqliteTarget
from .targets import MemoryTarget


class _Memory:
    @pytest.fixture
    def target(self) -> Iterator[Target]:
        target = MemoryTarget()
        yield target
        target.close()


class _Sqlite:
    """A wipe loses the rows, or the file itself."""

    @pytest.fixture(params=["rows", pytest.param("file", marks=pytest.mark.full)])
    def target(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
        target = SqliteTarget(tmp_path / "rdzv.db", lose_file=request.param == "file")
        yield target
        target.close()


class _Journal:
    """Without a write-ahead log a reader and a writer wait for each other."""

    @pytest.fixture
    def target(self, tmp_path: Path) -> Iterator[Target]:
        target = JournalTarget(tmp_path / "rdzv.db")
        yield target
        target.close()
        assert target.journal() == "delete"


class TestMemoryBackend(_Memory, BackendSuite):
    pass


class TestMemoryRoster(_Memory, RosterSuite):
    pass


class TestMemoryWatch(_Memory, WatchSuite):
    pass


class TestMemoryStore(_Memory, StoreSuite):
    pass


class TestSqliteBackend(_Sqlite, BackendSuite):
    pass


class TestSqliteRoster(_Sqlite, RosterSuite):
    pass


class TestSqliteWatch(_Sqlite, WatchSuite):
    pass


class TestSqliteStore(_Sqlite, StoreSuite):
    pass


@pytest.mark.full
class TestSqliteJournalBackend(_Journal, BackendSuite):
    pass


@pytest.mark.full
class TestSqliteJournalRoster(_Journal, RosterSuite):
    pass


@pytest.mark.full
class TestSqliteJournalWatch(_Journal, WatchSuite):
    pass


@pytest.mark.full
class TestSqliteJournalStore(_Journal, StoreSuite):
    pass
