"""TCPStore: connections that are lost without a word, and nodes that go without one."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rdzv import registry
from rdzv.backends import c10d, c10d_bell, c10d_threads
from rdzv.backends.c10d import C10dRendezvousBackend
from rdzv.backends.c10d_places import TcpPlace
from rdzv.backends.c10d_threads import KEEP_ALIVE
from rdzv.conformance import fault_store_cases
from rdzv.conformance.fault_kit import (
    FAULTS,
    STORE_ERRORS,
    STORE_TIMEOUT_SECONDS,
    Call,
    Calls,
    all_fail_in_time,
    all_recover,
    no_connection_is_left,
    store_of,
    through_proxy,
)
from rdzv.conformance.proxy import Proxy
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question
from rdzv.stores import c10d as stores

from .c10d_targets import TcpStoreTarget, tcp_server
from .operations import TTL_SECONDS, until

LONG_SECONDS = 60.0
SOON_SECONDS = 20.0
LISTING = ("num_keys", "list_keys")
BELL = "rdzv-c10d-bell"


def opened_tcp(opened: list[Any], port: int, run_id: str = "job", **config: str) -> Any:
    return opened_both(opened, port, run_id, **config)[0]


def opened_both(
    opened: list[Any], port: int, run_id: str = "job", **config: str
) -> tuple[Any, Any]:
    config = {"close_timeout": str(LONG_SECONDS), "read_timeout": "10", **config}
    parameters = RendezvousParameters(
        "tcpstore", f"127.0.0.1:{port}", run_id, min_nodes=1, max_nodes=1, local_addr=None, **config
    )
    backend, store = registry.open_backend(parameters)
    opened += [backend, store]
    return backend, store


def test_somebody_else_at_the_port_is_told_at_once(opened: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            while True:
                try:
                    connection, _ = other.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(b"-ERR wrong protocol, dear client\r\n")
                    connection.recv(4096)

        threading.Thread(target=answer, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match="else than a TCPStore answers"):
            opened_tcp(opened, other.getsockname()[1], read_timeout="600")
        assert time.monotonic() - began < LONG_SECONDS


def announced(backend: Any, node_id: str) -> None:
    backend.announce(Entry(node_id, b"", "round"), TTL_SECONDS, Question())


def seconds_to_close(backend: Any) -> float:
    started = time.monotonic()
    backend.close()
    return time.monotonic() - started


# Connections


def test_a_listener_whose_connection_is_forgotten_connects_anew(
    opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c10d_bell, "DEAF_SECONDS", 0.2)
    server = tcp_server(tmp_path)
    opened.append(server)
    proxy = Proxy(server.address)
    opened.append(proxy)
    direct, through = (TcpPlace(*each.address, is_host=False) for each in (server, proxy))
    bells: list[TcpPlace] = []

    def connect(seconds: float) -> Any:
        if threading.current_thread().name != BELL:
            return direct.connect(seconds)
        bells.append(direct if bells else through)
        return bells[-1].connect(seconds)

    listening = C10dRendezvousBackend(connect, "job")
    writing = C10dRendezvousBackend(direct.connect, "job")
    opened += [listening, writing]
    announced(listening, "node")
    until(lambda: listening._listener is not None and listening._listener.listening)
    # What a firewall does that forgets: neither end hears of it.
    proxy.black_hole()
    _, token, _ = writing.set_state(b"1")

    def connects_anew() -> bool:
        assert listening.beat("node", TTL_SECONDS, Question()).token == token
        return len(bells) == 2

    until(connects_anew)
    until(lambda: listening._listener is not None and listening._listener.listening)
    _, token, _ = writing.set_state(b"2", token)
    until(lambda: token in listening._dates)


def test_a_write_after_a_pause_survives_a_server_that_was_restarted(
    opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks before it writes: what fails then may be repeated, what was written may not."""
    monkeypatch.setattr(stores, "QUIET_SECONDS", 0.0)
    server = tcp_server(tmp_path)
    try:
        _, store = opened_both(opened, server.address[1], is_host="false")
        assert store.add("counter", 1) == 1
        server.kill()
        server.restart(keep_data=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
    finally:
        server.close()


def test_idle_connections_are_kept_alive(opened: list[Any], port: int) -> None:
    backend = opened_tcp(opened, port)
    link, listener = backend._links._link, backend._listener
    until(lambda: listener.listening)
    kept = []

    def look(connection: socket.socket) -> bool:
        on = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        kept.append((on, idle))
        return True

    for thread in (link._thread, listener._thread):
        for descriptor, inode in c10d_threads._opened[thread]:
            assert c10d_threads._with_socket(descriptor, inode, look)
    assert kept == 2 * [(1, KEEP_ALIVE["TCP_KEEPIDLE"])]


def test_who_leaves_does_not_wait_for_a_host_that_is_gone(
    opened: list[Any], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, other = (opened_tcp(opened, port) for _ in range(2))
    assert host._place.hosts
    served: list[Any] = []
    monkeypatch.setattr(other._place, "_serve", served.append)
    host._place.close()
    # Its connections are of no use any more, and no process of this machine is to host now.
    assert seconds_to_close(other) < stores.FAREWELL_SECONDS + 2 * c10d.THREADS_END_SECONDS
    assert not served


def test_a_silent_server_does_not_stop_the_process(opened: list[Any], tmp_path: Path) -> None:
    """Torch's ``list_keys`` holds Python's global lock while it waits for its answer."""
    server = tcp_server(tmp_path)
    opened.append(server)
    _, store = opened_both(opened, server.address[1])
    store.set("key", "value")
    assert store.list_keys() == ["key"]
    store.set_timeout(timedelta(seconds=0.5))
    server.pause()
    ticks, pause = [time.monotonic()], threading.Event()
    asking = Call(store.list_keys)
    while not asking.has_ended:
        pause.wait(0.05)
        ticks.append(time.monotonic())
    server.resume()
    assert not asking.has_returned
    longest = max(later - earlier for earlier, later in itertools.pairwise(ticks))
    assert longest < c10d_threads.ANSWER_SECONDS / 2


@pytest.mark.full
def test_no_answer_is_waited_for_for_ever(opened: list[Any], tmp_path: Path) -> None:
    server = tcp_server(tmp_path)
    opened.append(server)
    raw = TcpPlace(*server.address, is_host=False).connect(SOON_SECONDS)
    assert raw.list_keys() == []
    server.pause()
    started = time.monotonic()
    with pytest.raises(dist.DistError):
        raw.list_keys()
    assert time.monotonic() - started < SOON_SECONDS
    server.resume()


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_calls_that_nobody_answers_fail_in_time_and_leave_nothing(
    opened: list[Any], tmp_path: Path, fault: str
) -> None:
    """What the kit's clauses say, without what asks for ``list_keys``."""
    server = tcp_server(tmp_path)
    opened.append(server)
    target = TcpStoreTarget(server, read_timeout="2")
    opened.append(target)

    def calls(mark: str) -> Calls:
        every = fault_store_cases._every_call(target, store, mark)
        return {name: each for name, each in every.items() if name not in LISTING}

    with through_proxy(target) as proxy:
        store = store_of(target)
        store.set("there", "1")
        FAULTS[fault](proxy)
        all_fail_in_time(target, calls("during"), STORE_ERRORS, STORE_TIMEOUT_SECONDS)
        proxy.heal()
        all_recover(target, calls("after"), STORE_ERRORS, STORE_TIMEOUT_SECONDS)
        assert store.get("after/set") == b"1"
        target.close()
        no_connection_is_left(proxy)


# Nodes


def test_a_host_does_not_wait_for_nodes_of_another_run(opened: list[Any], port: int) -> None:
    host = opened_tcp(opened, port)
    assert host._place.hosts
    opened_tcp(opened, port, "another job")
    assert seconds_to_close(host) < SOON_SECONDS


def test_a_host_does_not_wait_for_who_was_ended_after_it_withdrew(
    opened: list[Any], port: int
) -> None:
    host, other = (opened_tcp(opened, port) for _ in range(2))
    for number, backend in enumerate((host, other)):
        announced(backend, f"node{number}")
        backend.withdraw(f"node{number}", TTL_SECONDS)
    # SIGTERM ends it here: it says nothing any more.
    assert stores.LINGER_WITHDRAWN_SECONDS <= seconds_to_close(host) < SOON_SECONDS
    assert other._attended_life


@pytest.mark.full
def test_a_host_waits_for_who_is_live_though_others_have_withdrawn(
    opened: list[Any], port: int
) -> None:
    host, ended, working = (opened_tcp(opened, port) for _ in range(3))
    for number, backend in enumerate((host, ended, working)):
        announced(backend, f"node{number}")
    host.withdraw("node0", TTL_SECONDS)
    ended.withdraw("node1", TTL_SECONDS)
    leaving = threading.Thread(target=host.close)
    leaving.start()
    leaving.join(stores.LINGER_WITHDRAWN_SECONDS + 2.0)
    assert leaving.is_alive()
    assert working.get_state() is None
    working.withdraw("node2", TTL_SECONDS)
    leaving.join(SOON_SECONDS)
    assert not leaving.is_alive()
