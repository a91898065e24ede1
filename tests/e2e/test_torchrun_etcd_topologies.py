"""Training jobs under torchrun on an etcd cluster that loses its leader, over TLS with a user, and
on a server that is away for long."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from integration.etcd_servers import EtcdProcess, GuardedProcess, LeaderServer, cluster
from integration.etcd_targets import EtcdTarget

from rdzv.conformance.suites import Suite
from rdzv.conformance.target import Target
from rdzv.conformance.torchrun_cases import undisturbed
from rdzv.conformance.torchrun_kit import Agent, Job

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

FAULT = pytest.mark.parametrize("fault", ["killed", "paused"])
OUTAGE_SECONDS = 30.0
SETTLING_SECONDS = 5.0
"""After the start of an outage: gRPC then knows that nobody is there."""
WINDOW: dict[str, Any] = {"keep_alive_interval": "2", "keep_alive_max_attempt": "3"}
WINDOW_SECONDS = 6.0
"""Of these jobs: a request may take an interval, and a member that hangs takes half of it."""
LOAD_MAX = 0.05
"""Of one core."""


class TestGuardedTorchrun(Suite, books=("torchrun",), groups=("torchrun smoke",)):
    """Over TLS with client certificates, with a password, and tokens that expire all the time."""

    @pytest.fixture
    def target(self, tmp_path: Path) -> Iterator[Target]:
        with (
            closing(GuardedProcess(tmp_path)) as server,
            closing(EtcdTarget(server, read_timeout="60")) as target,
        ):
            yield target


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[LeaderServer]:
    """A cluster of three, of which the leader is what is tormented."""
    with cluster(tmp_path) as members:
        yield LeaderServer(members)


def lose(leader: LeaderServer, fault: str) -> None:
    (leader.kill if fault == "killed" else leader.pause)()


def find_again(leader: LeaderServer, fault: str) -> None:
    if fault == "killed":
        leader.restart(keep_data=True)
    else:
        leader.resume()


@FAULT
def test_nodes_that_wait_meet_after_the_leader_is_lost(leader: LeaderServer, fault: str) -> None:
    with (
        closing(EtcdTarget(leader, read_timeout="60")) as target,
        Job(target, "3:3", **WINDOW) as job,
    ):
        agents = [job.start(name, traced=True) for name in ("first", "second")]
        for agent in agents:
            agent.wait_for_trace("announced")
        lose(leader, fault)
        last = job.start("last")
        job.wait_for_world(*agents, last)
        assert undisturbed([*agents, last])
        if fault == "killed":  # one that hung would end leases that it takes for expired
            find_again(leader, fault)
        job.finish(*agents, last)


@FAULT
def test_training_goes_on_after_the_leader_is_lost(leader: LeaderServer, fault: str) -> None:
    with (
        closing(EtcdTarget(leader, read_timeout="60")) as target,
        Job(target, "2:3", **WINDOW) as job,
    ):
        agents = [job.start(name) for name in ("first", "second")]
        world = job.wait_for_world(*agents)
        lose(leader, fault)
        seconds = target.recovery_seconds_max + WINDOW_SECONDS
        job.hold_for("no worker is stopped", lambda: undisturbed(agents), seconds)
        find_again(leader, fault)
        job.hold_for("no worker stops", lambda: undisturbed(agents), WINDOW_SECONDS)
        assert job.wait_for_world(*agents) == world
        third = job.start("third")
        larger = job.wait_for_world(*agents, third)
        assert larger.agents == (*world.agents, third)
        job.finish(*agents, third)


def test_an_outage_of_thirty_seconds_costs_agents_nothing(tmp_path: Path) -> None:
    with (
        closing(EtcdProcess(tmp_path)) as server,
        closing(EtcdTarget(server, read_timeout="60")) as target,
        Job(target, "2:3", **WINDOW) as job,
    ):
        agents = [job.start(name) for name in ("first", "second")]
        world = job.wait_for_world(*agents)
        server.kill()
        job.hold_for("no worker is stopped", lambda: undisturbed(agents), SETTLING_SECONDS)
        threads = {agent: {threads_of(agent)} for agent in agents}
        used = {agent: processor_seconds(agent) for agent in agents}
        started = time.monotonic()

        def all_is_well() -> bool:
            for agent in agents:
                threads[agent].add(threads_of(agent))
            return undisturbed(agents)

        job.hold_for("no worker is stopped", all_is_well, OUTAGE_SECONDS)
        seconds = time.monotonic() - started
        loads = {agent: (processor_seconds(agent) - used[agent]) / seconds for agent in agents}
        server.restart(keep_data=True)
        assert max(loads.values()) < LOAD_MAX, loads
        # One of gRPC's is there while it tries to connect.
        assert all(max(counts) - min(counts) <= 1 for counts in threads.values()), threads
        back = target.recovery_seconds_max + WINDOW_SECONDS
        job.hold_for("no worker starts again", lambda: undisturbed(agents), back)
        assert job.wait_for_world(*agents) == world
        job.finish(*agents)


def threads_of(agent: Agent) -> int:
    """Of the agent's own process, gRPC's and torch's included."""
    return len(os.listdir(f"/proc/{agent.pid}/task"))


def processor_seconds(agent: Agent) -> float:
    fields = Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()
    user, system = fields[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
