"""What becomes of a run: it ends, its id is used again, its backend forgets everything."""

from __future__ import annotations

from collections.abc import Callable

from .harness import Agent, Job, Target

NewJob = Callable[..., Job]


def _places(*agents: Agent) -> list[int]:
    """In which place each agent added to a counter in its first round's store."""
    return sorted(agent.trace("joined")[0]["place"] for agent in agents)


def test_run_id_works_again_after_a_finished_job(new_job: NewJob) -> None:
    places = []
    for _ in range(2):
        job = new_job("2:2", run_id="again", collective=False, closed_grace="0.5")
        agents = [job.start(name, traced=True) for name in ("first", "second")]
        job.wait_for_world(*agents)
        job.finish(*agents)
        places.append(_places(*agents))
    assert places == [[1, 2], [1, 2]], "the second job saw a key of the first"


def test_finished_run_refuses_newcomers_for_a_while(new_job: NewJob) -> None:
    job = new_job("1:1", run_id="ended", collective=False)
    only = job.start("only")
    job.wait_for_world(only)
    job.finish(only)
    late = new_job("1:1", run_id="ended", collective=False).start("late", traced=True)
    failure = late.wait_for_trace("join_failed")
    assert failure["error"] == "RendezvousClosedError", failure
    assert late.wait_for_exit() == 1


def test_running_job_outlives_the_loss_of_the_backends_data(
    new_job: NewJob, target: Target
) -> None:
    job = new_job("2:3")
    first, second = job.start("first"), job.start("second")
    world = job.wait_for_world(first, second)
    target.wipe()
    third = job.start("third")
    larger = job.wait_for_world(first, second, third)
    assert larger.agents == (*world.agents, third)
    for agent in (first, second):
        assert [line["event"] for line in agent.progress()].count("started") == 2
    job.finish(first, second, third)
