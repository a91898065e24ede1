"""One measurement: N nodes, threads in a few processes, meet once.

Every node has a handler of its own, made as torchrun makes it, before the clock starts; min = max
= N. Processes are forked from one that has imported torch and the backend, so that no import is
measured, and are gone after the measurement, so that nothing of it disturbs the next one.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
import uuid
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from counters import Counts, ServerCounters

PROCESSES_MAX = 4
SET_UP_SECONDS_MAX = 300.0
"""For making handlers and connecting, which is not the join."""
JOIN_TIMEOUT_SECONDS_MORE = 60
"""Beyond the limit: a node that is late is cut off, and does not give up by itself."""
GRACE_SECONDS = 10.0
"""After the limit, for a process to say what it has."""
ERROR_CHARACTERS_MAX = 200


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    backend: str
    endpoint: str
    nodes: int
    limit_seconds: float
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class Rank:
    """One node's way through the barrier; moments are ``time.monotonic()``, which all processes
    of a machine share."""

    started_at: float
    ended_at: float
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came out."""

    backend: str
    nodes: int
    seconds: float | None
    """From the last node's start to the last node's rank; None if not all got one in time."""
    seconds_from_first_start: float | None
    set_up_seconds: float
    """For making all handlers, one after another in each process: connections included."""
    joined: int
    error: str
    limit_seconds: float
    join: Counts | None
    """What the server counted during the join; None where nobody can ask it."""
    set_up: Counts | None
    cpu_seconds: float = 0.0
    """Of all nodes' processes together, during the join."""

    def as_json(self) -> dict[str, Any]:
        """For ``json.dumps``."""
        return asdict(self)


class WrongRanks(Exception):
    """Nodes have got ranks that do not belong together: a figure would mean nothing."""


@dataclass(frozen=True, slots=True)
class _Share:
    ranks: list[Rank]
    error: str
    cpu_seconds: float


def context_for(modules: list[str]) -> ForkServerContext:
    """Where processes come from; ``modules`` are imported only once."""
    context = multiprocessing.get_context("forkserver")
    # The last two are the dear ones of the main module, which every process imports again.
    common = ["torch.distributed.elastic.rendezvous.registry", "rdzv.handler"]
    mine = ["rich.table", "rdzv.conformance.servers.pool"]
    context.set_forkserver_preload([*common, *mine, *modules])
    return context


