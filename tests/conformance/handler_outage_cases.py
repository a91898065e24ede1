"""A backend that loses its data, hangs, or is away for longer than the liveness window."""

from __future__ import annotations

import time
from collections.abc import Callable

from rdzv.conformance.handler_kit import (
    LIVENESS_WINDOW_SECONDS,
    PATIENCE_SECONDS,
    Job,
    Node,
    handler_book,
    hold_for,
    notice_moments,
    results,
    wait_until,
)
from rdzv.conformance.target import Server, Target

wiping = handler_book("outages", controls=("wipe",))
pausing = handler_book("outages", controls=("pause",))
restarting = handler_book("outages", controls=("restart",))
restarting_empty = handler_book("outages", controls=("empty_restart",))

OUTAGE_SECONDS = LIVENESS_WINDOW_SECONDS + 1.0
"""Long enough for everybody to look lost to everybody."""
AFTERWARDS_SECONDS = LIVENESS_WINDOW_SECONDS + 1.0
"""By then, who would be taken for lost has been."""


@wiping
def runners_refill_a_backend_that_lost_its_data(target: Target) -> None:
    with Job(target, "2:3") as job:
        nodes, _ = job.start(3)
        before = nodes[0].state.round_id
        target.wipe()
        wait_until("the document is back", lambda: job.document_round == before)
        hold_for("nobody re-joins", lambda: not any_noticed(nodes), AFTERWARDS_SECONDS)
        assert not nodes[0].state.lost
        assert len(job.entries) == 3


@wiping
def nodes_that_wait_find_each_other_on_a_backend_that_lost_its_data(target: Target) -> None:
    with Job(target, "2:2") as job:
        first = job.node()
        joining = first.join()
        wait_until("it waits", lambda: first.is_announced)
        target.wipe()
        second = job.node()
        results([first, second], [joining, second.join()])


@pausing
def nodes_outlive_a_server_that_hangs(target: Target) -> None:
    def pause_and_resume(server: Server) -> None:
        server.pause()
        try:
            target.let_pass(OUTAGE_SECONDS)
        finally:
            server.resume()

    nodes_outlive(target, pause_and_resume)


@restarting
def nodes_outlive_a_server_that_restarts(target: Target) -> None:
    nodes_outlive(target, lambda server: kill_and_restart(target, server, keep_data=True))


@restarting_empty
def nodes_outlive_a_server_that_restarts_empty(target: Target) -> None:
    nodes_outlive(target, lambda server: kill_and_restart(target, server, keep_data=False))


def nodes_outlive(target: Target, outage: Callable[[Server], None]) -> None:
    """Of those that run nobody is stopped or taken for lost, those that wait go on to wait, and
    both runs are open to newcomers afterwards."""
    assert target.server is not None
    patience_seconds = target.recovery_seconds_max + PATIENCE_SECONDS
    join_timeout_seconds = OUTAGE_SECONDS + 2 * patience_seconds
    with (
        Job(target, "2:3", run_id="running", outage_timeout=120) as running,
        Job(target, "2:2", run_id="waiting", join_timeout=join_timeout_seconds) as waiting,
    ):
        nodes, _ = running.start(2)
        before = nodes[0].state.round_id
        first = waiting.node()
        joining = first.join()
        wait_until("it waits", lambda: first.is_announced)

        outage(target.server)
        assert not any_noticed(nodes)
        assert not joining.done()
        back_at = time.monotonic()
        wait_until(
            "all have heard of it again",
            lambda: all(node.heard_at > back_at for node in (*nodes, first)),
            patience_seconds,
        )
        second = waiting.node()
        results([first, second], [joining, second.join()])
        hold_for("nobody re-joins", lambda: not any_noticed(nodes), AFTERWARDS_SECONDS)
        assert running.document_round == before
        assert not any(node.state.lost or node.handler.is_closed() for node in nodes)
        late = running.node()
        joining = late.join()
        notice_moments(nodes)
        results([*nodes, late], [*(node.join() for node in nodes), joining])


def kill_and_restart(target: Target, server: Server, *, keep_data: bool) -> None:
    server.kill()
    target.let_pass(OUTAGE_SECONDS)
    server.restart(keep_data=keep_data)


def any_noticed(nodes: list[Node]) -> bool:
    return any(node.noticed for node in nodes)
