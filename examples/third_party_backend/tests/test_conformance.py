"""rdzv's conformance kit on this backend and its store, with a server of its own to torment."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from http_rdzv.backend import HttpRendezvousBackend
from http_rdzv.server import VERSION
from http_rdzv.store import HttpStore

from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.suites import BackendSuite, RosterSuite, StoreSuite, WatchSuite
from rdzv.conformance.target import Server, Target

COMMAND = [sys.executable, "-m", "http_rdzv.server", "--port", "{port}", "--data", "{data}/journal"]
REQUEST_SECONDS = 1.5
"""Every clause in which nothing answers takes that long, or twice that."""


class HttpServer(ProcessServer):
    """``python -m http_rdzv.server``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(COMMAND, folder, technology="rdzv-http", version=VERSION)

    def answers(self) -> bool:
        """Whether it greets."""
        connection = http.client.HTTPConnection(*self.address, timeout=1.0)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 200
        except http.client.HTTPException:
            return False
        finally:
            connection.close()


class HttpTarget(Target):
    """A server process. Every clause has run ids of its own, so that it begins empty."""

    name = "http"
    without = MappingProxyType(
        {
            "roster": "the server keeps documents only; rdzv keeps the nodes in the document",
            "server_clock": "the server tells nobody the age of a document",
            "watch": "the server does not tell of changes; rdzv asks again and again",
        }
    )

    def __init__(self, server: Server, prefix: str) -> None:
        self.server = server
        self.address = server.address
        self._prefix = prefix
        self._stores: list[HttpStore] = []

    @property
    def endpoint(self) -> str:  # type: ignore[override]
        """Where :meth:`connect` connects to."""
        assert self.address is not None
        host, port = self.address
        return f"http://{host}:{port}"

    def connect(self, run_id: str = "job") -> HttpRendezvousBackend:
        return HttpRendezvousBackend(self.endpoint, self._prefix + run_id, REQUEST_SECONDS)

    def store(self, run_id: str = "job") -> HttpStore:
        store = HttpStore(self.endpoint, self._prefix + run_id, None, REQUEST_SECONDS)
        self._stores.append(store)
        return store

    def wipe(self) -> None:
        """Lose all data: a new server comes up in the place of the old one."""
        assert self.server is not None
        self.server.kill()
        self.server.restart(keep_data=False)

    def corrupt(self, run_id: str = "job") -> None:
        backend = self.connect(run_id)
        found = backend.get_state()
        backend.set_state(b"somebody else's", None if found is None else found[1])

    def recipe(self) -> tuple[str, dict[str, Any]]:
        return "rdzv.conformance.registered:RegisteredTarget", {
            "backend": "http_rdzv:create_backend",
            "endpoint": self.endpoint,
            "config": {"read_timeout": str(2 * REQUEST_SECONDS)},
            "without": dict(self.without),
            "run_prefix": self._prefix,
        }

    def torchrun_arguments(self, run_id: str) -> list[str]:
        return [
            "--rdzv-backend=http",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self._prefix}{run_id}",
        ]

    def close(self) -> None:
        while self._stores:
            self._stores.pop().close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    server = HttpServer(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


class _Http:
    @pytest.fixture
    def target(self, server: HttpServer, request: pytest.FixtureRequest) -> Iterator[Target]:
        target = HttpTarget(server, f"{request.node.name}-")
        yield target
        target.close()


class TestBackend(_Http, BackendSuite):
    pass


class TestRoster(_Http, RosterSuite):
    pass


class TestWatch(_Http, WatchSuite):
    pass


class TestStore(_Http, StoreSuite):
    pass
