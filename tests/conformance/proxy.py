"""A network that misbehaves on purpose: a TCP proxy between clients and one server.

Rules:

* What it is told holds from then on, for connections that are open and for new ones, until
  :meth:`Proxy.heal`. Faults add up: a network can be slow and lose answers.
* It knows nothing of the protocol. An *answer* is what the server sends first after the client has
  sent something on the same connection; what it sends unasked is none.
* A black hole is a route that loses packets. TCP sends them again, so after :meth:`Proxy.heal`
  everything arrives, late and in order, also what a client sent that has given up since; and a
  connection that was made meanwhile reaches the server then. Only what comes first differs: here a
  client is connected at once, and then hears nothing, which is the harder case for its timeouts.
* A refused connection is accepted and reset at once, so that the port stays ours.
* One thread, which ends with :meth:`Proxy.close`; every method may be called from any thread, and
  has done what it does when it returns.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import Any

CHUNK_BYTES_MAX = 1 << 16
UNDERWAY_BYTES_MAX = 1 << 23
"""So much may be underway on one connection and way; the sender of more is made to wait."""
DRAIN_SECONDS_MAX = 1.0
"""So long the server may go on with a request after the connection to its client was cut."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _Way:
    """One direction of a connection: what has been read from one side and is due at the other."""

    def __init__(self) -> None:
        self.underway: deque[tuple[float, bytes]] = deque()
        """When it was read, and what; b"" is the end of the stream."""
        self.underway_bytes = 0
        self.ended = False
        """Whether the end has been read."""
        self.closed = False
        """Whether the end has been passed on."""

    def put(self, now: float, data: bytes) -> None:
        self.underway.append((now, data))
        self.underway_bytes += len(data)
        self.ended = not data

    @property
    def takes_more(self) -> bool:
        return not self.ended and self.underway_bytes < UNDERWAY_BYTES_MAX

    def due_seconds(self, delay_seconds: float) -> float | None:
        """When the first of it is due; None where nothing is underway."""
        return self.underway[0][0] + delay_seconds if self.underway else None


class _Connection:
    """A client, and the connection to the server on its behalf."""

    def __init__(self, client: socket.socket) -> None:
        self.client: socket.socket | None = client
        self.server: socket.socket | None = None
        self.connecting = False
        self.to_server, self.to_client = _Way(), _Way()
        self.asked = False
        """Whether the client has sent something since the server's last answer began."""
        self.drained_by: float | None = None
        """The client is cut off, and the server has until then to close too."""

    @property
    def is_over(self) -> bool:
        return self.client is None and self.server is None


