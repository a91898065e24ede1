"""The conformance kit on torch's own FileStore under our handler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.conformance.suites import (
    BackendSuite,
    HandlerSuite,
    RosterSuite,
    StoreSuite,
    WatchSuite,
    marked,
)
from rdzv.conformance.target import Target

from .c10d_targets import LONG, FileStoreTarget


class _File:
    @pytest.fixture
    def target(self, tmp_path: Path) -> Iterator[Target]:
        target = FileStoreTarget(tmp_path / "rdzv.store")
        yield target
        target.close()


@marked(pytest.mark.full, *LONG)
class TestFileStoreBackend(_File, BackendSuite):
    pass


class TestFileStoreRoster(_File, RosterSuite):
    pass


class TestFileStoreWatch(_File, WatchSuite):
    pass


@pytest.mark.full
class TestFileStoreStore(_File, StoreSuite):
    pass


@pytest.mark.full
class TestFileStoreHandler(_File, HandlerSuite):
    pass
