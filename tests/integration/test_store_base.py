"""What our stores promise beyond torch's contract: limits, namespaces, outages, lifetime."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from rdzv.conformance.store_kit import LONG, Background
from rdzv.ports import Closable, Namespaced, Peekable
from rdzv.stores.base import Store, StoreClient, Unanswered, counter_after
from rdzv.stores.memory import MemoryClient, MemoryStore


@pytest.fixture
def client() -> MemoryClient:
    return MemoryClient()


@pytest.fixture
def store(client: MemoryClient) -> Iterator[MemoryStore]:
    store = MemoryStore(client)
    yield store
    store.close()


class Polling(MemoryClient):
    """Waits as a technology does that cannot push."""

    wait_for_keys = StoreClient.wait_for_keys
    wait_for_queue = StoreClient.wait_for_queue


class Down(MemoryClient):
    """Does not answer while it is down; remembers the operation ids that it was asked with."""

    endpoint = "sql://user:hunter2@db/jobs"

    def __init__(self) -> None:
        super().__init__()
        self.down = threading.Event()
        self.operations: list[str] = []
        self.asked = threading.Semaphore(0)

    def _answer(self) -> None:
        self.asked.release()
        if self.down.is_set():
            raise Unanswered("no route to sql://user:hunter2@db")

    def add(self, key: str, amount: int, operation: str) -> int:
        self.operations.append(operation)
        self._answer()
        return super().add(key, amount, operation)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self._answer()
        return super().get_many(keys)

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        self._answer()
        return super().wait_for_keys(keys, min(timeout_seconds, 0.01))


# Types and spellings


def test_the_ports_are_recognised(store: MemoryStore) -> None:
    assert isinstance(store, dist.Store)
    assert isinstance(store, Namespaced)
    assert isinstance(store, Peekable)
    assert isinstance(store, Closable)


def test_both_spellings_are_there(store: Any) -> None:
    store.set("k", "1")
    assert store.getNumKeys() == store.num_keys() == 1
    assert store.deleteKey("k") is True
    assert store.deleteKey("k") is False


def test_the_timeout_is_torchs_unless_given() -> None:
    assert MemoryStore().timeout == timedelta(seconds=300)
    assert MemoryStore(timeout=LONG).timeout == LONG


def test_a_timeout_set_by_cpp_is_obeyed(store: MemoryStore) -> None:
    prefixed = dist.PrefixStore("p", store)
    prefixed.set_timeout(timedelta(milliseconds=20))
    assert store.timeout == timedelta(milliseconds=20)
    with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.02 s"):
        store.get("missing")


# Limits


@pytest.mark.parametrize(
    "write",
    [
        lambda store, value: store.set("k", value),
        lambda store, value: store.multi_set(["j", "k"], ["", value]),
        lambda store, value: store.append("k", value),
        lambda store, value: store.compare_set("k", "", value),
        lambda store, value: store.queue_push("k", value),
    ],
)
def test_a_value_beyond_the_limit_is_refused(
    write: Callable[[Any, bytes], None], client: MemoryClient, store: MemoryStore
) -> None:
    client.value_bytes_max = 8
    with pytest.raises(ValueError, match="has 9 bytes: on memory value_bytes_max is 8"):
        write(store, b"123456789")
    assert not store.check(["k"])
    assert store.num_keys() == 0
    write(store, b"12345678")
    assert store.check(["k"])


def test_an_append_beyond_the_limit_is_refused(client: MemoryClient, store: MemoryStore) -> None:
    client.value_bytes_max = 8
    store.append("k", "12345")
    with pytest.raises(ValueError, match="value_bytes_max"):
        store.append("k", "6789")
    assert store.get("k") == b"12345"


def test_a_key_beyond_the_limit_is_refused(client: MemoryClient, store: MemoryStore) -> None:
    client.key_bytes_max = 8
    store.set("é234567", "1")
    for key in ("é2345678", "123456789"):
        with pytest.raises(ValueError, match="has 9 bytes: on memory key_bytes_max is 8"):
            store.set(key, "1")
    with pytest.raises(ValueError, match="has 9 bytes"):
        store.namespace("name").check(["1234"])


def test_a_message_shows_few_and_short_keys(store: MemoryStore) -> None:
    keys = ["k" * 500 + str(number) for number in range(1000)]
    with pytest.raises(dist.DistStoreError, match="and 992 more") as caught:
        store.wait(keys, timedelta(0))
    assert len(str(caught.value)) < 1200


def test_bytes_that_are_no_text_are_no_key(store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="utf-8"):
        store.set(b"\xff", "1")


@pytest.mark.parametrize("value", [b"", b"-", b"abc", b"1.5", b"12abc", b" 7 ", b"\xd9\xa1"])
def test_what_is_no_number_is_not_counted(value: bytes) -> None:
    with pytest.raises(ValueError, match="no decimal number"):
        counter_after("k", value, 1)


# Namespaces


def test_a_namespace_is_what_lies_below_its_prefix(store: Any) -> None:
    for key in ("a", "ab/x", "a/", "a/x", "a/b/y", "b/a/x"):
        store.set(key, key)
    namespace = store.namespace("a")
    assert namespace.list_keys() == ["", "b/y", "x"]
    assert namespace.num_keys() == 3
    assert namespace.get("x") == b"a/x"
    assert not namespace.check(["ab/x"])
    assert namespace.namespace("b").list_keys() == ["y"]
    namespace.delete_key("x")
    assert not store.check(["a/x"])
    assert store.num_keys() == 5


def test_a_namespace_is_where_torchs_prefix_store_looks(store: Any) -> None:
    store.namespace("in").namespace("out").set("k", "1")
    assert dist.PrefixStore("out", dist.PrefixStore("in", store)).get("k") == b"1"


def test_a_namespace_has_a_timeout_of_its_own(store: Any) -> None:
    store.set_timeout(LONG)
    namespace = store.namespace("a")
    assert namespace.timeout == LONG
    namespace.set_timeout(timedelta(seconds=1))
    assert store.timeout == LONG


def test_a_namespace_has_queues_of_its_own(store: Any) -> None:
    store.namespace("a").queue_push("q", "1")
    assert store.namespace("b").queue_len("q") == 0
    assert store.queue_pop("a/q", False) == b"1"


# Outages


def test_a_request_is_repeated_with_its_operation_id() -> None:
    client = Down()
    store = Store(client, timeout=LONG)
    client.down.set()
    adding = Background(lambda: store.add("k", 1))
    for _ in range(3):
        assert client.asked.acquire(timeout=30)
    client.down.clear()
    assert adding.result() == 1
    assert store.add("k", 1) == 2
    assert len(client.operations) >= 5
    assert len(set(client.operations)) == 2
    store.close()


def test_an_outage_longer_than_the_timeout_is_a_network_error() -> None:
    client = Down()
    store = Store(client, timeout=timedelta(milliseconds=50))
    client.down.set()
    for call in (lambda: store.add("k", 1), lambda: store.get("k"), lambda: store.wait(["k"])):
        with pytest.raises(dist.DistNetworkError, match=r"timeout of 0\.05 s") as caught:
            call()
        assert "sql://user:***@db" in str(caught.value)
        assert "hunter2" not in str(caught.value)
    client.down.clear()
    assert store.add("k", 1) == 1
    store.close()


def test_a_wait_outlives_an_outage() -> None:
    client = Down()
    store, peer = Store(client, timeout=LONG), Store(client)
    waiting = Background(lambda: store.get("k")).still_blocked()
    client.down.set()
    client.asked = threading.Semaphore(0)
    assert client.asked.acquire(timeout=30)
    peer.set("k", "1")
    waiting.still_blocked()
    client.down.clear()
    assert waiting.result() == b"1"
    store.close()
    peer.close()


def test_other_errors_of_a_client_are_passed_on(
    client: MemoryClient, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> int:
        raise dist.DistNetworkError("an answer was lost for good")

    monkeypatch.setattr(client, "add", fail)
    with pytest.raises(dist.DistNetworkError, match="for good"):
        store.add("k", 1)


def test_a_queue_is_no_value_to_get(store: Any) -> None:
    store.queue_push("q", "1")
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.get("q")


# Signals


class Interrupted(Exception):
    pass


@contextmanager
def interrupted_soon() -> Iterator[None]:
    """A signal whose handler raises comes while the block waits."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    old = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    start = time.monotonic()
    timer.start()
    try:
        with pytest.raises(Interrupted):
            yield
        assert time.monotonic() - start < 10
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, old)


