"""How long N nodes take to meet: seconds from the last node's start to the last node's rank.

Every node is a thread in one of a few processes, with a handler of its own, made as torchrun makes
it; min = max = N. Backends take turns in each round, so that a busy machine troubles all of them
alike; the ratio to torch's own c10d is what counts, not the seconds.

    python benchmarks/join.py --nodes 8 32 64 --backends sqlite c10d --rounds 3
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import uuid
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

PROCESSES_MAX = 4
JOIN_TIMEOUT_SECONDS = 120


def main() -> int:
    """Measure, print a table with ratios, and write JSON where asked to."""
    options = _options()
    figures: dict[tuple[str, int], list[float | None]] = {}
    with tempfile.TemporaryDirectory(prefix="rdzv-bench-") as folder:
        for nodes in options.nodes:
            for _ in range(options.rounds):
                for backend in options.backends:
                    endpoint = _endpoint(backend, options.endpoint, folder)
                    seconds = measure(backend, endpoint, nodes)
                    figures.setdefault((backend, nodes), []).append(seconds)
                    shown = "not done" if seconds is None else f"{seconds:.3f} s"
                    print(f"{nodes:5} nodes  {backend:12} {shown}", flush=True)
    _print_table(figures, options)
    if options.json:
        rows = [
            {"backend": backend, "nodes": nodes, "seconds": seconds}
            for (backend, nodes), seconds in figures.items()
        ]
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def measure(backend: str, endpoint: str, nodes: int) -> float | None:
    """Seconds from the last start to the last rank; None if not all nodes got one."""
    context = multiprocessing.get_context("spawn")
    processes = min(PROCESSES_MAX, nodes)
    share = [nodes // processes + (index < nodes % processes) for index in range(processes)]
    results: Queue[tuple[float, float, int]] = context.Queue()
    ready = context.Barrier(processes)
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    workers = [
        context.Process(
            target=_run_nodes, args=(backend, endpoint, run_id, nodes, count, ready, results)
        )
        for count in share
    ]
    for worker in workers:
        worker.start()
    rows = [results.get(timeout=JOIN_TIMEOUT_SECONDS * 2) for _ in workers]
    for worker in workers:
        worker.join(10)
        if worker.is_alive():
            worker.kill()
    if sum(joined for _, _, joined in rows) < nodes:
        return None
    return max(end for _, end, _ in rows) - max(start for start, _, _ in rows)


def _run_nodes(
    backend: str,
    endpoint: str,
    run_id: str,
    nodes: int,
    count: int,
    ready: Barrier,
    results: Queue[tuple[float, float, int]],
) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    params = RendezvousParameters(
        backend,
        endpoint,
        run_id,
        nodes,
        nodes,
        local_addr="127.0.0.1",
        join_timeout=JOIN_TIMEOUT_SECONDS,
    )
    handlers = [get_rendezvous_handler(params) for _ in range(count)]
    ends: list[float] = []

    def join(handler: Any) -> None:
        handler.next_rendezvous()
        ends.append(time.monotonic())

    threads = [threading.Thread(target=join, args=(handler,), daemon=True) for handler in handlers]
    ready.wait(JOIN_TIMEOUT_SECONDS)
    for thread in threads:
        thread.start()
    start = time.monotonic()
    for thread in threads:
        thread.join(JOIN_TIMEOUT_SECONDS)
    results.put((start, max(ends, default=start), len(ends)))
    ready.wait(JOIN_TIMEOUT_SECONDS)
    results.close()
    results.join_thread()
    os._exit(0)


def _endpoint(backend: str, given: list[str], folder: str) -> str:
    for pair in given:
        name, _, endpoint = pair.partition("=")
        if name == backend:
            return endpoint
    if backend == "c10d":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{probe.getsockname()[1]}"
    if backend in ("sqlite", "sql"):
        return str(Path(folder) / f"{uuid.uuid4().hex}.db")
    raise SystemExit(f"--endpoint {backend}=… is missing")


def _print_table(
    figures: dict[tuple[str, int], list[float | None]], options: argparse.Namespace
) -> None:
    print(f"\n{'nodes':>6} {'backend':12} {'median':>9} {'min':>9} {'max':>9}  c10d / this")
    for nodes in options.nodes:
        base = _median(figures.get(("c10d", nodes), []))
        for backend in options.backends:
            done = [seconds for seconds in figures[backend, nodes] if seconds is not None]
            middle = _median(figures[backend, nodes])
            if middle is None:
                print(f"{nodes:6} {backend:12} {'not done':>9}")
                continue
            ratio = f"{base / middle:8.1f}" if base else "       -"
            print(
                f"{nodes:6} {backend:12} {middle:9.3f} {min(done):9.3f} {max(done):9.3f}  {ratio}"
            )


def _median(figures: list[float | None]) -> float | None:
    done = [seconds for seconds in figures if seconds is not None]
    return statistics.median(done) if done and len(done) == len(figures) else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--backends", nargs="+", default=["sqlite", "c10d"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--endpoint", nargs="*", default=[], help="BACKEND=ENDPOINT")
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
