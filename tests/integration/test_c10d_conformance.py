"""The conformance kit on torch's own TCPStore and FileStore under our handler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.suites import (
    BackendSuite,
    HandlerSuite,
    RosterSuite,
    StoreSuite,
    WatchSuite,
    marked,
)
from rdzv.conformance.target import Target

from .c10d_targets import FileStoreTarget, TcpStoreTarget, tcp_server


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    """A store's server for all clauses."""
    server = tcp_server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


class _Tcp:
    @pytest.fixture
    def target(self, tcp: ProcessServer) -> Iterator[Target]:
        target = TcpStoreTarget(tcp)
        yield target
        target.close()


class _File:
    @pytest.fixture
    def target(self, tmp_path: Path) -> Iterator[Target]:
        target = FileStoreTarget(tmp_path / "rdzv.store")
        yield target
        target.close()


LONG = ("faults", "concurrency", "values", "waits", "queues")


@marked(pytest.mark.full, *LONG)
class TestTcpStoreBackend(_Tcp, BackendSuite):
    pass


@marked(pytest.mark.full, *LONG)
class TestTcpStoreRoster(_Tcp, RosterSuite):
    pass


@marked(pytest.mark.full, *LONG)
class TestTcpStoreWatch(_Tcp, WatchSuite):
    pass


@pytest.mark.full
class TestTcpStoreStore(_Tcp, StoreSuite):
    pass


@marked(pytest.mark.full, "membership", "closing", "outages", "torch's handler")
class TestTcpStoreHandler(_Tcp, HandlerSuite):
    pass


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
