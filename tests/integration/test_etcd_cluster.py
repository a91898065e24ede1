"""etcd clusters of three: leaders that die or hang, members that cannot be reached."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from rdzv.backends.etcd import EtcdRendezvousBackend
from rdzv.backends.etcd_options import EtcdOptions
from rdzv.conformance.handler_outage_cases import (
    nodes_outlive_a_server_that_hangs,
    nodes_outlive_a_server_that_restarts,
)
from rdzv.conformance.store_kit import Background
from rdzv.conformance.target import Target
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question
from rdzv.stores.etcd import EtcdStore

from .etcd_servers import EtcdMember, LeaderServer, cluster, leader_of
from .etcd_targets import EtcdTarget
from .operations import TTL_SECONDS, reach

RECOVERY_SECONDS_MAX = 30.0
OPTIONS = EtcdOptions(read_timeout_seconds=2.0)


@pytest.fixture
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EtcdMember]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as members:
        yield members


def endpoint_of(members: list[EtcdMember]) -> str:
    return ";".join(member.endpoint() for member in members)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_a_leader_is_lost(members: list[EtcdMember], opened: Any, fault: str) -> None:
    endpoint = endpoint_of(members)
    backends = [opened(EtcdRendezvousBackend(endpoint, "run", OPTIONS)) for _ in range(3)]
    store = opened(EtcdStore(endpoint, "run", timedelta(seconds=60), options=OPTIONS))
    _, token, _ = reach(lambda: backends[0].set_state(b"1"))
    for number, backend in enumerate(backends):
        backend.announce(Entry(f"node{number}", b""), TTL_SECONDS, Question())
    assert store.add("n", 1) == 1
    waits = [
        Background(partial(reach, partial(backend.wait_for_change, token, TTL_SECONDS)))
        for backend in backends
    ]
    waits.append(Background(lambda: store.get("k")))
    for wait in waits:
        wait.still_blocked()
    leader = leader_of(members)
    (leader.kill if fault == "killed" else leader.pause)()
    started = time.monotonic()
    for number, backend in enumerate(backends):
        pulse = reach(partial(backend.beat, f"node{number}", TTL_SECONDS, Question()))
        assert (pulse.present, pulse.live, pulse.token) == (True, 3, token)
    assert store.add("n", 1) == 2
    found = reach(lambda: backends[1].set_state(b"2", token))
    assert found[:1] == (b"2",)
    store.set("k", "v")
    assert [wait.result() for wait in waits] == [found[:2]] * 3 + [b"v"]
    assert time.monotonic() - started < RECOVERY_SECONDS_MAX
    if fault == "paused":
        leader.resume()
    assert reach(backends[2].get_state) == found[:2]


@pytest.mark.full
@pytest.mark.parametrize(
    "clause", [nodes_outlive_a_server_that_hangs, nodes_outlive_a_server_that_restarts]
)
def test_running_and_waiting_nodes_outlive_the_loss_of_a_leader(
    members: list[EtcdMember], clause: Callable[[Target], None]
) -> None:
    with contextlib.closing(EtcdTarget(LeaderServer(members))) as target:
        clause(target)


@pytest.mark.full
def test_a_cluster_without_a_majority_says_so_and_comes_back(
    members: list[EtcdMember], opened: Any
) -> None:
    backend = opened(EtcdRendezvousBackend(endpoint_of(members), "run", OPTIONS))
    store = opened(EtcdStore(endpoint_of(members), "run", timedelta(seconds=60), options=OPTIONS))
    _, token, _ = reach(lambda: backend.set_state(b"1"))
    threads = threading.active_count()
    leader = leader_of(members)
    others = [member for member in members if member is not leader]
    leader.kill()
    others[0].kill()
    adding = Background(lambda: store.add("n", 1)).still_blocked()
    for _ in range(3):
        with pytest.raises(RendezvousConnectionError):
            backend.set_state(b"2", token)
    assert threading.active_count() <= threads + 3, "the one that adds, and gRPC's own"
    leader.restart(keep_data=True)
    assert adding.result() == 1
    assert reach(backend.get_state) == (b"1", token)


def test_a_member_that_cannot_be_reached_is_passed_over(
    members: list[EtcdMember], opened: Any
) -> None:
    endpoint = f"127.0.0.1:1;{endpoint_of(members)}"
    started = time.monotonic()
    backend = opened(EtcdRendezvousBackend(endpoint, "run"))
    reach(backend.open)
    assert reach(lambda: backend.set_state(b"1"))[2]
    store = opened(EtcdStore(endpoint, "run", timedelta(seconds=20)))
    assert store.add("n", 1) == 1
    assert time.monotonic() - started < RECOVERY_SECONDS_MAX
