"""Training jobs under torchrun: nodes that come late, are lost or end, and servers that restart.

Every clause takes ten seconds and more, most of them for Python to import torch in each process.
Those of the group ``torchrun smoke`` say whether a backend serves torchrun at all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rdzv.conformance.target import Target
from rdzv.conformance.torchrun_kit import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    KILL_BEFORE_CONFIRM,
    LIVENESS_WINDOW_SECONDS,
    Agent,
    Job,
    torchrun_book,
)

smoke = torchrun_book("torchrun smoke")
restart_smoke = torchrun_book("torchrun smoke", controls=("restart",))
case = torchrun_book("torchrun")
dated = torchrun_book("torchrun", needs=("server_clock",))
wiping = torchrun_book("torchrun", controls=("wipe",))
restarting_empty = torchrun_book("torchrun", controls=("empty_restart",))

REJOIN_LIMIT_SECONDS = LIVENESS_WINDOW_SECONDS + 2 * KEEP_ALIVE_INTERVAL_SECONDS + 1.0
NOTICE_SPREAD_SECONDS = 0.05
OUTAGE_SECONDS = LIVENESS_WINDOW_SECONDS + KEEP_ALIVE_INTERVAL_SECONDS
"""Long enough for everybody to look lost to everybody."""


# ------------------------------------------------------------------------------------- the smoke


@smoke
def a_late_node_joins_a_running_job_and_both_finish(target: Target) -> None:
    with Job(target, "1:2") as job:
        first = job.start("first")
        alone = job.wait_for_world(first)
        late = job.start("late")
        both = job.wait_for_world(first, late)
        assert both.agents == (first, late), "a survivor keeps its rank, and rank 0 is one"
        assert both.master != alone.master
        job.finish(first, late)


@smoke
def the_loss_of_a_node_is_survived(target: Target) -> None:
    with Job(target, "2:3", max_restarts=3) as job:
        agents = [job.start(name) for name in ("first", "second", "third")]
        world = job.wait_for_world(*agents)
        *rest, lost = world.agents
        lost.kill_node()
        smaller = job.wait_for_world(*rest)
        assert smaller.agents == tuple(rest)
        job.finish(*rest)


@restart_smoke
def training_goes_on_while_the_server_restarts(target: Target) -> None:
    outlive_a_restart(target, keep_data=True)


# -------------------------------------------------------------------------------------- arriving


@dated
def a_job_scales_up_without_restarts_to_spare(target: Target) -> None:
    """An agent that stopped its worker too early would fail the others' workers, and the job."""
    with Job(target, "2:3", max_restarts=0) as job:
        first, second = job.start("first"), job.start("second")
        job.wait_for_world(first, second)
        third = job.start("third")
        world = job.wait_for_world(first, second, third)
        assert world.agents[2] == third
        job.finish(first, second, third)


@case
def a_surplus_node_parks_and_takes_the_place_of_a_dead_one(target: Target) -> None:
    join_timeout_seconds = 3.0
    with Job(target, "2:2", collective=False) as job:
        first, second = job.start("first"), job.start("second")
        world = job.wait_for_world(first, second)
        surplus = job.start("surplus", traced=True, join_timeout=str(join_timeout_seconds))
        arrived_at = surplus.wait_for_trace("joining")["time"]

        # It has no join deadline while parked, and it disturbs nobody.
        job.wait_until(
            "the surplus node has waited for twice its join timeout",
            lambda: time.time() > arrived_at + 2 * join_timeout_seconds,
        )
        assert surplus.exit_code is None, surplus.log_tail()
        assert job.wait_for_world(first, second) == world
        assert first.workers_started == second.workers_started == 1

        second.kill_node()
        replaced = job.wait_for_world(first, surplus)
        assert replaced.agents == (first, surplus)
        job.finish(first, surplus)


