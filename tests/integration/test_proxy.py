"""The proxy of the conformance kit: each fault is what its docstring says, and is over when healed.

The server answers each line with the line, and can be asked how many lines it has handled.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rdzv.conformance.proxy import Proxy

PATIENCE_SECONDS = 20.0
A_WHILE_SECONDS = 0.1
"""What has not come after this long is taken not to come."""


class EchoServer:
    """Answers every line with itself, in a thread for each connection."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def say(self, text: bytes) -> None:
        """Send something unasked on every connection."""
        for each in self._sockets:
            each.sendall(text)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._sockets.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=[connection]))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            for line in lines:
                self.lines.append(line)
                connection.sendall(line)


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with contextlib.closing(EchoServer()) as server:
        yield server


@pytest.fixture
def proxy(server: EchoServer) -> Iterator[Proxy]:
    with Proxy(server.address) as proxy:
        yield proxy


class Client:
    def __init__(self, proxy: Proxy) -> None:
        self.socket = socket.create_connection(proxy.address, timeout=PATIENCE_SECONDS)
        self.lines = self.socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *details: object) -> None:
        self.lines.close()
        self.socket.close()

    def send(self, line: bytes) -> None:
        self.socket.sendall(line)

    def ask(self, line: bytes) -> bytes:
        self.send(line)
        return self.lines.readline()

    def hears_nothing(self) -> bool:
        self.socket.settimeout(A_WHILE_SECONDS)
        try:
            return not self.socket.recv(1) and False
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(PATIENCE_SECONDS)


def wait_until(condition: Callable[[], object]) -> None:
    deadline, pause = time.monotonic() + PATIENCE_SECONDS, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        pause.wait(0.005)


def test_it_passes_everything_on_and_counts(proxy: Proxy) -> None:
    big = b"x" * 5_000_000 + b"\n"
    with Client(proxy) as client, Client(proxy) as other:
        assert client.ask(b"one\n") == b"one\n"
        # Both ways at once: neither side reads before it has written all.
        sending = threading.Thread(target=other.send, args=[big])
        sending.start()
        assert other.lines.readline() == big
        sending.join()
        assert (proxy.connections_accepted, proxy.open_connections) == (2, 2)
        assert proxy.bytes_to_server == proxy.bytes_to_client == len(big) + 4
    wait_until(lambda: proxy.open_connections == 0)
    assert proxy.connections_accepted == 2


def test_the_end_of_a_stream_is_passed_on(proxy: Proxy) -> None:
    with Client(proxy) as client:
        client.send(b"last\n")
        client.socket.shutdown(socket.SHUT_WR)
        assert client.lines.read() == b"last\n"


def test_a_slow_network_delays_each_way(proxy: Proxy) -> None:
    with Client(proxy) as client:
        assert client.ask(b"fast\n") == b"fast\n"
        proxy.delay(0.15)
        started = time.monotonic()
        assert client.ask(b"slow\n") == b"slow\n"
        assert 0.3 <= time.monotonic() - started < PATIENCE_SECONDS
        proxy.delay(1000.0)
        client.send(b"held\n")
        assert client.hears_nothing()
        proxy.heal()
        assert client.lines.readline() == b"held\n"


def test_a_cut_resets_old_and_new_connections(proxy: Proxy) -> None:
    with Client(proxy) as client:
        assert client.ask(b"one\n") == b"one\n"
        proxy.cut()
        assert proxy.open_connections == 0
        with pytest.raises(ConnectionResetError):
            client.lines.readline()
    with pytest.raises(ConnectionError), Client(proxy) as client:
        client.ask(b"refused\n")
    proxy.heal()
    with Client(proxy) as client:
        assert client.ask(b"again\n") == b"again\n"


def test_a_black_hole_swallows_and_delivers_late(proxy: Proxy, server: EchoServer) -> None:
    with Client(proxy) as old:
        assert old.ask(b"old\n") == b"old\n"
        proxy.black_hole()
        old.send(b"late\n")
        server.say(b"unasked\n")
        with Client(proxy) as gone:
            gone.send(b"given up\n")
        with Client(proxy) as new:
            new.send(b"new\n")
            assert old.hears_nothing()
            assert new.hears_nothing()
            assert server.lines == [b"old\n"]
            proxy.heal()
            assert new.lines.readline() == b"new\n"
            assert sorted([old.lines.readline(), old.lines.readline()]) == [b"late\n", b"unasked\n"]
    wait_until(lambda: set(server.lines) == {b"old\n", b"late\n", b"new\n", b"given up\n"})
    wait_until(lambda: proxy.open_connections == 0)


