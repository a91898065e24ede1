"""A backend with a roster and a watch that speaks over a network: SQLite behind a server process.

``python remote_sqlite.py PORT FILE`` is the server. A request is a method of the SQL backend, its
answer what that returned or raised; both are pickled, behind their length, since only the tests
of this machine talk here. Connections are kept and used again, one request at a time.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import socket
import socketserver
import struct
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.backends.sql import SqlBackend
from rdzv.conformance.process_server import ProcessServer
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Closable, Entry, Listed, Pulse, Question, Roster, Token, Watch

from .network_targets import REQUEST_SECONDS, NetworkTarget

LENGTH = struct.Struct("!I")
WRITE_ID_BYTES = 16


def send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    return pickle.loads(_exactly(connection, *LENGTH.unpack(_exactly(connection, LENGTH.size))))


def _exactly(connection: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        chunk = connection.recv(size_bytes - len(data))
        if not chunk:
            raise ConnectionResetError("the connection has ended")
        data += chunk
    return bytes(data)


class RemoteBackend(RendezvousBackend, Roster, Watch, Closable):
    """The document is stored behind the id of the write that made it, so that a writer whose
    answer was lost recognises its own."""

    def __init__(self, address: tuple[str, int], run_id: str) -> None:
        self._address, self._run_id = address, run_id
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    @property
    def name(self) -> str:
        return "remote sqlite"

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._ask("get_state")
        return None if found is None else (found[0][WRITE_ID_BYTES:], found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        written = uuid.uuid4().bytes + state
        try:
            found = self._ask("set_state", written, token)
        except RendezvousConnectionError:
            read = self._ask("get_state")
            if read is None or read[0] != written:
                raise  # not made, made and replaced, or yet to be made: nobody knows
            return state, read[1], True
        return None if found is None else (found[0][WRITE_ID_BYTES:], *found[1:])

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        pulse: Pulse = self._ask("announce", entry, ttl_seconds, question)
        return pulse

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        pulse: Pulse = self._ask("beat", node_id, ttl_seconds, question)
        return pulse

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        self._ask("withdraw", node_id, ttl_seconds)

    def entries(self) -> Sequence[Listed]:
        rows: Sequence[Listed] = self._ask("entries")
        return rows

    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: Any = None
    ) -> tuple[bytes, Token] | None:
        wait_seconds = max(0.0, timeout_seconds)
        arguments = (token, timeout_seconds, revision)
        found = self._ask("wait_for_change", *arguments, wait_seconds=wait_seconds)
        return None if found is None else (found[0][WRITE_ID_BYTES:], found[1])

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _ask(self, method: str, *arguments: Any, wait_seconds: float = 0.0) -> Any:
        try:
            return self._answer((self._run_id, method, arguments), wait_seconds)
        except OSError as error:
            raise RendezvousConnectionError(f"no answer to {method}: {error}") from error

    def _answer(self, request: Any, wait_seconds: float) -> Any:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = socket.create_connection(self._address, REQUEST_SECONDS)
        try:
            connection.settimeout(REQUEST_SECONDS + wait_seconds)
            send(connection, request)
            answer, error = receive(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        if error is not None:
            raise error
        return answer


class RemoteTarget(NetworkTarget):
    """The backend above, on a server of its own."""

    name = "remote sqlite"
    without = MappingProxyType({"store": "it is a backend alone"})
    backend: type[RemoteBackend] = RemoteBackend

    def connect(self, run_id: str = "job") -> RemoteBackend:
        backend = self.backend(self.address, self.prefix + run_id)
        self.made.append(backend)
        return backend


def remote_server(folder: Path) -> ProcessServer:
    """The server, with its database in its folder."""
    command = [sys.executable, "-m", "integration.remote_sqlite", "{port}", "{data}/rdzv.db"]
    return ProcessServer(
        command,
        folder,
        technology="remote sqlite",
        environment={"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )


class _Handler(socketserver.BaseRequestHandler):
    path: str

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                run_id, method, arguments = receive(self.request)
                answer: tuple[Any, Exception | None]
                try:
                    answer = getattr(_backend(self.path, run_id), method)(*arguments), None
                except Exception as error:
                    answer = None, error
                send(self.request, answer)


@functools.cache
def _backend(path: str, run_id: str) -> SqlBackend:
    return SqlBackend(path, run_id, name="sqlite")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256


def main(port: int, path: str) -> None:
    _Handler.path = path
    with _Server(("127.0.0.1", port), _Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
