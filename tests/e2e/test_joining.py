"""Nodes that come late, too many, or in vain."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from .harness import Job, wait_until

NewJob = Callable[..., Job]

SCALE_UP_ATTEMPTS = 20
USUAL_SCALE_UP_ATTEMPTS = 3


def test_late_node_joins_a_running_job_and_both_finish(new_job: NewJob) -> None:
    job = new_job("1:2")
    first = job.start("first")
    alone = job.wait_for_world(first)
    late = job.start("late")
    both = job.wait_for_world(first, late)
    assert both.agents == (first, late), "a survivor keeps its rank, and rank 0 is one"
    assert both.master != alone.master
    job.finish(first, late)


@pytest.mark.parametrize(
    "attempt",
    [
        pytest.param(attempt, marks=[] if attempt <= USUAL_SCALE_UP_ATTEMPTS else pytest.mark.full)
        for attempt in range(1, SCALE_UP_ATTEMPTS + 1)
    ],
)
def test_scale_up_without_restarts_to_spare(new_job: NewJob, attempt: int) -> None:
    """An agent that stopped its worker too early would fail the others' workers, and the job."""
    job = new_job("2:3", max_restarts=0)
    first, second = job.start("first"), job.start("second")
    job.wait_for_world(first, second)
    third = job.start("third")
    world = job.wait_for_world(first, second, third)
    assert world.agents[2] == third
    job.finish(first, second, third)


def test_surplus_node_parks_and_takes_the_place_of_a_dead_one(new_job: NewJob) -> None:
    join_timeout_seconds = 3.0
    job = new_job("2:2", collective=False)
    first, second = job.start("first"), job.start("second")
    world = job.wait_for_world(first, second)
    surplus = job.start("surplus", traced=True, join_timeout=str(join_timeout_seconds))
    arrived_at = surplus.wait_for_trace("joining")["time"]

    # It has no join deadline while parked, and it disturbs nobody.
    wait_until(
        "the surplus node has waited for twice its join timeout",
        lambda: time.time() > arrived_at + 2 * join_timeout_seconds,
        30.0,
        job.agents,
    )
    assert surplus.exit_code is None, surplus.log_tail()
    assert job.wait_for_world(first, second) == world
    for agent in (first, second):
        assert [line["event"] for line in agent.progress()].count("started") == 1

    second.kill_node()
    replaced = job.wait_for_world(first, surplus)
    assert replaced.agents == (first, surplus)
    job.finish(first, surplus)


def test_joiner_that_times_out_does_not_close_the_running_job(new_job: NewJob) -> None:
    """The runners are paused for less than the liveness window, so that nobody lets it in."""
    job = new_job("2:3")
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


def test_lonely_node_that_times_out_does_not_close_the_run(new_job: NewJob) -> None:
    job = new_job("2:3", collective=False)
    lonely = job.start("lonely", traced=True, join_timeout="1")
    assert lonely.wait_for_exit() == 1
    assert lonely.trace("join_failed")[0]["error"] == "RendezvousTimeoutError", lonely.log_tail()
    first, second = job.start("first"), job.start("second")
    job.wait_for_world(first, second)
    job.finish(first, second)
