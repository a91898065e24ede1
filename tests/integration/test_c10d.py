"""What is particular to torch's own stores: who hosts, who leaves last, who watches whom."""

from __future__ import annotations

import collections
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rdzv import registry
from rdzv.backends import c10d
from rdzv.backends.c10d import C10dRendezvousBackend
from rdzv.backends.c10d_places import FilePlace
from rdzv.backends.c10d_roster import HEAL_SECONDS, KEEPERS, REVISION, SMALL, digest
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError
from rdzv.ports import Entry, Question
from rdzv.stores.c10d import C10dClient, C10dStore
from rdzv.stores.memory import MemoryClient, MemoryStore

from .operations import until

TTL_SECONDS = 4.0
LONG_SECONDS = 60.0
DEADLINE_SECONDS = 20.0
LINGER_SECONDS = 1.0
READ_SECONDS = 1.0
ASK_SECONDS = 0.5
ELSEWHERE = "192.0.2.1"
"""An address that is nobody's."""


def parameters(backend: str, endpoint: str, **config: str) -> RendezvousParameters:
    config = {"close_timeout": str(LINGER_SECONDS), "read_timeout": "10", **config}
    return RendezvousParameters(backend, endpoint, "job", 1, 1, **config)


def opened_tcp(opened: list[Any], endpoint: str, **config: str) -> Any:
    backend, store = registry.open_backend(parameters("tcpstore", endpoint, **config))
    opened += [backend, store]
    return backend


def announced(backend: Any, node_id: str, ttl_seconds: float = LONG_SECONDS) -> Any:
    return backend.announce(Entry(node_id, b"", "round"), ttl_seconds, Question())


# Who hosts


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_whoever_comes_first_hosts(opened: list[Any], port: int, host: str) -> None:
    first, second = (opened_tcp(opened, f"{host}:{port}") for _ in range(2))
    assert (first._place.hosts, second._place.hosts) == (True, False)
    _, token, _ = first.set_state(b"1")
    assert second.get_state() == (b"1", token)


def test_many_come_at_once_and_one_hosts(opened: list[Any], port: int) -> None:
    threads = [
        threading.Thread(target=opened_tcp, args=(opened, f"127.0.0.1:{port}")) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    backends = [each for each in opened if isinstance(each, C10dRendezvousBackend)]
    assert len(backends) == 8
    assert sum(each._place.hosts for each in backends) == 1  # type: ignore[attr-defined]
    backends[0].set_state(b"1")
    assert {each.get_state()[0] for each in backends} == {b"1"}


def test_host_by_order_needs_the_port(opened: list[Any], port: int) -> None:
    opened_tcp(opened, f"127.0.0.1:{port}", is_host="true")
    with pytest.raises(RendezvousSettingsError, match=f"port {port}.*is_host=false"):
        opened_tcp(opened, f"127.0.0.1:{port}", is_host="true")


def test_host_by_order_at_an_address_of_another_machine(opened: list[Any], port: int) -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=ELSEWHERE):
        opened_tcp(opened, f"{ELSEWHERE}:{port}", is_host="true", read_timeout=str(READ_SECONDS))
    assert time.monotonic() - started < DEADLINE_SECONDS


@pytest.mark.parametrize("backend", ["tcpstore", "filestore"])
def test_a_wrong_endpoint_is_told_without_its_secrets(backend: str) -> None:
    with pytest.raises(RendezvousSettingsError, match=r"user:\*\*\*@host") as caught:
        registry.open_backend(parameters(backend, "redis://user:hunter22@host:6379/0"))
    assert "hunter22" not in str(caught.value)


def test_nobody_hosts(opened: list[Any], port: int) -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=str(port)):
        opened_tcp(opened, f"127.0.0.1:{port}", is_host="false", read_timeout=str(READ_SECONDS))
    assert READ_SECONDS / 2 < time.monotonic() - started < DEADLINE_SECONDS


def test_host_without_an_address(opened: list[Any]) -> None:
    with pytest.raises(RendezvousConnectionError, match="no address"):
        opened_tcp(opened, "nowhere.invalid:1", read_timeout=str(READ_SECONDS))


