"""Agents that end without a shutdown, as real processes on a backend that outlives them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rdzv.backends.sql import SqlBackend, SqlOptions
from rdzv.codec import decode_state

from .handler_kit import PATIENCE_SECONDS, Stopwatch, together, wait_until

PROGRAM = """
import sys
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from rdzv.stores.sql import create_backend
from rdzv.handler import create_handler

params = RendezvousParameters(
    backend="sqlite", endpoint=sys.argv[1], run_id="job", local_addr="127.0.0.1",
    min_nodes=int(sys.argv[2]), max_nodes=2, last_call_timeout=0.1, join_timeout=60,
)
backend, store = create_backend(params)
handler = create_handler(store, backend, params)
print("ready", flush=True)
info = handler.next_rendezvous()
"""
SOON_SECONDS = 1.0


@contextmanager
def agent(path: Path, min_nodes: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), str(min_nodes)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def observer(path: Path) -> Iterator[SqlBackend]:
    backend = SqlBackend(str(path), "job", SqlOptions(), name="sqlite")
    backend.open()
    try:
        yield backend
    finally:
        backend.close()


def live(backend: SqlBackend) -> int:
    return sum(not row.withdrawn for row in backend.entries())


def withdrawn(backend: SqlBackend) -> int:
    return sum(row.withdrawn for row in backend.entries())


@pytest.mark.timeout(180)
def test_an_agent_that_ends_takes_its_entry_back(tmp_path: Path) -> None:
    def by_sigterm_in_the_barrier() -> None:
        path = tmp_path / "sigterm.db"
        with observer(path) as backend, agent(path, min_nodes=2) as process:
            wait_until("it waits", lambda: live(backend) == 1, 2 * PATIENCE_SECONDS)
            watch = Stopwatch()
            process.send_signal(signal.SIGTERM)
            wait_until("it has withdrawn", lambda: withdrawn(backend) == 1)
            assert watch.seconds < SOON_SECONDS
            assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM
            assert live(backend) == 0

    def by_its_end() -> None:
        path = tmp_path / "end.db"
        with observer(path) as backend, agent(path, min_nodes=1) as process:
            assert process.wait(2 * PATIENCE_SECONDS) == 0
            assert (live(backend), withdrawn(backend)) == (0, 1)
            found = backend.get_state()
            assert found is not None
            assert decode_state(found[0]).closed is None

    together(by_sigterm_in_the_barrier, by_its_end)
