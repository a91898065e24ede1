"""Processes that use one SQLite file at once. Started by tests as a program of its own, so that
torch is imported once and ``fork`` meets no other thread.

    sqlite_swarm.py count PATH PROCESSES EACH    everybody opens the file at once, then counts
    sqlite_swarm.py inherit PATH PROCESSES EACH  the parent has it open already, and counts too
    sqlite_swarm.py busy PATH                    fork while another thread's call goes on
    sqlite_swarm.py without-rights PATH          as a user who may not write there
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from rdzv.backends.sql import SqlBackend, sqlite
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.ports import Entry, Question
from rdzv.stores.sql import SqlStore

NOBODY = 65534


def count_up(backend: SqlBackend, store: SqlStore, each: int) -> None:
    """Add ``each`` to a counter in the document and to one in the store, in steps of one."""
    found = backend.get_state() or backend.set_state(b"0")
    assert found is not None
    state, token = found[:2]
    for number in range(each):
        success = False
        while not success:
            answer = backend.set_state(str(int(state) + 1).encode(), token)
            assert answer is not None
            state, token, success = answer
        store.add("counter", 1)
        store.queue_push("queue", str(number))


def use(path: str, each: int) -> None:
    backend = SqlBackend(path, "job")
    store = SqlStore(path, "job", timedelta(seconds=60))
    backend.announce(Entry(str(os.getpid()), b""), 60.0, Question())
    count_up(backend, store, each)
    store.close()
    backend.close()


def in_children(processes: int, work: Callable[[], None]) -> list[int]:
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return children


def fork_while_busy(path: str) -> int:
    backend, other = SqlBackend(path, "job"), SqlBackend(path, "other")
    backend.set_state(b"x")
    entered, leave = threading.Event(), threading.Event()

    def stay(connection: object) -> None:
        # Also where one that writes has its turn, which no thread of the child would end.
        with sqlite._turn(Path(path).resolve(), 30):
            entered.set()
            leave.wait(30)

    staying = threading.Thread(target=lambda: backend._database.read(stay))
    staying.start()
    entered.wait(30)

    def in_child() -> None:
        started = time.monotonic()
        assert other.set_state(b"from the child")
        assert time.monotonic() - started < sqlite.TURN_SECONDS_MAX
        with pytest.raises(RendezvousConnectionError, match="forked in the middle"):
            backend.get_state()

    [child] = in_children(1, in_child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    leave.set()
    staying.join()
    assert backend.get_state() is not None
    return status


def main(mode: str, path: str, processes: int = 1, each: int = 1) -> int:
    if mode == "without-rights":
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        try:
            SqlBackend(path, "job").open()
        except RendezvousError as error:
            sys.stdout.write(f"{type(error).__name__}: {error}")
            return 0
        return 1
    if mode == "busy":
        return fork_while_busy(path)
    if mode == "inherit":
        backend = SqlBackend(path, "job")
        store = SqlStore(path, "job", timedelta(seconds=60))
        count_up(backend, store, 1)
        children = in_children(processes, lambda: count_up(backend, store, each))
        count_up(backend, store, each)
        # The last one of a process to close it must not take the file from under the others.
        backend.close()
        store.close()
    else:
        children = in_children(processes, lambda: use(path, each))
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
