"""The cases of :mod:`rdzv.conformance.store_cases` in which somebody waits, and the queues'."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest
import torch.distributed as dist

from rdzv.conformance.store_kit import (
    INT_MAX_MS,
    LONG,
    SHORT,
    Background,
    Connect,
    in_threads,
    store_book,
    times_out,
)
from rdzv.torch_store import QueueEmptyError

ZERO = timedelta(0)
NEGATIVE = timedelta(seconds=-1)


case = store_book("waits")
multi = store_book("waits", "multi")
queues = store_book("queues", "queues")


@case
def get_of_a_missing_key_times_out(connect: Connect) -> None:
    store = connect()
    store.set_timeout(SHORT)
    with times_out():
        store.get("missing")


@multi
def multi_get_with_a_missing_key_times_out(connect: Connect) -> None:
    store = connect()
    store.set("a", "1")
    store.set_timeout(SHORT)
    with times_out():
        store.multi_get(["a", "missing"])


@case
def wait_for_a_missing_key_times_out(connect: Connect) -> None:
    store = connect()
    store.set("a", "1")
    store.set_timeout(SHORT)
    with times_out():
        store.wait(["a", "missing"])


@case
def wait_obeys_its_own_timeout(connect: Connect) -> None:
    store = connect()
    store.set_timeout(LONG)
    with times_out():
        store.wait(["missing"], SHORT)
    assert store.timeout == LONG


@case
def a_timeout_names_what_is_missing(connect: Connect) -> None:
    store = connect()
    store.set_timeout(timedelta(milliseconds=1))
    calls: list[Callable[[], object]] = [
        lambda: store.get("missing"),
        lambda: store.wait(["missing"]),
        lambda: store.multi_get(["missing"]),
    ]
    for call in calls:
        with pytest.raises(dist.DistStoreError, match="missing"):
            call()


@case
def wait_returns_for_what_is_there(connect: Connect) -> None:
    store = connect()
    store.set_timeout(SHORT)
    store.set("a", "1")
    store.wait(["a"])
    store.wait(["a", "a"])
    store.wait([])
    store.wait(["a"], LONG)


def _released_by(connect: Connect, write: Callable[[Any], object]) -> None:
    stores, peer = [connect(), connect(), connect()], connect()
    for store in stores:
        store.set_timeout(LONG)
    getting = Background(lambda: stores[0].get("k"))
    waiting = Background(lambda: stores[1].wait(["k"], LONG))
    several = Background(lambda: stores[2].multi_get(["k", "k"]))
    for blocked in (getting, waiting, several):
        blocked.still_blocked()
    start = time.monotonic()
    write(peer)
    assert getting.result() == b"1"
    waiting.result()
    assert several.result() == [b"1", b"1"]
    assert time.monotonic() - start < 5


@case
def set_releases_the_waiting(connect: Connect) -> None:
    _released_by(connect, lambda peer: peer.set("k", "1"))


@case
def add_releases_the_waiting(connect: Connect) -> None:
    _released_by(connect, lambda peer: peer.add("k", 1))


@case
def compare_set_releases_the_waiting(connect: Connect) -> None:
    _released_by(connect, lambda peer: peer.compare_set("k", "", "1"))


@case
def append_releases_the_waiting(connect: Connect) -> None:
    _released_by(connect, lambda peer: peer.append("k", "1"))


@case
def multi_set_releases_the_waiting(connect: Connect) -> None:
    _released_by(connect, lambda peer: peer.multi_set(["j", "k"], ["0", "1"]))


@case
def wait_needs_all_keys(connect: Connect) -> None:
    store, peer = connect(), connect()
    waiting = Background(lambda: store.wait(["a", "b"], LONG))
    waiting.still_blocked()
    peer.set("b", "1")
    waiting.still_blocked()
    peer.set("a", "1")
    waiting.result()


@case
def a_deleted_key_is_waited_for_again(connect: Connect) -> None:
    store = connect()
    store.set("k", "1")
    store.delete_key("k")
    store.set_timeout(SHORT)
    with times_out():
        store.get("k")


@case
def all_who_wait_are_released(connect: Connect) -> None:
    waiters, peer = [connect() for _ in range(8)], connect()
    waiting = [
        Background(lambda store=store: store.wait(["k"], LONG))  # type: ignore[misc]
        for store in waiters
    ]
    waiting[-1].still_blocked()
    peer.set("k", "1")
    for each in waiting:
        each.result()


@case
def a_timeout_of_zero_or_less_raises_at_once(connect: Connect) -> None:
    store = connect()
    for timeout in (ZERO, NEGATIVE):
        with times_out(at_least=ZERO):
            store.wait(["missing"], timeout)
        store.set_timeout(timeout)
        with times_out(at_least=ZERO):
            store.wait(["missing"])
        with times_out(at_least=ZERO):
            store.get("missing")


@case
def a_timeout_of_zero_or_less_finds_what_is_there(connect: Connect) -> None:
    store = connect()
    store.set("k", "1")
    for timeout in (ZERO, NEGATIVE):
        store.wait(["k"], timeout)
        store.set_timeout(timeout)
        store.wait(["k"])
        assert store.get("k") == b"1"
        assert store.add("counter", 1) > 0


@case
def a_timeout_of_int_max_milliseconds_works(connect: Connect) -> None:
    store, other, peer = connect(), connect(), connect()
    other.set_timeout(INT_MAX_MS)
    waiting = Background(lambda: store.wait(["k"], INT_MAX_MS))
    getting = Background(lambda: other.get("k"))
    waiting.still_blocked()
    getting.still_blocked()
    peer.set("k", "1")
    waiting.result()
    assert getting.result() == b"1"


# barrier


@case
def a_barrier_opens_for_the_last(connect: Connect) -> None:
    first, second = connect(), connect()
    waiting = Background(lambda: first.barrier("b", 2, LONG))
    waiting.still_blocked()
    second.barrier("b", 2, LONG)
    waiting.result()
    second.barrier("b", 2, LONG)  # it stays open: a barrier serves once


@case
def a_barrier_times_out_and_has_counted(connect: Connect) -> None:
    store = connect()
    with times_out():
        store.barrier("b", 2, SHORT)
    store.barrier("b", 2, SHORT)


# Queues


@queues
def queues_keep_the_order(connect: Connect) -> None:
    store = connect()
    assert store.queue_len("q") == 0
    for value in ("1", b"\x00", ""):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3
    assert [store.queue_pop("q") for _ in range(3)] == [b"1", b"\x00", b""]
    assert store.queue_len("q") == 0


@queues
def an_empty_queue_raises_or_times_out(connect: Connect) -> None:
    store = connect()
    store.set_timeout(SHORT)
    with pytest.raises(QueueEmptyError):
        store.queue_pop("q", False)
    with times_out():
        store.queue_pop("q")


@queues
def a_push_releases_one_who_pops(connect: Connect) -> None:
    store, peer = connect(), connect()
    store.set_timeout(INT_MAX_MS)
    popping = Background(lambda: store.queue_pop("q"))
    popping.still_blocked()
    peer.queue_push("q", "1")
    assert popping.result() == b"1"


@queues
def every_value_is_popped_once(connect: Connect) -> None:
    stores, peer = [connect() for _ in range(4)], connect()
    for number in range(20):
        peer.queue_push("q", str(number))
    popped = in_threads(4, lambda index: [stores[index].queue_pop("q") for _ in range(5)])
    assert sorted(int(value) for value in chain.from_iterable(popped)) == list(range(20))
    assert peer.queue_len("q") == 0


@queues
def check_and_wait_see_queues_and_keys_do_not(connect: Connect) -> None:
    store = connect()
    keys = store.num_keys()
    store.queue_push("q", "1")
    assert store.check(["q"])
    store.wait(["q"], SHORT)
    assert store.num_keys() == keys
    assert "q" not in store.list_keys()
    assert store.delete_key("q") is False
    assert store.queue_pop("q") == b"1"
    assert not store.check(["q"])
    with pytest.raises(dist.DistStoreError):
        store.wait(["q"], SHORT)