def measure(context: ForkServerContext, case: Case, counters: ServerCounters | None) -> Measurement:
    """Let the nodes of ``case`` meet. Raises :class:`WrongRanks`."""
    case = Case(
        case.backend,
        case.endpoint,
        case.nodes,
        case.limit_seconds,
        run_id=f"bench-{uuid.uuid4().hex[:8]}",
    )
    processes = min(PROCESSES_MAX, case.nodes)
    sizes = [case.nodes // processes + (i < case.nodes % processes) for i in range(processes)]
    at_first = counters and counters.read()
    workers, pipes = _start(context, case, sizes)
    try:
        set_up = [_received(pipe, SET_UP_SECONDS_MAX) for pipe in pipes]
        failed = next((answer for answer in set_up if not isinstance(answer, float)), None)
        if failed is not None:
            return _without(case, str(failed or "it ended before its handlers were made"))
        at_start = counters and counters.read()
        for pipe in pipes:
            pipe.send("go")
        deadline = time.monotonic() + case.limit_seconds + GRACE_SECONDS
        shares = [_received(pipe, deadline - time.monotonic()) for pipe in pipes]
        at_end = counters and counters.read()
    finally:
        _end(workers, pipes)
    ranks = [rank for share in shares if isinstance(share, _Share) for rank in share.ranks]
    errors = [share.error for share in shares if isinstance(share, _Share) and share.error]
    done = len(ranks) == case.nodes
    if done:
        _check(ranks, case.nodes)
    end = max((rank.ended_at for rank in ranks), default=0.0)
    return Measurement(
        backend=case.backend,
        nodes=case.nodes,
        seconds=end - max(rank.started_at for rank in ranks) if done else None,
        seconds_from_first_start=end - min(rank.started_at for rank in ranks) if done else None,
        set_up_seconds=max(float(seconds) for seconds in set_up),
        joined=len(ranks),
        error=errors[0] if errors else "",
        limit_seconds=case.limit_seconds,
        join=at_end.since(at_start) if at_start and at_end else None,
        set_up=at_start.since(at_first) if at_first and at_start else None,
        cpu_seconds=sum(share.cpu_seconds for share in shares if isinstance(share, _Share)),
    )


def _start(
    context: ForkServerContext, case: Case, sizes: list[int]
) -> tuple[list[ForkServerProcess], list[Connection]]:
    workers, pipes = [], []
    for size in sizes:
        ours, theirs = context.Pipe()
        worker = context.Process(target=_run_share, args=(theirs, case, size), daemon=True)
        worker.start()
        theirs.close()
        workers.append(worker)
        pipes.append(ours)
    return workers, pipes


def _end(workers: list[ForkServerProcess], pipes: list[Connection]) -> None:
    for pipe in pipes:
        # Whoever is still there ends when nobody listens any more.
        pipe.close()
    for worker in workers:
        worker.join(GRACE_SECONDS)
        if worker.is_alive():
            worker.kill()
            worker.join()


def _received(pipe: Connection, timeout_seconds: float) -> Any:
    """What a process has said; None if it has not, or has ended."""
    try:
        return pipe.recv() if pipe.poll(max(0.0, timeout_seconds)) else None
    except EOFError:
        return None


def _without(case: Case, error: str) -> Measurement:
    return Measurement(
        case.backend, case.nodes, None, None, 0.0, 0, error, case.limit_seconds, None, None
    )


def _check(ranks: list[Rank], nodes: int) -> None:
    if sorted(rank.rank for rank in ranks) != list(range(nodes)):
        raise WrongRanks(f"not the ranks 0 to {nodes - 1}, each once")
    if {rank.world_size for rank in ranks} != {nodes}:
        raise WrongRanks(f"a world size that is not {nodes}")


def _run_share(pipe: Connection, case: Case, count: int) -> None:
    """One process: make its handlers, wait for the word, let them join, tell, end."""
    try:
        started_at = time.monotonic()
        try:
            handlers = [_handler(case) for _ in range(count)]
        except Exception as error:
            pipe.send(_shown(error))
            return
        gate, ranks, errors = threading.Event(), [], []
        finished = threading.Semaphore(0)

        def join(handler: Any) -> None:
            gate.wait()
            start = time.monotonic()
            try:
                info = handler.next_rendezvous()
                ranks.append(Rank(start, time.monotonic(), info.rank, info.world_size))
            except Exception as error:
                errors.append(_shown(error))
            finished.release()

        for handler in handlers:
            threading.Thread(target=join, args=(handler,), daemon=True).start()
        pipe.send(time.monotonic() - started_at)
        pipe.recv()
        cpu_at_start = time.process_time()
        gate.set()
        deadline = time.monotonic() + case.limit_seconds
        for _ in range(count):
            if not finished.acquire(timeout=max(0.0, deadline - time.monotonic())):
                break
        cpu_seconds = time.process_time() - cpu_at_start
        pipe.send(_Share(list(ranks), errors[0] if errors else "", cpu_seconds))
        # One process may serve the others' store: stay until all have told.
        pipe.recv()
    except (EOFError, OSError):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        # Without goodbyes, which hundreds of nodes would say one after another.
        os._exit(0)


def _handler(case: Case) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    params = RendezvousParameters(
        case.backend,
        case.endpoint,
        case.run_id,
        case.nodes,
        case.nodes,
        local_addr="127.0.0.1",
        join_timeout=round(case.limit_seconds) + JOIN_TIMEOUT_SECONDS_MORE,
    )
    return get_rendezvous_handler(params)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
