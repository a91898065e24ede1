"""Nodes that are lost: killed, frozen, terminated. A lost node means its agent and its workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from .harness import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    LIVENESS_WINDOW_SECONDS,
    Agent,
    Job,
    wait_until,
)

NewJob = Callable[..., Job]

REJOIN_LIMIT_SECONDS = LIVENESS_WINDOW_SECONDS + 2 * KEEP_ALIVE_INTERVAL_SECONDS + 1.0
NOTICE_SPREAD_SECONDS = 0.05


def test_loss_of_rank_0_gives_the_others_a_new_common_master(new_job: NewJob) -> None:
    job = new_job("2:3", max_restarts=3)
    agents = [job.start(name) for name in ("first", "second", "third")]
    world = job.wait_for_world(*agents)
    lost, *rest = world.agents
    lost.kill_node()
    smaller = job.wait_for_world(*rest)
    assert smaller.master != world.master
    job.finish(*rest)


@pytest.mark.parametrize("victim_is_first", [True, False], ids=["coordinator", "another"])
def test_node_killed_between_freezing_and_final(new_job: NewJob, victim_is_first: bool) -> None:
    """The first node to wait coordinates: its death must be survived as any other's."""
    job = new_job("2:3", collective=False)
    fault = "kill_before_confirm"
    agents = []
    if victim_is_first:
        victim = job.start("victim", fault=fault)
        victim.wait_for_trace("joining")
        agents = [job.start(name, traced=True) for name in ("first", "second")]
    else:
        agents = [job.start(name, traced=True) for name in ("first", "second")]
        victim = job.start("victim", fault=fault)
    victim.wait_for_trace("confirming")
    assert victim.wait_for_exit() == -9
    world = job.wait_for_world(*agents)
    assert len(world.agents) == 2
    job.finish(*agents)


def test_workers_of_the_example_end_with_an_agent_that_is_killed(new_job: NewJob) -> None:
    job = new_job("1:1", example_epochs=10_000)
    agent = job.start("only")
    job.wait_for_world(agent)
    assert agent.worker_pids()
    agent.kill_agent()
    wait_until("the orphaned worker ends", lambda: not agent.worker_pids(), 5.0, [agent])


def test_terminated_agent_does_not_close_the_run(new_job: NewJob) -> None:
    job = new_job("2:3", max_restarts=3)
    agents = [job.start(name) for name in ("first", "second", "third")]
    world = job.wait_for_world(*agents)
    leaver, *rest = world.agents[::-1]
    leaver.terminate()
    assert leaver.wait_for_exit() != 0
    smaller = job.wait_for_world(*rest)
    replacement = job.start("replacement")
    job.wait_for_world(*rest, replacement, after=smaller)
    job.finish(*rest, replacement)


def test_frozen_node_is_left_behind_and_comes_back(new_job: NewJob) -> None:
    """The frozen worker holds its peers in a collective, so only the agents can notice."""
    job = new_job("2:3", max_restarts=0)
    agents = [job.start(name, traced=True) for name in ("first", "second")]
    frozen = job.start("frozen", traced=True, max_restarts=3)
    world = job.wait_for_world(*agents, frozen)
    joins = {agent: len(agent.trace("joining")) for agent in agents}
    notices = {agent: len(agent.trace("waiting")) for agent in agents}

    frozen_at = time.time()
    frozen.pause_node()
    for agent in agents:
        noticed = agent.wait_for_trace("waiting", notices[agent] + 1)
        assert noticed["earliest"] - frozen_at <= REJOIN_LIMIT_SECONDS
        rejoined = agent.wait_for_trace("joining", joins[agent] + 1)
        assert rejoined["time"] - frozen_at <= REJOIN_LIMIT_SECONDS
    _assert_noticed_together(agents, notices)
    smaller = job.wait_for_world(*agents, after=world)

    # It ran in a world that has gone on without it: it must notice, and join the present one.
    notices = {agent: len(agent.trace("waiting")) for agent in agents}
    frozen.resume_node()
    job.wait_for_world(*agents, frozen, after=smaller)
    _assert_noticed_together(agents, notices)
    job.finish(*agents, frozen)


def _assert_noticed_together(agents: Sequence[Agent], before: dict[Agent, int]) -> None:
    """All learnt of the change within the limit.

    A poll by another thread brackets the moment at which the handler's answer turned positive.
    What counts is the least distance of the moments that the brackets allow, so that a poll that
    was late on a busy machine accuses nobody.
    """
    lines = [agent.wait_for_trace("waiting", before[agent] + 1) for agent in agents]
    spread_seconds = max(line["earliest"] for line in lines) - min(line["time"] for line in lines)
    assert spread_seconds <= NOTICE_SPREAD_SECONDS, lines
