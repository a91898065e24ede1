"""What the clauses about faults are tried on here: servers in processes of their own."""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.target import Server, Target

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "third_party_backend"
REQUEST_SECONDS = 1.0
"""Every clause in which nothing answers takes that long, or twice that."""


class NetworkTarget(Target):
    """The parts that all have in common. Each clause has run ids of its own, so that it begins
    empty."""

    call_seconds_max = 3.0
    recovery_seconds_max = 5.0

    def __init__(self, server: Server, prefix: str) -> None:
        self.server = server
        self.address = server.address
        self.prefix = prefix
        self.made: list[Any] = []

    def close(self) -> None:
        while self.made:
            self.made.pop().close()


def http_server(folder: Path) -> ProcessServer:
    """The example's server, with a journal."""
    command = [sys.executable, "-m", "http_rdzv.server"]
    return ProcessServer(
        [*command, "--port", "{port}", "--data", "{data}/journal"],
        folder,
        technology="rdzv-http",
        environment={"PYTHONPATH": str(EXAMPLE)},
    )


class HttpTarget(NetworkTarget):
    """The example of a third party's backend, with its store."""

    name = "http"
    without = MappingProxyType(
        dict.fromkeys(["roster", "server_clock", "watch"], "its server keeps documents only")
    )

    def connect(self, run_id: str = "job") -> Any:
        backend = _example("backend").HttpRendezvousBackend
        return backend(self._url(), self.prefix + run_id, REQUEST_SECONDS)

    def store(self, run_id: str = "job") -> Any:
        store = _example("store").HttpStore
        self.made.append(store(self._url(), self.prefix + run_id, None, REQUEST_SECONDS))
        return self.made[-1]

    def _url(self) -> str:
        host, port = self.address
        return f"http://{host}:{port}"


def _example(module: str) -> Any:
    if str(EXAMPLE) not in sys.path:
        sys.path.append(str(EXAMPLE))
    return importlib.import_module(f"http_rdzv.{module}")


def tcp_server(folder: Path) -> ProcessServer:
    """A TCPStore's server, alone in its process."""
    return ProcessServer(
        [sys.executable, __file__, "{port}"],
        folder,
        technology="TCPStore",
        version=str(torch.__version__),
    )


class TcpTarget(NetworkTarget):
    """torch's own TCPStore. Its clients are closed by nobody but the garbage collector."""

    name = "TCPStore"
    call_seconds_max, recovery_seconds_max = 1.0, 0.5
    without = MappingProxyType(
        {
            **dict.fromkeys(["roster", "watch", "server_clock"], "it is a store alone"),
            "durable": "it keeps everything in memory",
            **dict.fromkeys(
                ["queues", "list_keys"], "these calls keep the GIL: while one hangs, all hangs"
            ),
        }
    )

    def connect(self, run_id: str = "job") -> Any:
        raise NotImplementedError("it is a store")

    def store(self, run_id: str = "job") -> Any:
        host, port = self.address
        client = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
        return dist.PrefixStore(self.prefix, client)


def serve_tcp_store(port: int) -> None:
    """Serve until the process is killed."""
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    server.set_timeout(timedelta(days=1))
    while True:
        try:
            server.wait(["never set"])
        except dist.DistStoreError:
            continue


if __name__ == "__main__":
    serve_tcp_store(int(sys.argv[1]))
