"""What many clients see at the same time has one explanation: clauses with proof.

Clients in threads, in processes, and in processes that are killed in mid-operation do random
things (:mod:`rdzv.conformance.process_worker`); all that they saw is recorded, and the history must
be linearizable (:mod:`rdzv.conformance.linearizability`). A last look at everything belongs to the
history: so what was acknowledged is not lost, what was not is there once or not at all, and what a
killed process had begun is there as a whole or not.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rdzv.conformance.clauses import book
from rdzv.conformance.history import RecordedBackend, RecordedStore, Recorder, assert_linearizable
from rdzv.conformance.linearizability import UNKNOWN, Operation
from rdzv.conformance.process_worker import WORKS, opened, unpacked
from rdzv.conformance.store_kit import in_threads
from rdzv.conformance.target import DEADLINE_SECONDS, Target

THREADS = 4
CALLS_OF_A_THREAD = 50
TURNS_MAX = 3
"""Where all is over so fast that threads have hardly met, they begin again and do more."""
ENOUGH_SECONDS = 0.1
PROCESSES = 2
CALLS_OF_A_CLIENT = 30
"""There are two in a process."""
VICTIMS = 6
CALLS_OF_A_VICTIM = 100
"""More than it usually lives to make."""
CALLS_BEFORE_THE_KILL_MAX = 20
READS = frozenset({"get_state", "get", "check", "len"})
"""No kill in one of these tells anything."""
SWITCH_SECONDS = 1e-5
"""Python lets another thread run after this time. It is 5 ms elsewhere, in which a fast backend
answers hundreds of calls: no two would meet."""

state = book("backend", "concurrency")
state_of_processes = book("backend", "concurrency", needs=("processes",), controls=("processes",))
stores = book("store", "concurrency", needs=("store",))
queues = book("store", "concurrency", needs=("store", "queues"))
multi = book("store", "concurrency", needs=("store", "multi"))
of_processes = functools.partial(book, "store", "concurrency", controls=("processes",))
values_of_processes = of_processes(needs=("store", "processes"))
queues_of_processes = of_processes(needs=("store", "queues", "processes"))
multi_of_processes = of_processes(needs=("store", "multi", "processes"))

# Threads


@state
def reads_and_writes_of_threads_have_one_order(target: Target) -> None:
    in_threads_of_this_process(target, "document")


@stores
def sums_of_threads_have_one_order(target: Target) -> None:
    in_threads_of_this_process(target, "counter")


@stores
def sets_and_gets_of_threads_have_one_order(target: Target) -> None:
    in_threads_of_this_process(target, "register")


@stores
def compare_sets_of_threads_have_one_order(target: Target) -> None:
    in_threads_of_this_process(target, "swaps")


@stores
def deletes_of_threads_have_one_order(target: Target) -> None:
    in_threads_of_this_process(target, "deletes")


@queues
def pushes_and_pops_of_threads_have_one_order(target: Target) -> None:
    in_threads_of_this_process(target, "queue")


@multi
def appends_of_threads_have_one_order(target: Target) -> None:
    in_threads_of_this_process(target, "appends")


# Processes


@state_of_processes
def reads_and_writes_of_processes_have_one_order(target: Target) -> None:
    in_processes(target, "document")


@values_of_processes
def values_of_processes_have_one_order(target: Target) -> None:
    in_processes(target, "values")


@queues_of_processes
def pushes_and_pops_of_processes_have_one_order(target: Target) -> None:
    in_processes(target, "queue")


@multi_of_processes
def appends_of_processes_have_one_order(target: Target) -> None:
    in_processes(target, "appends")


# Processes that are killed


@state_of_processes
def a_killed_process_writes_its_document_once_or_not_at_all(target: Target) -> None:
    in_processes(target, "document", victims=VICTIMS)


@values_of_processes
def a_killed_process_counts_and_writes_once_or_not_at_all(target: Target) -> None:
    in_processes(target, "values", victims=VICTIMS)


@queues_of_processes
def a_killed_process_pushes_and_pops_once_or_not_at_all(target: Target) -> None:
    in_processes(target, "queue", victims=VICTIMS)


@multi_of_processes
def a_killed_process_appends_once_or_not_at_all(target: Target) -> None:
    in_processes(target, "appends", victims=VICTIMS)


# How


def in_threads_of_this_process(target: Target, work: str) -> None:
    """Two threads share an object, and there are two objects."""
    recorder = Recorder()
    prepare(target, work, recorder)
    subjects = [opened(target, work, recorder) for _ in range(THREADS // 2)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    start = time.monotonic()
    try:
        for turn in range(TURNS_MAX):
            if turn and time.monotonic() - start > ENOUGH_SECONDS:
                break

            def client(index: int, turn: int = turn) -> None:
                name = threading.current_thread().name = f"t{index}.{turn}"
                subject = subjects[index % len(subjects)]
                calls = CALLS_OF_A_THREAD * (4 if turn else 1)
                WORKS[work](subject, random.Random(name), name, calls)

            in_threads(THREADS, client)
    finally:
        sys.setswitchinterval(usual)
    look(target, work, recorder)
    assert_linearizable(recorder.history())


def in_processes(target: Target, work: str, victims: int = 0) -> None:
    """Two threads in each process share an object. Victims have one thread and are killed."""
    recorder = Recorder()
    prepare(target, work, recorder)
    chance = random.Random(work)
    survivors = [
        {
            "work": work,
            "calls": CALLS_OF_A_CLIENT,
            "clients": [f"p{number}a", f"p{number}b"],
            "doomed": False,
        }
        for number in range(PROCESSES)
    ]
    doomed = [
        {"work": work, "calls": CALLS_OF_A_VICTIM, "clients": [f"v{number}"], "doomed": True}
        for number in range(victims)
    ]
    kills = {
        len(survivors) + number: chance.randint(1, CALLS_BEFORE_THE_KILL_MAX)
        for number in range(victims)
    }
    with nursery().batch(target, survivors + doomed) as batch:
        operations = batch.run(kills)
    look(target, work, recorder)
    # Both measured with the one monotonic clock of the machine.
    assert_linearizable([*recorder.history(), *operations])


def prepare(target: Target, work: str, recorder: Recorder) -> None:
    """What there has to be before the work begins: a get waits for what is missing."""
    if work == "document":
        return
    store: RecordedStore = opened(target, work, recorder)
    if work in ("counter", "values"):
        store.add("counter", 0)
    if work in ("register", "values"):
        store.set("register", b"first")
    if work in ("swaps", "values"):
        store.compare_set("swaps", b"", b"first")
    if work == "appends":
        store.append("text", b"first ")


def look(target: Target, work: str, recorder: Recorder) -> None:
    """Look at everything when the work is done, with a client that has seen nothing before."""
    if work == "document":
        backend: RecordedBackend = opened(target, work, recorder)
        backend.get_state()
        return
    store: RecordedStore = opened(target, work, recorder)
    for key in ("counter", "register", "swaps", "deletes", "text"):
        if store.check(key):
            store.get(key)
    if work == "queue":
        store.len("jobs")
        while store.pop("jobs") is not None:
            pass


# The parent's side of the nursery


class Nursery:
    """A process that makes client processes. It ends when this one does."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "rdzv.conformance.process_worker"]
        # In a session of its own: what the terminal sends to this process is not for that one.
        # Numpy's libraries, which torch loads, start threads unless told not to; it is to fork.
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._received = b""
        self._batches = itertools.count()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it and its clients."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        try:
            self._process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def batch(self, target: Target, jobs: list[dict[str, Any]]) -> Iterator[Batch]:
        """Client processes for these jobs, connected and ready; none is left in the end."""
        recipe = target.recipe()
        assert recipe is not None, "Target.cannot('processes') must say so"
        batch = Batch(self, next(self._batches), len(jobs))
        # What this process has loaded to open the target is what each client would load.
        drivers = [
            name for name in sys.modules if name.startswith(("rdzv.backends", "rdzv.stores"))
        ]
        self.send({"do": "load", "modules": sorted({*drivers, recipe[0].partition(":")[0]})})
        self.send({"do": "start", "batch": batch.number, "target": recipe, "jobs": jobs})
        try:
            batch.until(lambda: len(batch.ready) == len(jobs))
            yield batch
        finally:
            if self.alive:
                self.send({"do": "end"})
                batch.until(lambda: batch.ended)

    def send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next event. Fails after the deadline, by the monotonic clock, and at the end."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._received:
            left = max(deadline - time.monotonic(), 0.0)
            readable, _, _ = select.select([descriptor], [], [], left)
            assert readable, "the client processes do not go on"
            data = os.read(descriptor, 65536)
            assert data, "the process that makes client processes has ended"
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event


