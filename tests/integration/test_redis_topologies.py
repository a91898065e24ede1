"""Redis behind Sentinels, as a cluster, and over TLS: the kit, and what a failover costs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from rdzv.backends.redis import RedisBackend
from rdzv.backends.redis_client import RedisConnections, RedisOptions
from rdzv.conformance.fault_kit import Call
from rdzv.conformance.suites import (
    BackendSuite,
    HandlerSuite,
    RosterSuite,
    StoreSuite,
    WatchSuite,
)
from rdzv.conformance.target import Target
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question
from rdzv.stores.redis import RedisStore

from .operations import TTL_SECONDS, use_all
from .redis_members import documented_rights, password_in
from .redis_topologies import NAMES, Topologies, TopologyTarget

# A connection that is reset before its TLS handshake makes Python's ssl module leave a socket to
# the garbage collector (SSLSocket._create raises before it owns what it has detached).
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning"
)
logger = logging.getLogger(__name__)

NODES = 8
SERVED_SECONDS_MAX = 30.0
"""A failover takes about four seconds; Sentinels of a machine that stalls begin anew."""


@pytest.fixture(scope="module")
def topologies() -> Iterator[Topologies]:
    with closing(Topologies()) as topologies:
        yield topologies


@pytest.fixture(params=NAMES)
def topology(request: pytest.FixtureRequest, topologies: Topologies) -> Any:
    return topologies.get(request, request.param)


def test_every_operation_works(topology: Any, opened: Any) -> None:
    endpoint = topology.endpoint()
    use_all(opened(RedisBackend(endpoint, "run")), opened(RedisStore(endpoint, "run")))


@pytest.mark.parametrize("name", ["redis-sentinel", "redis-cluster"])
def test_the_documented_rights_are_enough(
    request: pytest.FixtureRequest, topologies: Topologies, name: str, opened: Any
) -> None:
    topology, rights = topologies.get(request, name), documented_rights()
    topology.on_masters(lambda client: client.execute_command("ACL", "SETUSER", *rights))
    endpoint = topology.endpoint_for(f"{rights[0]}:{password_in(rights)}@")
    use_all(opened(RedisBackend(endpoint, "rights")), opened(RedisStore(endpoint, "rights")))
    wrong = topology.endpoint_for(f"{rights[0]}:wrong@")
    with pytest.raises(RendezvousConnectionError, match="password_file"):
        opened(RedisBackend(wrong, "rights")).open()


def test_a_run_is_followed_to_another_node_of_the_cluster(
    request: pytest.FixtureRequest, topologies: Topologies, opened: Any
) -> None:
    cluster = topologies.get(request, "redis-cluster")
    backend = opened(RedisBackend(cluster.endpoint(), "moving"))
    backend.set_state(b"document")
    key = RedisConnections(cluster.endpoint(), "moving", RedisOptions()).base + b"state"
    cluster.on_masters(lambda client: client.flushall())

    def meanwhile() -> None:
        with pytest.raises(RendezvousConnectionError):
            backend.set_state(b"document")

    cluster.move(key, meanwhile)
    with pytest.raises(RendezvousConnectionError, match="Moved"):
        backend.set_state(b"document")
    _, _, written = backend.set_state(b"document")
    assert written
    assert backend.get_state()[0] == b"document"
    assert opened(RedisBackend(cluster.endpoint(), "moving")).get_state()[0] == b"document"


class _Topology:
    @pytest.fixture
    def target(self, topology: Any) -> Iterator[Target]:
        target = TopologyTarget(topology)
        yield target
        target.close()


@pytest.mark.full
class TestTopologyBackend(_Topology, BackendSuite):
    pass


@pytest.mark.full
class TestTopologyRoster(_Topology, RosterSuite):
    pass


@pytest.mark.full
class TestTopologyWatch(_Topology, WatchSuite):
    pass


@pytest.mark.full
class TestTopologyStore(_Topology, StoreSuite):
    pass


@pytest.mark.full
class TestTopologyHandler(_Topology, HandlerSuite):
    pass


# ------------------------------------------------------------------------------------- failover


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "asked"])
def test_all_nodes_are_served_again_after_a_failover(
    request: pytest.FixtureRequest,
    topologies: Topologies,
    opened: Any,
    kill: bool,
) -> None:
    group = topologies.get(request, "redis-sentinel")
    endpoint, run = group.endpoint(), f"failover {kill}"
    nodes = [opened(RedisBackend(endpoint, run)) for _ in range(NODES)]
    store = opened(RedisStore(endpoint, run, timedelta(seconds=TTL_SECONDS)))
    _, token, _ = nodes[0].set_state(b"document")
    for number, node in enumerate(nodes):
        node.announce(Entry(f"node{number}", b"data"), TTL_SECONDS, Question())
    store.set("key", "value")
    group.settle()
    waiting = Call(lambda: store.get("later")).still_blocked()
    watches = [Call(partial(watched, node, token)).still_blocked() for node in nodes]

    begin, over = time.monotonic(), threading.Event()
    beats = [Call(partial(unserved_until, node, begin, over)) for node in nodes]
    former = group.failover(kill=kill)
    if not kill:
        assert group.wait_until_left(former), "they leave it before it is made a replica"
        logger.info("the former master left after %.1f s", time.monotonic() - begin)
    over.set()
    seconds = [value_of(beat) for beat in beats]
    logger.info("served again after %s s", [round(one, 1) for one in sorted(seconds)])
    assert not kill or min(seconds) > 0.0, "a failover without a failure is none"

    # Whoever waits is told through the new master, and nothing is lost that it had got.
    assert nodes[0].get_state() == (b"document", token)
    assert store.get("key") == b"value"
    assert len(nodes[0].entries()) == NODES
    _, later, _ = nodes[0].set_state(b"later", token)
    store.set("later", "1")
    assert value_of(waiting) == b"1"
    assert [value_of(each) for each in watches] == [(b"later", later)] * NODES
    group.mend()
    assert nodes[0].get_state() == (b"later", later)


def value_of(call: Call) -> Any:
    """What it returns, soon and without an error."""
    return call.outcome((), time.monotonic() + SERVED_SECONDS_MAX).value


def unserved_until(node: RedisBackend, begin: float, over: threading.Event) -> float:
    """Seconds from the beginning until a beat has worked after the last one that had failed."""
    pause, served, seconds = threading.Event(), True, 0.0
    while not (served and over.is_set()):
        try:
            node.beat("node0", TTL_SECONDS, Question())
            if not served:
                served, seconds = True, time.monotonic() - begin
        except RendezvousConnectionError:
            served = False
        pause.wait(0.02)
    return seconds


def watched(node: RedisBackend, token: Any) -> Any:
    """What is written after the token, waited for again whenever the wait fails."""
    pause = threading.Event()
    while True:
        try:
            found = node.wait_for_change(token, TTL_SECONDS)
            if found is not None:
                return found
        except RendezvousConnectionError:
            pause.wait(0.05)