def test_an_answer_is_dropped_after_the_server_has_handled_the_request(
    proxy: Proxy, server: EchoServer
) -> None:
    with Client(proxy) as client:
        assert client.ask(b"zero\n") == b"zero\n"
        proxy.drop_answers(1, after=1)
        assert client.ask(b"one\n") == b"one\n"
        with pytest.raises(ConnectionResetError):
            client.ask(b"two\n")
    assert server.lines == [b"zero\n", b"one\n", b"two\n"]
    assert proxy.answers_dropped == 1
    with Client(proxy) as client:
        assert client.ask(b"three\n") == b"three\n"
    assert proxy.answers_dropped == 1


def test_what_is_sent_unasked_is_no_answer(proxy: Proxy, server: EchoServer) -> None:
    with Client(proxy) as client:
        assert client.ask(b"one\n") == b"one\n"
        proxy.drop_answers(1)
        server.say(b"unasked\n")
        assert client.lines.readline() == b"unasked\n"
        with pytest.raises(ConnectionResetError):
            client.ask(b"two\n")


def test_every_so_many_answers_are_dropped(proxy: Proxy, server: EchoServer) -> None:
    proxy.drop_answers(2, every=3)
    fates = []
    for number in range(8):
        with Client(proxy) as client:
            try:
                fates.append(client.ask(b"%d\n" % number) == b"%d\n" % number)
            except ConnectionResetError:
                fates.append(False)
    assert fates == [False, True, True, False, True, True, True, True]
    assert server.lines == [b"%d\n" % number for number in range(8)]


def test_a_dropped_answer_may_be_followed_by_a_black_hole(proxy: Proxy, server: EchoServer) -> None:
    proxy.drop_answers(1, then_black_hole=True)
    with pytest.raises(ConnectionResetError), Client(proxy) as client:
        client.ask(b"one\n")
    with Client(proxy) as client:
        client.send(b"two\n")
        assert client.hears_nothing()
        assert server.lines == [b"one\n"]
        proxy.heal()
        assert client.lines.readline() == b"two\n"


def test_a_server_that_is_not_there_resets(server: EchoServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = listener.getsockname()
    with Proxy(nobody) as proxy, pytest.raises(ConnectionError), Client(proxy) as client:
        client.ask(b"anybody\n")


def test_a_server_that_resets_is_passed_on() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Proxy(listener.getsockname()) as proxy,
        Client(proxy) as client,
    ):
        client.send(b"one\n")
        crashing, _ = listener.accept()
        # Closing with something unread is a reset.
        wait_until(lambda: crashing.recv(1, socket.MSG_PEEK))
        crashing.close()
        with pytest.raises(ConnectionResetError):
            client.lines.readline()


@pytest.mark.parametrize("fault", ["none", "cut", "black_hole"])
def test_closing_leaves_no_thread_and_no_socket(server: EchoServer, fault: str) -> None:
    before = set(threading.enumerate())
    proxy = Proxy(server.address)
    with Client(proxy) as client:
        client.ask(b"one\n")
        if fault != "none":
            getattr(proxy, fault)()
        proxy.close()
        assert not [each for each in set(threading.enumerate()) - before if "proxy" in each.name]
        with pytest.raises(ConnectionResetError):
            client.lines.readline()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(proxy.address, timeout=PATIENCE_SECONDS)
    proxy.close()


def test_an_idle_proxy_takes_no_time(proxy: Proxy) -> None:
    with Client(proxy) as held, Client(proxy) as dead:
        held.ask(b"one\n")
        dead.ask(b"one\n")
        proxy.black_hole()
        held.send(b"two\n")
        dead.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        dead.lines.close()
        dead.socket.close()
        started = time.process_time()
        threading.Event().wait(0.2)
        assert time.process_time() - started < 0.1