@case
def a_joiner_that_times_out_does_not_close_the_running_job(target: Target) -> None:
    """The runners are paused for less than the liveness window, so that nobody lets it in."""
    with Job(target, "2:3") as job:
        first, second = job.start("first"), job.start("second")
        job.wait_for_world(first, second)
        joiner = job.start("joiner", traced=True, join_timeout="1.5")
        joiner.wait_for_trace("joining")
        for agent in (first, second):
            agent.pause_agent()
        try:
            failure = joiner.wait_for_trace("join_failed")
        finally:
            for agent in (first, second):
                agent.resume_node()
        assert failure["error"] == "RendezvousTimeoutError", failure
        assert joiner.wait_for_exit() == 1
        # The members of a closed run would go on, but nobody could join them.
        third = job.start("third")
        job.wait_for_world(first, second, third)
        job.finish(first, second, third)


@case
def a_lonely_node_that_times_out_does_not_close_the_run(target: Target) -> None:
    with Job(target, "2:3", collective=False) as job:
        lonely = job.start("lonely", traced=True, join_timeout="1")
        assert lonely.wait_for_exit() == 1
        failure = lonely.trace("join_failed")[0]
        assert failure["error"] == "RendezvousTimeoutError", lonely.log_tail()
        first, second = job.start("first"), job.start("second")
        job.wait_for_world(first, second)
        job.finish(first, second)


# ------------------------------------------------------------------------------------ being lost


@case
def the_loss_of_rank_0_gives_the_others_a_new_common_master(target: Target) -> None:
    with Job(target, "2:3", max_restarts=3) as job:
        agents = [job.start(name) for name in ("first", "second", "third")]
        world = job.wait_for_world(*agents)
        lost, *rest = world.agents
        lost.kill_node()
        smaller = job.wait_for_world(*rest)
        assert smaller.master != world.master
        job.finish(*rest)


@case
def a_coordinator_killed_between_freezing_and_final_is_survived(target: Target) -> None:
    """The first node to wait coordinates: its death must be survived as any other's."""
    with Job(target, "2:3", collective=False) as job:
        victim = job.start("victim", fault=KILL_BEFORE_CONFIRM)
        victim.wait_for_trace("joining")
        agents = [job.start(name, traced=True) for name in ("first", "second")]
        die_before_confirming(job, victim, agents)


@case
def a_node_killed_between_freezing_and_final_is_survived(target: Target) -> None:
    with Job(target, "2:3", collective=False) as job:
        agents = [job.start(name, traced=True) for name in ("first", "second")]
        victim = job.start("victim", fault=KILL_BEFORE_CONFIRM)
        die_before_confirming(job, victim, agents)


def die_before_confirming(job: Job, victim: Agent, agents: Sequence[Agent]) -> None:
    victim.wait_for_trace("confirming")
    assert victim.wait_for_exit() == -9
    world = job.wait_for_world(*agents)
    assert len(world.agents) == 2
    job.finish(*agents)


@case
def a_terminated_agent_does_not_close_the_run(target: Target) -> None:
    with Job(target, "2:3", max_restarts=3) as job:
        agents = [job.start(name) for name in ("first", "second", "third")]
        world = job.wait_for_world(*agents)
        leaver, *rest = world.agents[::-1]
        leaver.terminate()
        assert leaver.wait_for_exit() != 0
        smaller = job.wait_for_world(*rest)
        replacement = job.start("replacement")
        job.wait_for_world(*rest, replacement, after=smaller)
        job.finish(*rest, replacement)


@dated
def a_frozen_node_is_left_behind_and_comes_back(target: Target) -> None:
    """The frozen worker holds its peers in a collective, so only the agents can notice."""
    with Job(target, "2:3", max_restarts=0) as job:
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
        assert_noticed_together(agents, notices)
        smaller = job.wait_for_world(*agents, after=world)

        # It ran in a world that has gone on without it: it must notice, and join the present one.
        notices = {agent: len(agent.trace("waiting")) for agent in agents}
        frozen.resume_node()
        job.wait_for_world(*agents, frozen, after=smaller)
        assert_noticed_together(agents, notices)
        job.finish(*agents, frozen)


