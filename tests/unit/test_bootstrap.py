"""How rank 0 is found, and what happens when it is not."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

import rdzv.bootstrap
from rdzv.bootstrap import BootstrapLost, BootstrapServer, Hosting, bootstrap
from rdzv.errors import RendezvousConnectionError, RendezvousTimeoutError
from rdzv.round_store import RoundStore
from rdzv.state import RoundId
from rdzv.stores.memory import MemoryClient, MemoryStore

PATIENCE_SECONDS = 30.0


def round_store(client: MemoryClient, name: str = "round") -> RoundStore:
    return RoundStore(MemoryStore(client), name, on_exit_barrier=lambda: None)


def soon() -> float:
    return time.monotonic() + PATIENCE_SECONDS


def stands() -> str:
    return ""


def address_of(info: RendezvousStoreInfo) -> tuple[str, int]:
    return info.master_addr, info.master_port


def test_a_shared_server_serves_at_the_published_address() -> None:
    client = MemoryClient()
    server = BootstrapServer("127.0.0.1", soon(), shared=True)
    own = bootstrap(round_store(client), server, soon(), stands)
    others = bootstrap(round_store(client), None, soon(), stands)
    assert address_of(own) == address_of(others) == ("127.0.0.1", server.port)
    timeout = timedelta(seconds=10)
    store = dist.TCPStore(*address_of(others), is_master=False, timeout=timeout)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_two_rounds_have_a_server_each() -> None:
    client = MemoryClient()
    infos = [
        bootstrap(
            round_store(client, name),
            BootstrapServer("127.0.0.1", soon(), shared=True),
            soon(),
            stands,
        )
        for name in ("one", "two")
    ]
    assert infos[0].master_port != infos[1].master_port


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_a_port_that_is_not_shared_is_free(has_ipv6: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.has_ipv6", has_ipv6)
    server = BootstrapServer("host", soon(), shared=False)
    assert 0 < server.port < 65536
    dist.TCPStore("127.0.0.1", server.port, is_master=True, wait_for_workers=False)


def test_an_address_of_another_machine_names_the_option() -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=r"203\.0\.113\.1.*--local-addr"):
        BootstrapServer("203.0.113.1", time.monotonic() + 1.0, shared=True)
    assert time.monotonic() - started < 1.0 + 2.0


def test_a_constructor_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hangs(*arguments: Any, **options: Any) -> dist.TCPStore:
        released.wait(PATIENCE_SECONDS)
        raise OSError("released by the test")

    monkeypatch.setattr(dist, "TCPStore", hangs)
    with pytest.raises(RendezvousConnectionError, match="no answer within"):
        BootstrapServer("127.0.0.1", time.monotonic() + 0.2, shared=True)
    released.set()


def test_whoever_waits_for_rank_0_is_released_when_it_publishes() -> None:
    client = MemoryClient()
    found: list[RendezvousStoreInfo] = []
    waiting = threading.Thread(
        target=lambda: found.append(bootstrap(round_store(client), None, soon(), stands))
    )
    waiting.start()
    server = BootstrapServer("127.0.0.1", soon(), shared=True)
    bootstrap(round_store(client), server, soon(), stands)
    waiting.join(PATIENCE_SECONDS)
    assert address_of(found[0]) == ("127.0.0.1", server.port)


def test_a_broken_round_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdzv.bootstrap, "SLICE_SECONDS", 0.01)
    looks = iter(["", "", "rank 0 was lost"])
    with pytest.raises(BootstrapLost, match="rank 0 was lost"):
        bootstrap(round_store(MemoryClient()), None, soon(), lambda: next(looks))


def test_what_was_published_counts_although_the_round_broke() -> None:
    client = MemoryClient()
    server = BootstrapServer("127.0.0.1", soon(), shared=True)
    bootstrap(round_store(client), server, soon(), lambda: "broken")
    info = bootstrap(round_store(client), None, soon(), lambda: "broken")
    assert info.master_port == server.port


def test_the_deadline_ends_the_wait() -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match="rank 0 did not publish"):
        bootstrap(round_store(MemoryClient()), None, time.monotonic() + 0.2, stands)
    assert time.monotonic() - started < 0.2 + 2.0


class FailingStore(RoundStore):
    """Unreachable as often as it is told."""

    failures = 0

    def multi_set(self, keys: Any, values: Any) -> None:
        self._fail()
        super().multi_set(keys, values)

    def peek(self, keys: Any) -> list[bytes | None]:
        self._fail()
        return super().peek(keys)

    def wait(self, keys: Any, timeout: Any = None) -> None:
        self._fail()
        super().wait(keys, timeout)

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise dist.DistNetworkError("as the test wanted")


@pytest.mark.parametrize("is_rank_0", [True, False])
def test_a_store_that_cannot_be_reached_is_asked_again_until_the_deadline(
    is_rank_0: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdzv.bootstrap, "RETRY_SECONDS", 0.01)
    client = MemoryClient()
    server = BootstrapServer("127.0.0.1", soon(), shared=True)
    if not is_rank_0:
        bootstrap(round_store(client), server, soon(), stands)
    store = FailingStore(MemoryStore(client), "round", on_exit_barrier=lambda: None)
    own = server if is_rank_0 else None
    store.failures = 3
    assert bootstrap(store, own, soon(), stands).master_port == server.port
    store.failures = 1_000_000
    with pytest.raises(RendezvousTimeoutError, match="as the test wanted"):
        bootstrap(store, own, time.monotonic() + 0.1, stands)


def test_a_rank_0_that_never_publishes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.bootstrap.PATIENCE_SECONDS", 0.1)
    with pytest.raises(BootstrapLost, match="did not publish"):
        bootstrap(round_store(MemoryClient()), None, soon(), stands)


def test_the_store_keeps_its_timeout_and_is_asked_within_the_deadline() -> None:
    store = round_store(MemoryClient())
    usual, asked = store.timeout, []

    def stands_for_now() -> str:
        asked.append(store.timeout.total_seconds())
        return ""

    with pytest.raises(RendezvousTimeoutError):
        bootstrap(store, None, time.monotonic() + 0.2, stands_for_now)
    assert asked
    assert max(asked) <= 0.5
    assert store.timeout == usual


ROUND = RoundId("i", 1, "n")


def test_who_hosts_tells_the_port_of_the_server_that_it_has() -> None:
    early = Hosting(ROUND, lambda: BootstrapServer("127.0.0.1", soon(), shared=True))
    port = early.port(PATIENCE_SECONDS)
    assert port == early.server(soon(), stands).port > 0


@pytest.mark.parametrize(
    "error", [RendezvousConnectionError("as the test wanted"), TimeoutError(), SystemExit()]
)
def test_what_keeps_a_server_from_starting_is_told_when_the_result_is_wanted(
    error: BaseException,
) -> None:
    def fails() -> BootstrapServer:
        raise error

    with pytest.raises(type(error)):
        Hosting(ROUND, fails).server(soon(), stands)
    assert Hosting(ROUND, fails).port(PATIENCE_SECONDS) == 0


def test_a_server_that_does_not_start_is_waited_for_while_the_round_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rdzv.bootstrap, "SLICE_SECONDS", 0.01)
    released = threading.Event()

    def hangs() -> BootstrapServer:
        released.wait(PATIENCE_SECONDS)
        raise RendezvousConnectionError("released by the test")

    never = Hosting(ROUND, hangs)
    assert never.port(0.01) == 0
    with pytest.raises(BootstrapLost, match="formed anew"):
        never.server(soon(), lambda: "the round is about to be formed anew")
    with pytest.raises(RendezvousTimeoutError, match="rank 0"):
        never.server(time.monotonic() - rdzv.bootstrap.DEADLINE_SLACK_SECONDS, stands)
    released.set()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """What ends here ends by itself."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def assert_ends(port: int) -> None:
    deadline = soon()
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS).close()
        except OSError:
            return
        assert time.monotonic() < deadline, "the server still listens"
        threading.Event().wait(0.01)


@pytest.mark.usefixtures("no_garbage_collection")
def test_the_server_of_a_round_that_nobody_wants_ends_at_once() -> None:
    unwanted = Hosting(ROUND, lambda: BootstrapServer("127.0.0.1", soon(), shared=True))
    port = unwanted.port(PATIENCE_SECONDS)
    assert port
    del unwanted
    assert_ends(port)


@pytest.mark.usefixtures("no_garbage_collection")
def test_the_server_of_a_round_that_nobody_wanted_before_it_was_there_ends_at_once() -> None:
    unwanted, ports = threading.Event(), []

    def start() -> BootstrapServer:
        assert unwanted.wait(PATIENCE_SECONDS)
        server = BootstrapServer("127.0.0.1", soon(), shared=True)
        ports.append(server.port)
        return server

    hosting = Hosting(ROUND, start)
    del hosting
    unwanted.set()
    deadline = soon()
    while not ports:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    assert_ends(ports[0])