@pytest.mark.parametrize("make_client", [MemoryClient, Polling, Down])
def test_a_signal_handler_that_raises_ends_a_wait(make_client: Callable[[], StoreClient]) -> None:
    made: Any = make_client()
    store = Store(made, timeout=LONG)
    if isinstance(made, Down):
        made.down.set()
    prefixed: Any = dist.PrefixStore("a", dist.PrefixStore("b", store))
    with interrupted_soon():
        store.get("k")
    with interrupted_soon():
        prefixed.wait(["k"], LONG)
    store.close()


def test_a_signal_handler_that_raises_ends_a_pop(store: MemoryStore) -> None:
    with interrupted_soon():
        store.queue_pop("q")
    store.queue_push("q", "1")
    assert store.queue_pop("q") == b"1"


# Lifetime


def test_a_store_lives_while_only_cpp_holds_it() -> None:
    def build() -> Any:
        return dist.PrefixStore("outer", dist.PrefixStore("inner", MemoryStore()))

    prefixed = build()
    clone = prefixed.clone()
    gc.collect()
    prefixed.set("k", "1")
    assert clone.get("k") == b"1"
    clone.append("k", "2")
    assert prefixed.multi_get(["k"]) == [b"12"]
    assert prefixed.delete_key("k")
    prefixed.underlying_store.underlying_store.close()


def test_close_ends_the_pin_of_a_store_and_of_what_was_made_from_it() -> None:
    root = MemoryStore()
    made = [root.clone(), root.namespace("a"), root.namespace("a").namespace("b")]
    made.append(made[0].clone())
    references = [weakref.ref(store) for store in (root, *made)]
    root.close()
    made[1].set("k", "1")
    assert root.get("a/k") == b"1", "what Python refers to works on"
    del root, made
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


def test_close_of_a_namespace_ends_its_own_pin_only() -> None:
    root = MemoryStore()
    kept, dropped = root.namespace("a"), root.namespace("a")
    references = weakref.ref(kept), weakref.ref(dropped), weakref.ref(root)
    dropped.close()
    del kept, dropped
    gc.collect()
    assert references[0]() is not None
    assert references[1]() is None
    root.close()
    del root
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_close_of_the_first_store_alone_closes_the_client(
    client: MemoryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(client, "close", lambda: closed.append("closed"))
    root = MemoryStore(client)
    root.clone().close()
    root.namespace("a").close()
    assert closed == []
    root.close()
    assert closed == ["closed"]
