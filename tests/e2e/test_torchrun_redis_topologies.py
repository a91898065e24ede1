"""Training jobs under torchrun on Redis behind Sentinels, as a cluster, and over TLS."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from integration.redis_topologies import NAMES, Topologies, TopologyTarget

from rdzv.conformance.suites import Suite
from rdzv.conformance.target import Target
from rdzv.conformance.torchrun_cases import undisturbed
from rdzv.conformance.torchrun_kit import LIVENESS_WINDOW_SECONDS, Job

pytestmark = pytest.mark.full

KILL = pytest.mark.parametrize("kill", [True, False], ids=["killed", "asked"])


@pytest.fixture(scope="module")
def topologies() -> Iterator[Topologies]:
    with closing(Topologies()) as topologies:
        yield topologies


@pytest.fixture
def group(request: pytest.FixtureRequest, topologies: Topologies) -> Iterator[Any]:
    """A group of Sentinels with master and replica, whole at the beginning of each test."""
    group = topologies.get(request, "redis-sentinel")
    yield group
    group.mend()


class TestTopologyTorchrun(Suite, books=("torchrun",), groups=("torchrun smoke",)):
    """A late node, a lost node, and all servers of a topology restarted with their data."""

    @pytest.fixture(params=NAMES)
    def target(self, request: pytest.FixtureRequest, topologies: Topologies) -> Iterator[Target]:
        target = TopologyTarget(topologies.get(request, request.param), read_timeout="60")
        yield target
        target.close()


@pytest.mark.timeout(240)
@KILL
def test_nodes_that_wait_meet_after_a_failover(group: Any, kill: bool) -> None:
    with closing(TopologyTarget(group, read_timeout="60")) as target, Job(target, "3:3") as job:
        agents = [job.start(name, traced=True) for name in ("first", "second")]
        for agent in agents:
            agent.wait_for_trace("announced")
        group.settle()
        group.failover(kill=kill)
        assert all(agent.exit_code is None for agent in agents), "they go on to wait"
        last = job.start("last")
        job.wait_for_world(*agents, last)
        assert undisturbed([*agents, last])
        job.finish(*agents, last)


@pytest.mark.timeout(240)
@KILL
def test_training_goes_on_during_a_failover(group: Any, kill: bool) -> None:
    with closing(TopologyTarget(group, read_timeout="60")) as target, Job(target, "2:3") as job:
        agents = [job.start(name) for name in ("first", "second")]
        world = job.wait_for_world(*agents)
        group.settle()
        failing = threading.Thread(target=group.failover, kwargs={"kill": kill})
        failing.start()
        job.hold_for(
            "no worker is stopped",
            lambda: undisturbed(agents),
            target.recovery_seconds_max + LIVENESS_WINDOW_SECONDS,
        )
        failing.join()
        # The former master comes back, as a replica: nobody takes it for the master.
        group.mend()
        job.hold_for("no worker stops", lambda: undisturbed(agents), LIVENESS_WINDOW_SECONDS)
        assert job.wait_for_world(*agents) == world
        third = job.start("third")
        larger = job.wait_for_world(*agents, third)
        assert larger.agents == (*world.agents, third)
        job.finish(*agents, third)


@pytest.mark.timeout(240)
def test_training_goes_on_when_a_hung_master_comes_back(group: Any) -> None:
    """It takes itself for the master until a Sentinel tells it: what is written there is lost."""
    with closing(TopologyTarget(group, read_timeout="60")) as target, Job(target, "2:3") as job:
        agents = [job.start(name) for name in ("first", "second")]
        world = job.wait_for_world(*agents)
        group.settle()
        hung = group.master()
        hung.pause()
        try:
            group.wait_for_another(hung)
        finally:
            hung.resume()
        job.hold_for(
            "no worker is stopped",
            lambda: undisturbed(agents),
            target.recovery_seconds_max + LIVENESS_WINDOW_SECONDS,
        )
        group.settle()
        third = job.start("third")
        larger = job.wait_for_world(*agents, third)
        assert larger.agents == (*world.agents, third)
        job.finish(*agents, third)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", NAMES)
def test_a_lost_node_joins_again(
    request: pytest.FixtureRequest, topologies: Topologies, name: str
) -> None:
    with (
        closing(TopologyTarget(topologies.get(request, name), read_timeout="60")) as target,
        Job(target, "2:3", max_restarts=3) as job,
    ):
        agents = [job.start(each) for each in ("first", "second", "third")]
        world = job.wait_for_world(*agents)
        *rest, lost = world.agents
        lost.kill_node()
        smaller = job.wait_for_world(*rest)
        again = job.start("again")
        larger = job.wait_for_world(*rest, again, after=smaller)
        assert larger.agents == (*rest, again)
        job.finish(*rest, again)


@pytest.mark.timeout(240)
def test_training_goes_on_while_a_node_of_the_cluster_is_away(
    request: pytest.FixtureRequest, topologies: Topologies
) -> None:
    """Without replicas its slots are nobody's until it is back."""
    cluster = topologies.get(request, "redis-cluster")
    with closing(TopologyTarget(cluster, read_timeout="60")) as target, Job(target, "2:3") as job:
        agents = [job.start(name) for name in ("first", "second")]
        world = job.wait_for_world(*agents)
        for member in cluster.members:
            member.kill()
            try:
                job.hold_for(
                    "no worker is stopped", lambda: undisturbed(agents), LIVENESS_WINDOW_SECONDS
                )
            finally:
                member.restart(keep_data=True)
            cluster.settle()
        job.hold_for("no worker stops", lambda: undisturbed(agents), LIVENESS_WINDOW_SECONDS)
        third = job.start("third")
        larger = job.wait_for_world(*agents, third)
        assert larger.agents == (*world.agents, third)
        job.finish(*agents, third)
