"""Training jobs under torchrun on torch's own stores: hosted by an agent, served alone, in a file;
and torch's own backends, which rdzv leaves as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.c10d_targets import NO_CLOCK, FileStoreTarget, TcpStoreTarget, tcp_server

from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.registered import RegisteredTarget
from rdzv.conformance.servers.local import free_port
from rdzv.conformance.suites import TorchrunSuite, deviates, marked
from rdzv.conformance.target import Target
from rdzv.conformance.torchrun_cases import a_late_node_joins_a_running_job_and_both_finish
from rdzv.conformance.torchrun_kit import Agent, Job

READ_TIMEOUT = "60"
HOSTS = "this node hosts the store"
AT_ONCE_ATTEMPTS = 20
EARLIER_SECONDS = 5


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    server = tcp_server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture
def hosted() -> Iterator[Target]:
    """A store that the first agent hosts."""
    target = RegisteredTarget("tcpstore", f"127.0.0.1:{free_port()}")
    yield target
    target.close()


@deviates("a_finished_run_refuses_newcomers_for_a_while", NO_CLOCK)
@marked(pytest.mark.full, "torchrun")
class TestTcpStoreTorchrun(TorchrunSuite):
    @pytest.fixture
    def target(self, tcp: ProcessServer) -> Iterator[Target]:
        target = TcpStoreTarget(tcp, read_timeout=READ_TIMEOUT)
        yield target
        target.close()


@marked(pytest.mark.full, "torchrun", "torchrun smoke")
class TestFileStoreTorchrun(TorchrunSuite):
    @pytest.fixture
    def target(self, tmp_path: Path) -> Iterator[Target]:
        target = FileStoreTarget(tmp_path / "rdzv.store", read_timeout=READ_TIMEOUT)
        yield target
        target.close()


def test_late_node_joins_a_job_whose_agent_hosts_the_store(hosted: Target) -> None:
    """Torch's own c10d fails here: the late node waits for an address that nobody tells."""
    a_late_node_joins_a_running_job_and_both_finish(hosted)


@pytest.mark.full
def test_host_whose_script_ends_first_stays_until_the_other_has_ended(
    hosted: Target, tmp_path: Path
) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import sys, time\ntime.sleep(float(sys.argv[1]))\n")

    def program(agent: Agent) -> list[str]:
        return [str(script), str(1 if agent.name == "host" else 1 + EARLIER_SECONDS)]

    with Job(hosted, "2:2", program=program) as job:
        host = job.start("host")
        job.wait_until("it hosts the store", lambda: HOSTS in host.log())
        other = job.start("other")
        codes = {agent.name: agent.wait_for_exit() for agent in (host, other)}
        logs = "\n".join(agent.log_tail() for agent in (host, other))
        assert codes == {"host": 0, "other": 0}, logs
        for agent in (host, other):
            assert "Traceback" not in agent.log(), logs


@pytest.mark.parametrize(
    "attempt",
    [pytest.param(attempt, marks=pytest.mark.full) for attempt in range(AT_ONCE_ATTEMPTS)],
)
def test_four_agents_started_at_once_on_one_host(hosted: Target, attempt: int) -> None:
    with Job(hosted, "4:4", collective=False) as job:
        agents = [job.start(f"node{number}") for number in range(4)]
        assert set(job.wait_for_world(*agents).agents) == set(agents)
        assert sum(HOSTS in agent.log() for agent in agents) == 1
        job.finish(*agents)


@pytest.mark.full
def test_loss_of_rank_0_that_does_not_host_the_store_is_survived(hosted: Target) -> None:
    with Job(hosted, "2:3", max_restarts=3) as job:
        host = job.start("host", rank_hint="2")
        job.wait_until("it hosts the store", lambda: HOSTS in host.log())
        others = [job.start(f"node{number}", rank_hint=str(number)) for number in range(2)]
        world = job.wait_for_world(host, *others)
        first = world.agents[0]
        assert first is not host
        first.kill_node()
        rest = [agent for agent in world.agents if agent is not first]
        smaller = job.wait_for_world(*rest)
        assert smaller.master != world.master
        job.finish(*rest)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_torchs_own_backends_work_beside_ours(backend: str, hosted: Target) -> None:
    with Job(hosted, "2:2") as job:
        endpoint = f"127.0.0.1:{free_port()}"
        for rank in range(2):
            options = [
                *("--nnodes=2", "--nproc-per-node=1", "--rdzv-id=own"),
                f"--rdzv-backend={backend}",
                f"--rdzv-endpoint={endpoint}",
                *([f"--node-rank={rank}"] if backend == "static" else []),
            ]
            job.launch(f"node{rank}", options)
        job.wait_for_world(*job.agents)
        job.finish(*job.agents)
