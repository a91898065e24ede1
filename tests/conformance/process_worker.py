"""Concurrent clients: what they do, and how they do it in processes of their own.

``python -m rdzv.conformance.process_worker`` is a nursery: one process that has imported torch,
which takes seconds, and then makes clients by forking, which takes milliseconds. It has no thread
and no connection, so its children inherit none; they open the target by its recipe
(:meth:`rdzv.conformance.target.Target.recipe`).

Commands are lines of JSON on its standard input, events are lines of JSON on its standard output.
``load`` imports what all clients will need.
``{"do": "start", "batch": 1, "target": [path, arguments], "jobs": [...]}`` makes one process for
each job, which says ``ready`` once it is connected. ``go`` lets all of them begin at once, ``kill``
kills one as ``kill -9`` does, ``end`` kills the rest and waits for all. A client says of every
operation that it begins, *before* it begins, and then how it was answered: so whatever a killed
process may have done is in the history. A line is shorter than what a pipe takes in one piece, so
lines are never torn, not even by a kill. Where standard input ends, everybody is killed.

Answers are pickled, as tokens can be anything; both ends are the same program.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import pickle
import random
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from rdzv.conformance.history import Call, RecordedBackend, RecordedStore, Recorder

CLIENT_SECONDS_MAX = 60
"""Clients that are forgotten end by themselves."""

# What clients do. Each takes a recorded backend or store, a source of chance, the client's name,
# and the number of calls. Everything written is unique, so that what is read tells who wrote it.

Work = Callable[[Any, random.Random, str, int], None]

CALLS_PER_QUEUE = 12


def document(backend: RecordedBackend, chance: random.Random, name: str, calls: int) -> None:
    """As the rendezvous: write on what was seen last, which may be stale by now."""
    token = None
    for number in range(calls):
        if chance.random() < 0.3:
            seen = backend.get_state()
            token = seen[1] if seen else None
            continue
        given = None if chance.random() < 0.1 else token
        written = backend.set_state(f"{name}.{number}".encode(), given)
        token = written[1] if written else None


def counter(store: RecordedStore, chance: random.Random, name: str, calls: int) -> None:
    """Add to what is a number."""
    for _ in range(calls):
        if chance.random() < 0.2:
            store.get("counter")
        else:
            store.add("counter", chance.choice([1, 1, 7, -3, 0]))


def register(store: RecordedStore, chance: random.Random, name: str, calls: int) -> None:
    """Write and read."""
    for number in range(calls):
        if chance.random() < 0.5:
            store.set("register", f"{name}.{number}".encode())
        else:
            store.get("register")


def swaps(store: RecordedStore, chance: random.Random, name: str, calls: int) -> None:
    """Write on what was seen last, as a document without tokens."""
    seen = store.get("swaps")
    for number in range(calls):
        if chance.random() < 0.2:
            seen = store.get("swaps")
        else:
            seen = store.compare_set("swaps", seen, f"{name}.{number}".encode())


def deletes(store: RecordedStore, chance: random.Random, name: str, calls: int) -> None:
    """Create, look, and delete."""
    for number in range(calls):
        kind = chance.random()
        if kind < 0.4:
            store.compare_set("deletes", b"", f"{name}.{number}".encode())
        elif kind < 0.7:
            store.check("deletes")
        else:
            store.delete("deletes")


def queue(store: RecordedStore, chance: random.Random, name: str, calls: int) -> None:
    """Push and pop about as often; on one queue after the other, for in a long queue it shows late
    which of two pushes came first, and there are too many orders to try until then."""
    for number in range(calls):
        key = f"jobs {number // CALLS_PER_QUEUE}"
        kind = chance.random()
        if kind < 0.4:
            store.push(key, f"{name}.{number}".encode())
        elif kind < 0.9:
            store.pop(key)
        else:
            store.len(key)


def appends(store: RecordedStore, chance: random.Random, name: str, calls: int) -> None:
    """Append, and read so often that the order shows."""
    for number in range(calls):
        if chance.random() < 0.4:
            store.append("text", f"{name}{number} ".encode())
        else:
            store.get("text")


def values(store: RecordedStore, chance: random.Random, name: str, calls: int) -> None:
    """All that needs no optional part of a store, now this, now that."""
    for number in range(calls):
        work: Work = chance.choice([counter, register, swaps, deletes])
        work(store, chance, f"{name}.{number}", 2)


WORKS: dict[str, Work] = {
    work.__name__: work
    for work in (document, counter, register, swaps, deletes, queue, appends, values)
}
"""By name, as jobs name them."""


def opened(target: Any, work: str, recorder: Recorder) -> Any:
    """What the work is done on."""
    if work == document.__name__:
        return RecordedBackend(target.connect(), recorder)
    return RecordedStore(target.store(), recorder)


# The nursery


class _Reporter(Recorder):
    """Says what is recorded, at once."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self._job = job

    def begun(self, call: Call) -> None:
        _say(
            self._job,
            "called",
            id=id(call),
            client=call.client,
            kind=call.kind,
            key=call.key,
            arguments=packed(call.arguments),
            called=call.called,
        )

    def ended(self, call: Call) -> None:
        _say(self._job, "answered", id=id(call), answer=packed(call.answer), at=call.answered)


