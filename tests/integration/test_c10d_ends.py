"""How the threads that wait in torch's stores end, and a process with them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rdzv import registry
from rdzv.backends.c10d import C10dRendezvousBackend
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question

from .c10d_targets import tcp_server

DEADLINE_SECONDS = 20.0
LONG_SECONDS = 60.0
ENDS = 10
ENDING = f"""
import os, sys, threading
from torch.distributed.elastic.rendezvous import RendezvousParameters
from rdzv import registry
from rdzv.ports import Entry, Question

for number in range({ENDS}):
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    parameters = RendezvousParameters(
        "tcpstore", sys.argv[1], f"job{{number}}", 1, 1, is_host="false", read_timeout="10"
    )
    backend, store = registry.open_backend(parameters)
    backend.announce(Entry("node", b"", "round"), 60.0, Question())

    def beat():
        while True:
            try:
                backend.beat("node", 60.0, Question())
                begun.set()
            except Exception:
                pass

    begun = threading.Event()
    threading.Thread(target=beat, daemon=True).start()
    begun.wait()
    break
"""
"""Processes that end while one of their threads asks the store without a pause."""


@pytest.mark.full
def test_a_process_that_ends_while_it_asks_ends_well(tmp_path: Path) -> None:
    server = tcp_server(tmp_path)
    try:
        host, port = server.address
        ending = subprocess.run(
            [sys.executable, "-c", ENDING, f"{host}:{port}"],
            capture_output=True,
            text=True,
            timeout=6 * DEADLINE_SECONDS,
        )
    finally:
        server.close()
    assert (ending.stdout.split(), ending.returncode) == (["0"] * ENDS, 0), ending.stderr


def announce(backend: C10dRendezvousBackend) -> None:
    backend.announce(Entry("node", b"", "round"), LONG_SECONDS, Question())


@pytest.mark.parametrize("when", ["it waits for an answer", "it connects"])
def test_threads_end_though_the_server_is_silent(tmp_path: Path, when: str) -> None:
    server = tcp_server(tmp_path)
    try:
        host, port = server.address
        before = set(threading.enumerate())
        backend, store = registry.open_backend(
            RendezvousParameters(
                "tcpstore", f"{host}:{port}", "job", 1, 1, is_host="false", read_timeout="1"
            )
        )
        assert isinstance(backend, C10dRendezvousBackend)
        announce(backend)
        server.pause()
        if when == "it connects":
            backend.disconnect()
        with pytest.raises(RendezvousConnectionError, match=r"no answer|did not answer"):
            announce(backend)
        store.close()  # type: ignore[attr-defined]
        backend.close()
        left = [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
        assert left == []
    finally:
        server.close()