class Proxy:
    """Stands before the server at ``server``, at :attr:`address`."""

    def __init__(self, server: tuple[str, int]) -> None:
        found = socket.getaddrinfo(*server, type=socket.SOCK_STREAM)[0]
        self._family: socket.AddressFamily = found[0]
        self._upstream: Any = found[4]
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._accepted = self._dropped = self._bytes_to_server = self._bytes_to_client = 0
        self._closing = False
        self._clear()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setblocking(False)
        self._bell, self._ringer = socket.socketpair()
        for each in (self._bell, self._ringer):
            each.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._run, name="rdzv-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------- what it does

    def heal(self) -> None:
        """Pass everything on at once, what was held back first."""
        with self._lock:
            self._clear()
        self._ring()

    def delay(self, seconds: float) -> None:
        """Pass everything on so much later, on each way."""
        with self._lock:
            self._delay_seconds = seconds
        self._ring()

    def cut(self) -> None:
        """Reset all connections, and those that come."""
        with self._lock:
            self._is_cut = True
            for connection in self._connections:
                self._reset(connection)
            self._connections.clear()
        self._ring()

    def black_hole(self) -> None:
        """Let nothing through, either way, and tell nobody."""
        with self._lock:
            self._is_black_hole = True
        self._ring()

    def drop_answers(
        self, count: int, *, after: int = 0, every: int = 1, then_black_hole: bool = False
    ) -> None:
        """Let so many answers pass, then drop every ``every``-th of those that follow, ``count``
        in all, and reset the connection that it was for. The server has handled the request, or a
        step of it; its client does not know. With ``then_black_hole`` the last of them is followed
        by a black hole, so that no repeat gets through before :meth:`heal`."""
        if count < 1 or after < 0 or every < 1:
            raise ValueError(f"drop_answers({count}, after={after}, every={every})")
        with self._lock:
            self._drops_left, self._passes_left = count, after
            self._drop_every, self._then_black_hole = every, then_black_hole

    def close(self) -> None:
        """Reset all connections, close the port and end the thread."""
        with self._lock:
            self._closing = True
        self._ring()
        self._thread.join()
        for connection in self._connections:
            self._reset(connection)
        self._connections.clear()
        for each in (self._listener, self._bell, self._ringer):
            each.close()

    # ------------------------------------------------------------------------------- what it knows

    @property
    def connections_accepted(self) -> int:
        """How many connections clients have made."""
        with self._lock:
            return self._accepted

    @property
    def open_connections(self) -> int:
        """How many of them no one has ended. In a black hole no end is heard of."""
        with self._lock:
            return sum(
                each.client is not None and not each.to_server.ended for each in self._connections
            )

    @property
    def answers_dropped(self) -> int:
        """How many answers :meth:`drop_answers` has dropped."""
        with self._lock:
            return self._dropped

    @property
    def bytes_to_server(self) -> int:
        """How much has been passed on from clients to the server."""
        with self._lock:
            return self._bytes_to_server

    @property
    def bytes_to_client(self) -> int:
        """How much has been passed on from the server to clients."""
        with self._lock:
            return self._bytes_to_client

    # ------------------------------------------------------------------------------- the thread

    def _clear(self) -> None:
        self._delay_seconds = 0.0
        self._is_cut = self._is_black_hole = False
        self._drops_left = self._passes_left = 0
        self._drop_every, self._then_black_hole = 1, False

    def _ring(self) -> None:
        # A full pipe has rung already, a closed one is deaf.
        with contextlib.suppress(OSError):
            self._ringer.send(b"!")

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closing:
                    return
                poller, wait_milliseconds = self._interests(time.monotonic())
            poller.poll(wait_milliseconds)
            with self._lock:
                # Which of them is ready is not looked at: nothing here blocks.
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(CHUNK_BYTES_MAX)
                self._accept()
                for connection in self._connections:
                    self._serve(connection, time.monotonic())
                self._connections = [each for each in self._connections if not each.is_over]

    def _interests(self, now: float) -> tuple[Any, float | None]:
        """What to wait for, and for how many milliseconds at most."""
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        poller.register(self._listener, select.POLLIN)
        moments: list[float] = []
        for connection in self._connections:
            if connection.drained_by is not None:
                moments.append(connection.drained_by)
            elif self._is_black_hole:
                continue
            self._register(poller, connection, now, moments)
        if not moments:
            return poller, None
        return poller, max(0.0, min(moments) - now) * 1000 + 1

    def _register(
        self, poller: Any, connection: _Connection, now: float, moments: list[float]
    ) -> None:
        if connection.connecting:
            poller.register(connection.server, select.POLLOUT)
            return
        sides = (
            (connection.client, connection.to_server, connection.to_client),
            (connection.server, connection.to_client, connection.to_server),
        )
        for side, outgoing, incoming in sides:
            if side is None:
                continue
            wanted = select.POLLIN if outgoing.takes_more else 0
            due = incoming.due_seconds(self._delay_seconds)
            if due is not None and due <= now:
                wanted |= select.POLLOUT
            elif due is not None:
                moments.append(due)
            if wanted:
                poller.register(side, wanted)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # nobody there, or gone again
                return
            client.setblocking(False)
            self._accepted += 1
            connection = _Connection(client)
            if self._is_cut:
                self._reset(connection)
            else:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections.append(connection)

    def _serve(self, connection: _Connection, now: float) -> None:
        """Do all that can be done for a connection without waiting."""
        if connection.drained_by is not None:
            self._drain(connection, now)
            return
        if self._is_black_hole or connection.is_over:
            return
        try:
            if not self._reach(connection):
                return
            self._read(connection, now)
            if connection.drained_by is None:
                self._write(connection, now)
        except OSError:
            self._reset(connection)

    def _reach(self, connection: _Connection) -> bool:
        """Whether the server is connected. Raises ``OSError`` where it cannot be."""
        if connection.server is None:
            server = socket.socket(self._family, socket.SOCK_STREAM)
            server.setblocking(False)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.server, connection.connecting = server, True
            server.connect_ex(self._upstream)
        if connection.connecting:
            poller = select.poll()
            poller.register(connection.server, select.POLLOUT)
            if not poller.poll(0):
                return False
            error = connection.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, "the server cannot be reached")
            connection.connecting = False
        return True

    def _read(self, connection: _Connection, now: float) -> None:
        client, server = connection.client, connection.server
        assert client is not None
        assert server is not None
        with contextlib.suppress(BlockingIOError):
            while connection.to_server.takes_more:
                connection.to_server.put(now, client.recv(CHUNK_BYTES_MAX))
        with contextlib.suppress(BlockingIOError):
            while connection.to_client.takes_more:
                data = server.recv(CHUNK_BYTES_MAX)
                if data and connection.asked:
                    connection.asked = False
                    if self._drops():
                        self._cut_off(connection, now)
                        return
                connection.to_client.put(now, data)

    def _drops(self) -> bool:
        """Whether the answer that begins now is to be dropped."""
        if not self._drops_left:
            return False
        if self._passes_left:
            self._passes_left -= 1
            return False
        self._drops_left -= 1
        self._passes_left = self._drop_every - 1
        self._dropped += 1
        self._is_black_hole |= self._then_black_hole and not self._drops_left
        return True

    def _write(self, connection: _Connection, now: float) -> None:
        client, server = connection.client, connection.server
        assert client is not None
        assert server is not None
        sent = self._send(connection.to_server, server, now)
        connection.asked |= sent > 0
        self._bytes_to_server += sent
        self._bytes_to_client += self._send(connection.to_client, client, now)
        if connection.to_server.closed and connection.to_client.closed:
            client.close()
            server.close()
            connection.client = connection.server = None

    def _send(self, way: _Way, sink: socket.socket, now: float) -> int:
        """Pass on what is due. Returns how many bytes that were."""
        total = 0
        with contextlib.suppress(BlockingIOError):
            while (due := way.due_seconds(self._delay_seconds)) is not None and due <= now:
                read_at, data = way.underway[0]
                if not data:
                    way.underway.popleft()
                    way.closed = True
                    sink.shutdown(socket.SHUT_WR)
                    break
                sent = sink.send(data)
                total += sent
                way.underway_bytes -= sent
                if sent == len(data):
                    way.underway.popleft()
                else:
                    way.underway[0] = (read_at, data[sent:])
        return total

    def _cut_off(self, connection: _Connection, now: float) -> None:
        """Reset the client; the server may finish what it was asked."""
        assert connection.client is not None
        _reset(connection.client)
        connection.client = None
        connection.drained_by = now + DRAIN_SECONDS_MAX
        assert connection.server is not None
        connection.to_client, connection.to_server = _Way(), _Way()
        with contextlib.suppress(OSError):
            connection.server.shutdown(socket.SHUT_WR)

    def _drain(self, connection: _Connection, now: float) -> None:
        assert connection.server is not None
        assert connection.drained_by is not None
        over = now >= connection.drained_by
        try:
            while not over:
                over = not connection.server.recv(CHUNK_BYTES_MAX)
        except BlockingIOError:
            pass
        except OSError:
            over = True
        if over:
            connection.server.close()
            connection.server = None

    @staticmethod
    def _reset(connection: _Connection) -> None:
        for side in (connection.client, connection.server):
            if side is not None:
                _reset(side)
        connection.client = connection.server = None


def _reset(side: socket.socket) -> None:
    """Close a connection so that its other end gets an error, as after a crash or by a firewall."""
    with contextlib.suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    side.close()
