"""Invariant 10: what a node asks of the backend."""

from __future__ import annotations

import statistics
import threading
from typing import Any

from rdzv.ports import Token

from .handler_kit import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    Job,
    Stopwatch,
    TroubledBackend,
    join_all,
    wait_until,
)

WRITES_PER_ROUND_MAX = 4
"""Of the state: the document or a claim, perhaps another claim, a proposal, the final round."""
CALLS_PER_JOIN_MAX = 10
"""Of a node that does not form the round: seven, if nothing is lost or late."""


class CountingBackend(TroubledBackend):
    """Counts the writes that succeeded, too."""

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        answer = super().set_state(state, token)
        if answer is not None and answer[2]:
            self.calls["written"] += 1
        return answer


class CountingJob(Job):
    """Remembers the backends of its nodes."""

    def __init__(self, nodes: str, **options: Any) -> None:
        super().__init__(nodes, make_backend=self._make, **options)
        self.backends: list[CountingBackend] = []

    def _make(self, run_id: str) -> CountingBackend:
        backend = CountingBackend(self.space, run_id)
        self.backends.append(backend)
        return backend

    def counts(self) -> list[int]:
        """Calls of each node so far."""
        return [sum(backend.calls.values()) - backend.calls["written"] for backend in self.backends]

    def written(self) -> int:
        return sum(backend.calls["written"] for backend in self.backends)


def test_idle_nodes_make_one_call_in_a_keep_alive_interval() -> None:
    intervals = 4
    with CountingJob("50:50") as job:
        job.start(50)
        pause = threading.Event()
        pause.wait(0.1)  # for the beats that follow the join at once
        before, written, watch = job.counts(), job.written(), Stopwatch()
        pause.wait(intervals * KEEP_ALIVE_INTERVAL_SECONDS)
        made = [after - count for after, count in zip(job.counts(), before, strict=True)]
        most = watch.seconds / KEEP_ALIVE_INTERVAL_SECONDS + 1
        assert max(made) <= most
        assert min(made) >= intervals - 1, "they are kept alive all the same"
        assert sum(made) <= 50 * (intervals + 0.5)
        assert job.written() == written, "a keep-alive never writes the state"


def test_what_the_agent_polls_is_answered_from_memory() -> None:
    with CountingJob("2:2") as job:
        nodes, _ = job.start(2)
        for node in nodes:
            node.handler._keep_alive.stop()
            assert node.handler._keep_alive.wait(2 * KEEP_ALIVE_INTERVAL_SECONDS)
        before = job.counts()
        for node in nodes:
            for _ in range(1000):
                node.handler.num_nodes_waiting()
                node.handler.is_closed()
        assert job.counts() == before


def calls_of_a_join(count: int) -> tuple[float, int, int]:
    """Mean calls of a node that joins, the most of any, and how often the state was written; the
    coordinator, who counts the others, is left out of the first two."""
    with CountingJob(f"{count}:{count}") as job:
        nodes = [job.node() for _ in range(count)]
        join_all(nodes)
        coordinator = max(job.backends, key=lambda backend: backend.calls["written"])
        others = [
            calls
            for backend, calls in zip(job.backends, job.counts(), strict=True)
            if backend is not coordinator
        ]
        return statistics.mean(others), max(others), job.written()


def test_a_join_costs_a_node_the_same_in_a_small_and_in_a_large_job() -> None:
    small_mean, _, small_written = calls_of_a_join(8)
    large_mean, large_most, large_written = calls_of_a_join(32)
    assert large_mean <= 1.5 * small_mean + 1
    assert large_most <= CALLS_PER_JOIN_MAX
    assert small_written <= WRITES_PER_ROUND_MAX
    assert large_written <= WRITES_PER_ROUND_MAX


def test_joining_again_costs_no_more_than_joining() -> None:
    with CountingJob("8:8") as job:
        nodes, _ = job.start(8)
        before, written = job.counts(), job.written()
        join_all(nodes)
        made = [after - count for after, count in zip(job.counts(), before, strict=True)]
        assert statistics.median(made) <= CALLS_PER_JOIN_MAX
        # Besides the round's own: that nodes wait, told by the first that left.
        assert job.written() - written <= WRITES_PER_ROUND_MAX + 1
        wait_until("nobody is called back", lambda: not any(node.noticed for node in nodes))