def test_another_agent_of_the_machine_takes_over(opened: list[Any], port: int) -> None:
    first, second, third = (opened_tcp(opened, f"127.0.0.1:{port}") for _ in range(3))
    _, old, _ = first.set_state(b"1")
    first._place.close()

    def is_taken_over() -> bool:
        try:
            return second.get_state() is None and third.get_state() is None
        except RendezvousConnectionError:
            return False

    until(is_taken_over)
    assert second._place.hosts != third._place.hosts
    assert third.set_state(b"late", old) is None
    _, new, _ = third.set_state(b"1")
    assert second.get_state() == (b"1", new)


# Who leaves last


def test_host_stays_until_the_others_have_left(opened: list[Any], port: int) -> None:
    host, other = (
        opened_tcp(opened, f"127.0.0.1:{port}", close_timeout=str(LONG_SECONDS)) for _ in range(2)
    )
    leaving = threading.Thread(target=host.close)
    leaving.start()
    leaving.join(0.5)
    assert leaving.is_alive()
    assert other.get_state() is None
    other.close()
    leaving.join(DEADLINE_SECONDS)
    assert not leaving.is_alive()


def test_host_does_not_wait_for_ever(opened: list[Any], port: int) -> None:
    host, _ = (opened_tcp(opened, f"127.0.0.1:{port}") for _ in range(2))
    started = time.monotonic()
    host.close()
    assert LINGER_SECONDS <= time.monotonic() - started < DEADLINE_SECONDS


def test_host_does_not_wait_for_the_dead(opened: list[Any], port: int) -> None:
    host, other = (
        opened_tcp(opened, f"127.0.0.1:{port}", close_timeout=str(LONG_SECONDS)) for _ in range(2)
    )
    announced(host, "host")
    announced(other, "other", TTL_SECONDS)
    started = time.monotonic()
    host.close()
    assert time.monotonic() - started < DEADLINE_SECONDS


def test_one_that_took_over_stays_until_the_others_have_left(opened: list[Any], port: int) -> None:
    first, *others = (
        opened_tcp(opened, f"127.0.0.1:{port}", close_timeout=str(LONG_SECONDS)) for _ in range(3)
    )
    first._place.close()

    def is_taken_over() -> bool:
        try:
            return all(each.get_state() is None for each in others)
        except RendezvousConnectionError:
            return False

    until(is_taken_over)
    host, other = sorted(others, key=lambda each: not each._place.hosts)
    leaving = threading.Thread(target=host.close)
    leaving.start()
    leaving.join(0.5)
    assert leaving.is_alive()
    other.close()
    leaving.join(DEADLINE_SECONDS)
    assert not leaving.is_alive()


# What happens once


