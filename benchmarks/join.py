"""How long N nodes take to meet: seconds from the last node's start to the last node's rank.

Every node is a thread in one of four processes, with a handler of its own, made as torchrun makes
it; min = max = N. Backends take turns in each round, so that a busy machine troubles all of them
alike; the ratio to torch's own c10d in the same run is what counts, not the seconds. Beside the
times stands what the server counted: requests, commands and bytes for each node.

    make bench-join NODES="8 64 256" BACKENDS="redis c10d" ROUNDS=3
    python benchmarks/join.py --nodes 64 --backends redis --endpoint redis=redis://host:6379
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import resource
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counters import COUNTERS, ServerCounters
from crowd import Case, Measurement, WrongRanks, context_for, measure
from report import REFERENCE, NoPlot, check_plot, outcome, print_table, write_json, write_plot

from rdzv.conformance.servers.base import ServerUnavailable
from rdzv.conformance.servers.options import Options
from rdzv.conformance.servers.pool import ServerPool
from rdzv.registry import known_backends

TECHNOLOGIES = {
    "redis": "redis",
    "postgresql": "postgresql",
    "mysql": "mysql",
    "etcd-v3": "etcd",
}
"""What server to start for a backend that has no endpoint."""
TORCHS_OWN_ON_A_PORT = ("c10d", "tcpstore")
FILES = ("sqlite", "sql", "filestore")
OPEN_FILES_PER_NODE = 8
RESOLVER = "timeout:1 attempts:1"
"""Seconds, for all backends alike. torch looks up the name of each address that it connects to; a
name server that leaves such a question unanswered would add 10 s to a measurement by chance."""


class Endpoints:
    """Where each backend is: as the user says, else servers of this machine that are started when
    they are first needed."""

    def __init__(self, given: dict[str, str], folder: Path, pool: ServerPool) -> None:
        self._given = given
        self._folder = folder
        self._pool = pool

    def of(self, backend: str) -> str:
        """For the next measurement. Raises ``SystemExit`` with what is missing."""
        if backend in self._given:
            return self._given[backend]
        if backend in TORCHS_OWN_ON_A_PORT:
            return f"127.0.0.1:{_free_port()}"
        if backend in FILES:
            return str(self._folder / f"{uuid.uuid4().hex}.db")
        if backend not in TECHNOLOGIES:
            raise SystemExit(f"--endpoint {backend}=… is missing: there is nothing to start for it")
        try:
            return self._pool.get(TECHNOLOGIES[backend]).endpoint()
        except ServerUnavailable as error:
            raise SystemExit(
                f"{backend}: {error}. Or give one that runs: --endpoint {backend}=…"
            ) from error


def main() -> int:
    """Measure, print a table with ratios, and write JSON and a plot where asked to."""
    options = _options()
    # Before this process or a child resolves its first name: the resolver reads it once.
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
    if options.plot:
        try:
            check_plot()
        except NoPlot as error:
            raise SystemExit(str(error)) from error
    _allow_open_files(max(options.nodes) * OPEN_FILES_PER_NODE)
    measurements: list[Measurement] = []
    try:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rdzv-bench-"))
            pool = stack.enter_context(contextlib.closing(ServerPool(Options("local"))))
            endpoints = Endpoints(dict(options.endpoint), Path(folder), pool)
            measurements = _measure_all(options, endpoints, stack)
    except WrongRanks as error:
        raise SystemExit(f"The ranks are wrong: {error}") from error
    print_table(measurements)
    if options.json:
        write_json(options.json, measurements, _about(options))
    if options.plot:
        write_plot(options.plot, measurements)
    return 0


def _measure_all(
    options: argparse.Namespace, endpoints: Endpoints, stack: contextlib.ExitStack
) -> list[Measurement]:
    context = context_for(_modules(options.backends))
    counters: dict[str, ServerCounters] = {}
    measurements = []
    for nodes in options.nodes:
        for _ in range(options.rounds):
            for backend in options.backends:
                case = Case(backend, endpoints.of(backend), nodes, options.limit)
                if backend in COUNTERS and backend not in counters:
                    opened = COUNTERS[backend](case.endpoint)
                    counters[backend] = stack.enter_context(contextlib.closing(opened))
                one = measure(context, case, counters.get(backend))
                measurements.append(one)
                print(f"{nodes:5} nodes  {backend:12} {outcome(one)}", flush=True)
    return measurements


def _modules(backends: list[str]) -> list[str]:
    """What the backends would import in each process anew."""
    factories = {known.name: known.factory for known in known_backends()}
    return [factories[name].partition(":")[0] for name in backends if factories.get(name)]


def _allow_open_files(wanted: int) -> None:
    """As many as the system lets us have; processes that we start inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    allowed = wanted if unlimited else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _about(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": options.rounds,
    }


def _pair(text: str) -> tuple[str, str]:
    name, equals, endpoint = text.partition("=")
    if not (name and equals and endpoint):
        raise argparse.ArgumentTypeError(f"{text!r} is not BACKEND=ENDPOINT")
    return name, endpoint


def _at_least(least: float, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least:g}")
        return value

    return number


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = _at_least(1, int)
    parser.add_argument("--nodes", type=count, nargs="+", default=[8, 32])
    parser.add_argument("--backends", nargs="+", default=["redis", "sqlite", REFERENCE])
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument(
        "--endpoint",
        type=_pair,
        action="append",
        default=[],
        metavar="BACKEND=ENDPOINT",
        help="a server that runs, instead of one that is started; may be given several times",
    )
    parser.add_argument(
        "--limit",
        type=_at_least(0.001, float),
        default=60.0,
        metavar="SECONDS",
        help="for one measurement; what takes longer counts as not done (default: 60)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png|svg", help="draw them")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
