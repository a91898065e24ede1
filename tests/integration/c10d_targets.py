"""Targets on torch's own stores, chosen as torchrun's users choose them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rdzv.backends.c10d_places import TcpPlace
from rdzv.backends.c10d_roster import digest
from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.registered import RegisteredTarget


def tcp_server(folder: Path) -> ProcessServer:
    """A store that a process of its own serves."""
    return ProcessServer(
        [sys.executable, __file__, "{port}"],
        folder,
        technology="TCPStore",
        version=str(torch.__version__),
    )


TIMES = {"read_timeout": "6"}
"""Clauses in which nothing answers wait for it."""
LONG = ("faults", "concurrency", "values", "waits", "queues")
"""The groups of clauses that are tried in the full run only."""
NO_CLOCK = "a node that was not connected when the run was closed cannot know when that was"
IN_MEMORY = "it keeps everything in its host's memory"


class TcpStoreTarget(RegisteredTarget):
    """Clients of a store that a process of its own serves."""

    short_ttl_seconds = 0.5

    def __init__(
        self, server: Any, *, without: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        host, port = server.address
        super().__init__(
            "tcpstore",
            f"{host}:{port}",
            {**TIMES, "is_host": "false", **options},
            {"durable": IN_MEMORY, **(without or {})},
            server=server,
        )

    def corrupt(self, run_id: str = "job") -> None:
        host, port = self.server.address
        client = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
        client.set(f"rdzv/{digest(self._run_prefix + run_id)}/head", "a text")

    def wipe(self) -> None:
        self.server.kill()
        self.server.restart(keep_data=False)


class FileStoreTarget(RegisteredTarget):
    """A file; a wipe puts another one in its place."""

    short_ttl_seconds = 0.5
    runs_on = f"FileStore of torch {torch.__version__}"

    def __init__(self, path: Path, **options: Any) -> None:
        self._path = path
        super().__init__("filestore", str(path), {**TIMES, **options})

    def corrupt(self, run_id: str = "job") -> None:
        file = dist.FileStore(str(self._path), -1)
        file.set(f"rdzv/{digest(self._run_prefix + run_id)}/head", "a text")

    def wipe(self) -> None:
        # One that is not removed before, so that its inode is another one.
        beside = self._path.with_suffix(".new")
        beside.touch()
        beside.replace(self._path)
        for lock in self._path.parent.glob("*.lock"):
            with contextlib.suppress(OSError):
                lock.unlink()


if __name__ == "__main__":
    place = TcpPlace("127.0.0.1", int(sys.argv[1]), is_host=True)
    place.open(10.0)
    threading.Event().wait()