class Interrupted:
    """A store in which, while it is asked what a key holds, something else happens: the first
    thing at the first time, and so on."""

    def __init__(self, store: Any, *meanwhile: Callable[[], object]) -> None:
        self.store = store
        self._meanwhile = list(meanwhile)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        value: bytes = self.store.compare_set(key, expected, desired)
        if "/store/" in key and self._meanwhile:
            self._meanwhile.pop(0)()
        return value

    def has_extended_api(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def client_on(store: Any, opened: list[Any], place: Any) -> C10dClient:
    opened.append(C10dRendezvousBackend(lambda seconds: store, "job", pushes=False))
    return C10dClient(opened[-1], place, "job", ASK_SECONDS)


@pytest.mark.parametrize("action", ["add", "append"])
def test_a_write_that_was_given_up_before_it_began_is_done_once(
    opened: list[Any], tmp_path: Path, action: str
) -> None:
    """The store stalls while it is asked what there is, and goes on when the repeat is done."""
    going_on = threading.Event()
    store = Interrupted(dist.HashStore(), going_on.wait)
    client = client_on(store, opened, FilePlace(str(tmp_path / "store"), LONG_SECONDS))
    ours = C10dStore(client)
    opened.append(ours)
    before = set(threading.enumerate())
    if action == "add":
        assert ours.add("key", 1) == 1
    else:
        ours.append("key", "1")
    given_up = next(each for each in threading.enumerate() if each not in before)
    going_on.set()
    given_up.join(DEADLINE_SECONDS)
    assert not given_up.is_alive()
    assert ours.get("key") == b"1"


def test_an_append_undoes_nothing(opened: list[Any], tmp_path: Path) -> None:
    shared = dist.HashStore()
    place = FilePlace(str(tmp_path / "store"), LONG_SECONDS)
    other = client_on(shared, opened, place)
    store = Interrupted(
        shared,
        lambda: other.compare_set("key", b"", b"1", "operation"),
        lambda: other.compare_set("key", b"1", b"2", "operation"),
    )
    client_on(store, opened, place).append("key", b"b", "operation")
    assert other.get_many(["key"]) == [b"2b"]


# What it costs


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.asked: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        if name not in ("set_timeout", "has_extended_api"):
            self.asked[name] += 1
        return getattr(self.store, name)


def on(store: Any, opened: list[Any], *, pushes: bool = False) -> C10dRendezvousBackend:
    opened.append(C10dRendezvousBackend(lambda seconds: store, "job", pushes=pushes))
    backend: C10dRendezvousBackend = opened[-1]
    return backend


def test_a_token_is_small_whatever_the_document(opened: list[Any]) -> None:
    backend = on(dist.HashStore(), opened)
    _, token, _ = backend.set_state(b"x" * 1_000_000)
    assert len(str(token)) < 100


def test_the_date_of_an_own_write_does_not_depend_on_who_notes_it_first(opened: list[Any]) -> None:
    backend = on(dist.HashStore(), opened)
    announced(backend, "node")
    writing = backend._seen
    with pytest.MonkeyPatch.context() as patch:

        def seen(token: str | None, **options: Any) -> None:
            writing(token)  # as the listener does that has just begun
            writing(token, **options)

        patch.setattr(backend, "_seen", seen)
        backend.set_state(b"document")
    age = backend.beat("node", LONG_SECONDS, Question()).state_age_seconds
    assert age is not None


def test_a_beat_costs_the_same_whatever_the_number_of_nodes(opened: list[Any]) -> None:
    costs = []
    for nodes in (SMALL + KEEPERS + 1, 10 * SMALL):
        shared = dist.HashStore()
        store = Counting(shared)
        crowd = on(shared, opened)
        for number in range(nodes):
            announced(crowd, f"node{number}")
        keepers = [on(shared, opened) for _ in range(KEEPERS)]
        for number, keeper in enumerate(keepers):
            keeper.beat(f"node{number}", LONG_SECONDS, Question())
        mine = on(store, opened)
        mine.beat(f"node{KEEPERS}", LONG_SECONDS, Question())
        store.asked.clear()
        mine.beat(f"node{KEEPERS}", LONG_SECONDS, Question())
        costs.append(dict(store.asked))
    assert costs[0] == costs[1]
    assert sum(costs[0].values()) <= 3 + 2 * KEEPERS, costs


class Meanwhile:
    """A store that does something else just after an entry was counted."""

    def __init__(self, store: Any, *then: Callable[[], object]) -> None:
        self.store, self._then = store, list(then)

    def add(self, key: str, amount: int) -> int:
        total: int = self.store.add(key, amount)
        if key.endswith("/tally") and self._then:
            self._then.pop()()
        return total

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_of_those_who_arrive_at_once_one_is_the_first(opened: list[Any]) -> None:
    """The others would all wait for a first document that nobody writes."""
    shared, pulses = dist.HashStore(), []
    second = on(shared, opened)
    store = Meanwhile(shared, lambda: pulses.append(announced(second, "second")))
    pulses.append(announced(on(store, opened), "first"))
    assert [pulse.live for pulse in pulses] == [2, 1]
    assert pulses[0].revision != pulses[1].revision


# Who watches whom


def test_keepers_notice_a_loss_among_many(opened: list[Any]) -> None:
    store = dist.HashStore()
    crowd, keeper = on(store, opened), on(store, opened)
    names = [f"node{number}" for number in range(2 * SMALL)]
    for name in names:
        announced(crowd, name)
    announced(keeper, "keeper", TTL_SECONDS)
    announced(crowd, "lost", TTL_SECONDS)

    def live() -> int:
        count: int = keeper.beat("keeper", TTL_SECONDS, Question()).live
        return count

    assert live() == len(names) + 2
    until(lambda: live() == len(names) + 1)
    pulse = crowd.beat(names[0], LONG_SECONDS, Question("lost", "round"))
    assert (pulse.live, pulse.peer_live) == (len(names) + 1, False)
    assert pulse.confirmed == len(names) + 1


def test_lost_keepers_are_replaced(opened: list[Any]) -> None:
    store = dist.HashStore()
    crowd, mine = on(store, opened), on(store, opened)
    for number in range(2 * SMALL):
        announced(crowd, f"node{number}")
    for number in range(KEEPERS):
        keeper = on(store, opened)
        announced(keeper, f"keeper{number}", TTL_SECONDS)
        keeper.beat(f"keeper{number}", TTL_SECONDS, Question())
    announced(mine, "mine", TTL_SECONDS)

    def live() -> int:
        count: int = mine.beat("mine", TTL_SECONDS, Question()).live
        return count

    assert live() == 2 * SMALL + KEEPERS + 1
    until(lambda: live() == 2 * SMALL + 1)


def test_a_wrong_count_is_put_right(opened: list[Any]) -> None:
    store = dist.HashStore()
    backend = on(store, opened)
    announced(backend, "node")
    store.add(f"rdzv/{digest('job')}/tally", -1 + REVISION)

    def live() -> int:
        count: int = backend.beat("node", LONG_SECONDS, Question()).live
        return count

    assert live() == 0
    until(lambda: live() == 1, HEAL_SECONDS + DEADLINE_SECONDS)


# Other stores


@pytest.mark.parametrize("pushes", [True, False])
def test_our_own_stores_serve_as_well(opened: list[Any], pushes: bool) -> None:
    client = MemoryClient()
    backends = []
    for _ in range(2):
        opened.append(MemoryStore(client))
        backends.append(on(opened[-1], opened, pushes=pushes))
    first, second = backends
    _, old, _ = first.set_state(b"1")
    _, new, _ = second.set_state(b"2", old)
    assert first.wait_for_change(old, LONG_SECONDS) == (b"2", new)
    announced(first, "node")
    assert [row.entry.node_id for row in second.entries()] == ["node"]


@pytest.mark.parametrize("after", ["close", "failure"])
def test_a_connection_ends_with_its_link(opened: list[Any], after: str) -> None:
    made: list[weakref.ref[Any]] = []

    def connect(seconds: float) -> Any:
        store = dist.PrefixStore("p", shared)
        made.append(weakref.ref(store))
        return store

    def broken(store: Any) -> None:
        raise RuntimeError("broken")

    shared = dist.HashStore()
    backend = C10dRendezvousBackend(connect, "job", pushes=False)
    opened.append(backend)
    announced(backend, "node")
    link = backend._links._link
    assert link is not None
    gc.disable()
    try:
        if after == "close":
            backend.close()
        else:
            with pytest.raises(RendezvousConnectionError, match="broken"):
                backend.ask_store(broken, DEADLINE_SECONDS)
        until(lambda: not link.alive)
        assert made[0]() is None
    finally:
        gc.enable()


class Breaking:
    """A store whose connection breaks at the first call of this method for a key of the bell."""

    def __init__(self, store: Any, method: str) -> None:
        self.store = store
        self._breaks_at = [method]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(key: Any, *values: Any) -> Any:
            if name in self._breaks_at and "/bell" in key:
                self._breaks_at.remove(name)
                raise dist.DistNetworkError("broken")
            return method(key, *values)

        return call if name in self._breaks_at else method


@pytest.mark.parametrize("method", ["set", "compare_set"])
def test_one_that_dies_while_it_rings_makes_nobody_deaf(opened: list[Any], method: str) -> None:
    client = MemoryClient()
    opened += [MemoryStore(client) for _ in range(3)]
    stores: list[Any] = [Breaking(opened[0], method), *opened[1:]]
    dying, other, listening = (on(store, opened, pushes=True) for store in stores)
    announced(listening, "listening")
    until(lambda: listening._listener is not None and listening._listener.listening)
    _, token, _ = dying.set_state(b"1")
    assert stores[0]._breaks_at == []
    _, token, _ = other.set_state(b"2", token)
    until(lambda: token in listening._dates)


def test_a_forked_child_leaves_nothing(opened: list[Any]) -> None:
    store = MemoryStore(MemoryClient())
    opened.append(store)
    announced(on(store, opened, pushes=True), "node")
    before = len(c10d._listening)
    child = os.fork()
    if child == 0:
        os._exit(len(c10d._listening))
    assert (before > 0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) == (True, 0)
