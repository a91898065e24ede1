"""The conformance kit on a real etcd."""

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
    deviates,
    marked,
)
from rdzv.conformance.target import Target

from .etcd_targets import EtcdTarget, OneMember

NO_CLOCK = "etcd tells when a lease ends only to those who ask for it by its number"
GRPC_CLOCK = "gRPC's deadlines rest on time.time(), which the clause sets for Python alone"


class _Etcd:
    @pytest.fixture
    def target(self, request: pytest.FixtureRequest) -> Iterator[Target]:
        target = EtcdTarget(OneMember(server_or_not_run(request, "etcd")))
        yield target
        target.close()


@marked(pytest.mark.full, "faults", "concurrency")
class TestEtcdBackend(_Etcd, BackendSuite):
    pass


@marked(pytest.mark.full, "faults")
@deviates("the_next_expiry_is_told", NO_CLOCK)
@deviates("the_clock_of_this_machine_expires_nobody", GRPC_CLOCK)
class TestEtcdRoster(_Etcd, RosterSuite):
    pass


@marked(pytest.mark.full, "faults")
class TestEtcdWatch(_Etcd, WatchSuite):
    pass


@marked(pytest.mark.full, "faults", "concurrency")
class TestEtcdStore(_Etcd, StoreSuite):
    pass


@marked(pytest.mark.full, "membership", "closing", "outages", "torch's handler")
class TestEtcdHandler(_Etcd, HandlerSuite):
    pass
