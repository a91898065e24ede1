"""The mode without code: every suite on the backend that the command line names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rdzv.conformance.plugin import target_of
from rdzv.conformance.suites import (
    BackendSuite,
    HandlerSuite,
    RosterSuite,
    StoreSuite,
    TorchrunSuite,
    WatchSuite,
)
from rdzv.conformance.target import Target


class _Named:
    @pytest.fixture
    def target(self, pytestconfig: pytest.Config) -> Iterator[Target]:
        target = target_of(pytestconfig)
        yield target
        target.close()


class TestBackend(_Named, BackendSuite):
    pass


class TestRoster(_Named, RosterSuite):
    pass


class TestWatch(_Named, WatchSuite):
    pass


class TestStore(_Named, StoreSuite):
    pass


class TestHandler(_Named, HandlerSuite):
    pass


class TestTorchrun(_Named, TorchrunSuite):
    pass
