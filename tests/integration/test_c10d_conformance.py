"""The conformance kit on torch's own TCPStore under our handler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.suites import (
    BackendSuite,
    HandlerSuite,
    RosterSuite,
    StoreSuite,
    WatchSuite,
    deviates,
    marked,
)
from rdzv.conformance.target import Target

from .c10d_targets import LONG, NO_CLOCK, TcpStoreTarget, tcp_server

FAULTS_READ_TIMEOUT = "2"
"""Where answers are lost on purpose, they are not waited for for long."""


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    """A store's server for all clauses."""
    server = tcp_server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


LOCKED = (
    "torch's TCPStore.list_keys holds Python's global lock while it waits for its answer, which "
    "the kit's proxy, a thread of the same process, cannot bring then (test_c10d_losses.py does "
    "the same without it)"
)


class _Tcp:
    @pytest.fixture
    def target(self, tcp: ProcessServer, request: pytest.FixtureRequest) -> Iterator[Target]:
        faults = {f"test_{each.name}" for each in request.cls.clauses if each.group == "faults"}
        config: dict[str, Any] = (
            {"read_timeout": FAULTS_READ_TIMEOUT} if request.node.name in faults else {}
        )
        target = TcpStoreTarget(tcp, **config)
        yield target
        target.close()


@marked(pytest.mark.full, *LONG)
class TestTcpStoreBackend(_Tcp, BackendSuite):
    pass


@marked(pytest.mark.full, *LONG)
class TestTcpStoreRoster(_Tcp, RosterSuite):
    pass


@marked(pytest.mark.full, *LONG)
class TestTcpStoreWatch(_Tcp, WatchSuite):
    pass


@deviates("store_calls_in_a_black_hole_fail_in_time", LOCKED, run=False)
@deviates("store_calls_over_a_cut_network_fail_in_time", LOCKED, run=False)
@deviates("store_calls_whose_answers_are_all_lost_fail_in_time", LOCKED, run=False)
@pytest.mark.full
class TestTcpStoreStore(_Tcp, StoreSuite):
    pass


@marked(pytest.mark.full, "membership", "closing", "outages", "torch's handler")
class TestTcpStoreHandler(HandlerSuite):
    @pytest.fixture
    def target(self, tcp: ProcessServer) -> Iterator[Target]:
        target = TcpStoreTarget(tcp, without={"server_clock": NO_CLOCK})
        yield target
        target.close()