def packed(value: Any) -> str:
    """As text for a line."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    """The value of :func:`packed`."""
    return pickle.loads(base64.b64decode(text))


def _say(job: dict[str, Any], event: str, **rest: Any) -> None:
    line = json.dumps({"batch": job["batch"], "job": job["number"], "event": event, **rest})
    data = f"{line}\n".encode()
    if len(data) > select.PIPE_BUF:
        raise ValueError(f"an event of {len(data)} bytes could be torn: {line[:200]}...")
    os.write(sys.stdout.fileno(), data)


def _work(job: dict[str, Any], go: int) -> None:
    """A client process, after the fork."""
    path, arguments = job["target"]
    module, _, function = path.partition(":")
    target = getattr(importlib.import_module(module), function)(**arguments)
    subject = opened(target, job["work"], _Reporter(job))
    failures: list[BaseException] = []

    def run(name: str) -> None:
        try:
            WORKS[job["work"]](subject, random.Random(name), name, job["calls"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in job["clients"]]
    _say(job, "ready")
    os.read(go, 1)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    while job["doomed"]:
        # It was faster than its killer.
        signal.pause()
    target.close()
    _say(job, "done")


def _fork(job: dict[str, Any], go: tuple[int, int]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        signal.alarm(CLIENT_SECONDS_MAX)
        os.close(go[1])
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        _work(job, go[0])
        status = 0
    except BaseException:
        _say(job, "failed", reason=traceback.format_exc()[-2000:])
    finally:
        os._exit(status)


class _Batch:
    """Processes that work at the same time. None of them is waited for before the end, so that a
    process id stands for nobody else."""

    def __init__(self, command: dict[str, Any]) -> None:
        self.number = command["batch"]
        # They wait for this pipe to end.
        self.go = os.pipe()
        self.processes = [
            _fork({**job, **command, "number": number}, self.go)
            for number, job in enumerate(command.pop("jobs"))
        ]

    def let_go(self) -> None:
        while self.go:
            os.close(self.go[0])
            os.close(self.go[1])
            self.go = ()  # type: ignore[assignment]

    def kill(self, number: int) -> None:
        os.kill(self.processes[number], signal.SIGKILL)
        # It stays to be waited for: the process is dead, its id is not free.
        os.waitid(os.P_PID, self.processes[number], os.WEXITED | os.WNOWAIT)
        _say({"batch": self.number, "number": number}, "killed")

    def end(self) -> None:
        self.let_go()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        _say({"batch": self.number, "number": None}, "ended")


def _load(modules: list[str]) -> None:
    """Import once what every client needs. What cannot be imported here tells its reason there."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def main() -> None:
    """The nursery's life."""
    batch: _Batch | None = None
    try:
        for line in sys.stdin:
            command = json.loads(line)
            match command.pop("do"):
                case "load":
                    _load(command["modules"])
                case "start":
                    batch = _Batch(command)
                case "go" if batch:
                    batch.let_go()
                case "kill" if batch:
                    batch.kill(command["job"])
                case "end" if batch:
                    batch.end()
                    batch = None
    finally:
        # Whoever started this is gone, and may not hear it.
        if batch:
            with contextlib.suppress(BrokenPipeError):
                batch.end()


if __name__ == "__main__":
    main()