@functools.cache
def _nursery() -> list[Nursery]:
    kept: list[Nursery] = []

    def close() -> None:
        while kept:
            kept.pop().close()

    atexit.register(close)
    return kept


def nursery() -> Nursery:
    """One for all clauses: to import torch takes longer than to try a clause."""
    kept = _nursery()
    if kept and not kept[-1].alive:
        kept.pop().close()
    if not kept:
        kept.append(Nursery())
    return kept[-1]


class Batch:
    """Clients that work at the same time, seen from here."""

    def __init__(self, nursery: Nursery, number: int, jobs: int) -> None:
        self.number = number
        self.ready: set[int] = set()
        self.ended = False
        self._nursery = nursery
        self._jobs = jobs
        self._at_work = set(range(jobs))
        self._calls: dict[tuple[int, int], dict[str, Any]] = {}
        self._answers: dict[tuple[int, int], dict[str, Any]] = {}
        self._counts = [0] * jobs
        self._kills: dict[int, int] = {}
        self._killed: set[int] = set()
        self._failures: list[str] = []

    def run(self, kills: dict[int, int]) -> list[Operation]:
        """Let all begin and return what they did. ``kills`` names jobs, and the number of the call
        from which on each is killed in its next call that writes."""
        self._kills = dict(kills)
        self._nursery.send({"do": "go"})
        self.until(lambda: not self._at_work)
        assert self._killed == set(kills), "a client ended before it could be killed"
        return [_operation(call, self._answers.get(place)) for place, call in self._calls.items()]

    def until(self, condition: Callable[[], bool]) -> None:
        """Take in events until the condition holds. Fails when a client has failed."""
        deadline = time.monotonic() + 2 * DEADLINE_SECONDS
        while not condition():
            event = self._nursery.receive(deadline)
            if event["batch"] == self.number:
                self._take(event)
            failures, self._failures = self._failures, []
            assert not failures, "\n".join(failures)

    def _take(self, event: dict[str, Any]) -> None:
        job = event["job"]
        match event["event"]:
            case "called":
                self._calls[job, event["id"]] = event
                self._counts[job] += 1
                due = self._counts[job] >= self._kills.get(job, sys.maxsize)
                if due and event["kind"] not in READS:
                    del self._kills[job]
                    self._nursery.send({"do": "kill", "job": job})
            case "answered":
                self._answers[job, event["id"]] = event
            case "ready":
                self.ready.add(job)
            case "done":
                self._at_work.discard(job)
            case "killed":
                self._at_work.discard(job)
                self._killed.add(job)
            case "failed":
                self._failures.append(f"client process {job} failed:\n{event['reason']}")
            case "ended":
                self.ended = True


def _operation(call: dict[str, Any], answer: dict[str, Any] | None) -> Operation:
    return Operation(
        call["client"],
        call["kind"],
        call["key"],
        unpacked(call["arguments"]),
        unpacked(answer["answer"]) if answer else UNKNOWN,
        call["called"],
        answer["at"] if answer else None,
        "" if answer else "its process was killed",
    )