def assert_noticed_together(agents: Sequence[Agent], before: dict[Agent, int]) -> None:
    """All learnt of the change within the limit.

    A poll by another thread brackets the moment at which the handler's answer turned positive.
    What counts is the least distance of the moments that the brackets allow, so that a poll that
    was late on a busy machine accuses nobody.
    """
    lines = [agent.wait_for_trace("waiting", before[agent] + 1) for agent in agents]
    spread_seconds = max(line["earliest"] for line in lines) - min(line["time"] for line in lines)
    assert spread_seconds <= NOTICE_SPREAD_SECONDS, lines


# ------------------------------------------------------------------------- the end of a run


@case
def a_run_id_works_again_after_a_finished_job(target: Target) -> None:
    places = []
    for _ in range(2):
        with Job(target, "2:2", collective=False, closed_grace="0.5") as job:
            agents = [job.start(name, traced=True) for name in ("first", "second")]
            job.wait_for_world(*agents)
            job.finish(*agents)
            places.append(sorted(agent.trace("joined")[0]["place"] for agent in agents))
    assert places == [[1, 2], [1, 2]], "the second job saw a key of the first"


@dated
def a_finished_run_refuses_newcomers_for_a_while(target: Target) -> None:
    with Job(target, "1:1", collective=False) as job:
        only = job.start("only")
        job.wait_for_world(only)
        job.finish(only)
        late = job.start("late", traced=True)
        failure = late.wait_for_trace("join_failed")
        assert failure["error"] == "RendezvousClosedError", failure
        assert late.wait_for_exit() == 1


# ------------------------------------------------------------------------- what the server does


@wiping
def a_running_job_outlives_the_loss_of_the_backends_data(target: Target) -> None:
    with Job(target, "2:3") as job:
        first, second = job.start("first"), job.start("second")
        world = job.wait_for_world(first, second)
        target.wipe()
        third = job.start("third")
        larger = job.wait_for_world(first, second, third)
        assert larger.agents == (*world.agents, third)
        if "server_clock" not in target.without:
            assert first.workers_started == second.workers_started == 2
        job.finish(first, second, third)


@restarting_empty
def training_goes_on_while_the_server_restarts_empty(target: Target) -> None:
    outlive_a_restart(target, keep_data=False)


def outlive_a_restart(target: Target, *, keep_data: bool) -> None:
    """No worker is stopped, by the outage or by what follows, and the run can still grow."""
    assert target.server is not None
    with Job(target, "2:3") as job:
        agents = [job.start("first"), job.start("second")]
        world = job.wait_for_world(*agents)
        target.server.kill()
        job.hold_for("no worker is stopped", lambda: undisturbed(agents), OUTAGE_SECONDS)
        target.server.restart(keep_data=keep_data)
        seconds = target.recovery_seconds_max + LIVENESS_WINDOW_SECONDS
        job.hold_for("no worker starts again", lambda: undisturbed(agents), seconds)
        assert job.wait_for_world(*agents) == world
        third = job.start("third")
        larger = job.wait_for_world(*agents, third)
        assert larger.agents == (*world.agents, third)
        job.finish(*agents, third)


@restarting_empty
def nodes_that_wait_meet_after_the_server_restarted_empty(target: Target) -> None:
    assert target.server is not None
    with Job(target, "2:2", collective=False) as job:
        first = job.start("first", traced=True)
        first.wait_for_trace("announced")
        target.server.kill()
        job.hold_for("it goes on to wait", lambda: first.exit_code is None, OUTAGE_SECONDS)
        target.server.restart(keep_data=False)
        second = job.start("second")
        job.wait_for_world(first, second)
        job.finish(first, second)


def undisturbed(agents: Sequence[Agent]) -> bool:
    """Whether all of them run, each with the worker that it began with."""
    return all(agent.exit_code is None and agent.workers_started == 1 for agent in agents)
