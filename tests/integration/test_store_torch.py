"""torch itself on the stores: process groups over gloo in several processes, and calls from C++.

A store joins the tests with processes by one entry in ``STORES``: a function that opens it from a
path, in whatever process. FileStore is there to show that the tests themselves work. This file is
also the program that those processes run.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils import store as store_util

from rdzv.conformance.store_kit import LONG, Background, in_threads
from rdzv.round_store import RoundStore
from rdzv.stores.memory import MemoryClient, MemoryStore
from rdzv.stores.sql import SqlStore

WORLD_SIZE = 4
GROUP_TIMEOUT = timedelta(seconds=60)
JOB_SECONDS_MAX = 90
TURN_SECONDS_MAX = 10
"""Not as a measure of speed: a turn takes 1.6 s on a quiet machine."""

STORES: dict[str, Callable[[str], Any]] = {
    "FileStore": lambda path: dist.FileStore(path, -1),
    "SqlStore": lambda path: SqlStore(path, "run"),
}


def pinned_round(store: Any) -> RoundStore:
    """As the handler gives it to torch."""
    round_store = RoundStore(store, "run/1.abc", on_exit_barrier=lambda: None)
    round_store.pin()
    return round_store


OURS = [kind for kind in STORES if kind != "FileStore"]
WAYS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda store: store,
    "PrefixStore": lambda store: dist.PrefixStore("outer", dist.PrefixStore("inner", store)),
    "RoundStore": pinned_round,
}


def work(store: Any, rank: int) -> None:
    """One life of a process group. Nobody but torch refers to ``store`` meanwhile."""
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=GROUP_TIMEOUT
    )
    del store
    gc.collect()
    everyone = torch.tensor([rank + 1.0])
    dist.all_reduce(everyone)
    assert everyone.item() == 10.0
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    half = torch.tensor([rank + 1.0])
    dist.all_reduce(half, group=pair)
    assert half.item() == (3.0 if rank < 2 else 7.0)
    again = dist.new_group(list(range(WORLD_SIZE)))
    gathered: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, f"rank {rank}", group=again)
    assert gathered == [f"rank {other}" for other in range(WORLD_SIZE)]
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Job:
    kind: str
    way: str
    folder: str
    turns: int
    environment: dict[str, str]


def serve() -> None:
    """Do the jobs that come in by standard input, each in new processes, one for each rank.

    They are forked from this process, which has imported torch and begun nothing: to import torch
    in each would take far longer than the test.
    """
    for line in sys.stdin:
        job = Job(**json.loads(line))
        ranks = {fork(job, rank): rank for rank in range(WORLD_SIZE)}
        failures = {}
        deadline = time.monotonic() + JOB_SECONDS_MAX + job.turns * TURN_SECONDS_MAX
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid and (rank := ranks.pop(pid)) >= 0 and status:
                failures[f"rank {rank}"] = f"wait status {status}"
            elif not pid and time.monotonic() > deadline:
                deadline += JOB_SECONDS_MAX
                for pid in ranks:
                    os.kill(pid, signal.SIGKILL)
            elif not pid:
                time.sleep(0.01)
        sys.stdout.write(json.dumps(failures) + "\n")
        sys.stdout.flush()


def fork(job: Job, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    output = os.open(f"{job.folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(job.environment)
    dist.set_debug_level_from_env()
    for turn in range(job.turns):
        prefixed = dist.PrefixStore(f"turn {turn}", STORES[job.kind](f"{job.folder}/store"))
        work(WAYS[job.way](prefixed), rank)
        gc.collect()
    sys.exit(0)  # an orderly end, with stores pinned and groups destroyed, is part of the test


class Server:
    """The process that runs :func:`serve`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin
        assert self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def run(self, kind: str, way: str, folder: Path, turns: int, **environment: str) -> None:
        job = Job(kind, way, str(folder), turns, environment)
        self._requests.write(json.dumps(asdict(job)) + "\n")
        self._requests.flush()
        failures = json.loads(self._answers.readline())
        logs = "".join(f"\n{log.name}:\n{log.read_text()}" for log in folder.glob("*.log"))
        assert failures == {}, logs

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("kind", "way"), [("FileStore", "bare"), *((kind, way) for kind in OURS for way in WAYS)]
)
def test_process_groups(kind: str, way: str, server: Server, tmp_path: Path) -> None:
    server.run(kind, way, tmp_path, turns=3)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    "environment",
    [
        {"GLOO_ENABLE_STORE_V2_API": "1"},
        {"TORCH_GLOO_LAZY_INIT": "1"},  # gloo asks the store from threads of its own
        {"TORCH_DIST_INIT_BARRIER": "1"},
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_process_groups_in_torchs_other_modes(
    kind: str, environment: dict[str, str], server: Server, tmp_path: Path
) -> None:
    server.run(kind, "PrefixStore", tmp_path, turns=2, **environment)


@pytest.mark.full
@pytest.mark.timeout(2 * JOB_SECONDS_MAX + 50 * TURN_SECONDS_MAX)
@pytest.mark.parametrize("kind", OURS)
def test_process_groups_fifty_times(kind: str, server: Server, tmp_path: Path) -> None:
    server.run(kind, "PrefixStore", tmp_path, turns=50)


def test_a_failing_rank_fails_the_test(server: Server, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="KeyError: 'no such store'"):
        server.run("no such store", "bare", tmp_path, turns=1)


# Calls from C++, in one process


@contextmanager
def memory(folder: Path) -> Iterator[Callable[[], Any]]:
    client = MemoryClient()
    yield lambda: MemoryStore(client)


@contextmanager
def sqlite(folder: Path) -> Iterator[Callable[[], Any]]:
    yield lambda: SqlStore(str(folder / "store"), "run")


@pytest.fixture(params=[memory, sqlite], ids=lambda factory: factory.__name__)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    made: list[Any] = []
    with request.param(tmp_path) as factory:

        def remember() -> Any:
            made.append(factory())
            return made[-1]

        yield remember
    for store in made:
        store.close()


def test_torchs_own_check_of_python_stores(connect: Callable[[], Any]) -> None:
    dist._test_python_store(connect())


def test_torchs_collectives_on_a_store(connect: Callable[[], Any]) -> None:
    collectives = [
        torch._C._distributed_c10d._StoreCollectives(connect(), rank, WORLD_SIZE)
        for rank in range(WORLD_SIZE)
    ]

    def work(rank: int) -> tuple[Any, ...]:
        mine = collectives[rank]
        mine.barrier("barrier", LONG, True)
        total = mine.all_sum("sum", rank + 1, LONG)
        if rank == 0:
            mine.broadcast_send("broadcast", "hello", LONG)
            heard: Any = "hello"
        else:
            heard = mine.broadcast_recv("broadcast", LONG)
        return total, heard, mine.all_gather("gather", str(rank), LONG)

    gathered = ["0", "1", "2", "3"]
    for total, heard, everyone in in_threads(WORLD_SIZE, work):
        assert total == 10
        assert text(heard) == "hello"
        assert [text(each) for each in everyone] == gathered


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def test_eight_threads_wait_in_cpp(connect: Callable[[], Any]) -> None:
    store: Any = dist.PrefixStore("outer", dist.PrefixStore("inner", connect()))
    waiting = [Background(lambda: store.wait(["k"], LONG)) for _ in range(8)]
    waiting[-1].still_blocked()
    assert store.add("other", 1) == 1, "others are served meanwhile"
    store.set("k", "1")
    for each in waiting:
        each.result()


def test_elastics_helpers(connect: Callable[[], Any]) -> None:
    stores = [connect() for _ in range(WORLD_SIZE)]

    def work(rank: int) -> list[bytes]:
        data = store_util.synchronize(stores[rank], b"%d" % rank, rank, WORLD_SIZE, "sync", 30)
        store_util.barrier(stores[rank], WORLD_SIZE, "barrier", 30, rank=rank)
        return data

    assert in_threads(WORLD_SIZE, work) == [[b"0", b"1", b"2", b"3"]] * WORLD_SIZE


def test_an_error_in_python_comes_back_through_cpp(connect: Callable[[], Any]) -> None:
    store: Any = dist.PrefixStore("p", connect())
    store.set("k", "abc")
    with pytest.raises(ValueError, match="decimal"):
        store.add("k", 1)
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.get("missing")
    assert store.get("k") == b"abc"


if __name__ == "__main__":
    serve()
