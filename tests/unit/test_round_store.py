"""The store of a round: the exit barrier, its own timeout, its lifetime, any base store."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.utils import store as store_util

from rdzv.conformance.store_kit import LONG, Background
from rdzv.round_store import EXIT_BARRIER_COUNTER, EXIT_BARRIER_END, RoundStore
from rdzv.round_store import ROUND_STORES_PINNED_MAX as PINNED_MAX
from rdzv.stores.memory import MemoryStore

EXIT_BARRIER = "torchelastic/agent/terminal_state"


class ThirdParty(dist.Store):
    """The least a Python store of somebody else's may have: no clone, no extended API."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


BASES: list[Callable[[], Any]] = [MemoryStore, dist.HashStore, ThirdParty]


@pytest.fixture(params=BASES, ids=lambda base: base.__name__)
def base(request: pytest.FixtureRequest) -> Any:
    return request.param()


def round_store(base: Any, prefix: str = "round/1", **options: Any) -> RoundStore:
    options.setdefault("on_exit_barrier", lambda: None)
    store = RoundStore(base, prefix, **options)
    store.pin()
    return store


# Any base


def test_it_holds_the_keys_below_its_prefix(base: Any) -> None:
    store = round_store(base)
    store.set("k", "1")
    assert base.get("round/1/k") == b"1"
    assert store.get("k") == b"1"
    assert store.check(["k"])
    assert not store.check(["k", "other"])
    assert store.add("counter", 2) == 2
    assert store.multi_get(["k", "counter"]) == [b"1", b"2"]
    assert store.peek(["counter", "k", "k"]) == [b"2", b"1", b"1"]
    assert None in store.peek(["k", "absent"])
    assert store.peek([]) == []


def test_it_waits_on_any_base(base: Any) -> None:
    store, peer = round_store(base), round_store(base)
    store.set_timeout(timedelta(milliseconds=20))
    for call in (lambda: store.get("k"), lambda: store.wait(["k"]), lambda: store.multi_get(["k"])):
        with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.02 s"):
            call()
    store.set_timeout(LONG)
    waiting = Background(lambda: store.get("k")).still_blocked()
    peer.set("k", "1")
    assert waiting.result() == b"1"


@pytest.mark.parametrize("make_base", [MemoryStore, dist.HashStore])
def test_a_round_is_not_mistaken_for_another(make_base: Callable[[], Any]) -> None:
    base = make_base()
    first, tenth = round_store(base, "round/1"), round_store(base, "round/10")
    first.set("a", "1")
    tenth.set("b", "1")
    tenth.set("c", "1")
    assert first.list_keys() == ["a"]
    assert first.num_keys() == 1
    assert sorted(tenth.list_keys()) == ["b", "c"]


@pytest.mark.parametrize("make_base", [MemoryStore, dist.HashStore])
def test_cpp_finds_all_of_it(make_base: Callable[[], Any]) -> None:
    store: Any = dist.PrefixStore("p", round_store(make_base()))
    store.set("k", "1")
    store.append("k", "2")
    store.multi_set(["a", "b"], ["3", "4"])
    assert store.multi_get(["k", "a", "b"]) == [b"12", b"3", b"4"]
    assert store.has_extended_api()
    assert store.num_keys() == 3
    assert store.delete_key("k")
    assert store.compare_set("a", "3", "5") == b"5"
    store.clone().wait(["a"], LONG)
    assert store.clone().get("a") == b"5"


# Its own timeout


@pytest.mark.parametrize("make_base", [MemoryStore, dist.HashStore, ThirdParty])
def test_its_timeout_is_its_own(make_base: Callable[[], Any]) -> None:
    base = make_base()
    base.set_timeout(LONG)
    store = round_store(base)
    assert store.timeout == LONG
    clone = store.clone()
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(dist.DistStoreError):
        store.get("missing")
    assert base.timeout == LONG
    assert clone.timeout == LONG


def test_torchs_barrier_leaves_the_base_stores_timeout_alone() -> None:
    base: Any = dist.HashStore()
    base.set_timeout(LONG)
    with pytest.raises(dist.DistStoreError):
        store_util.barrier(round_store(base), 2, EXIT_BARRIER, barrier_timeout=0.02)
    assert base.timeout == LONG


@pytest.mark.parametrize("make_base", [MemoryStore, dist.HashStore])
def test_a_signal_handler_that_raises_ends_a_wait(make_base: Callable[[], Any]) -> None:
    class Interrupted(Exception):
        pass

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    store = round_store(make_base())
    store.set_timeout(LONG)
    old = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(Interrupted):
            store.multi_get(["torchelastic/role_info/1"])
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, old)


# The exit barrier


def test_the_names_are_torchs() -> None:
    seen: list[str] = []

    class Spy(ThirdParty):
        def add(self, key: str, amount: int) -> int:
            seen.append(key)
            return super().add(key, amount)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            seen.extend(keys)

    store_util.barrier(Spy(), 2, EXIT_BARRIER)
    assert seen == [EXIT_BARRIER_COUNTER, EXIT_BARRIER_END]


def test_the_exit_barrier_is_noticed_before_the_node_is_counted(base: Any) -> None:
    counted: list[bool] = []
    store = round_store(
        base,
        on_exit_barrier=lambda: counted.append(base.check([f"round/1/{EXIT_BARRIER_COUNTER}"])),
    )
    store.add("other", 1)
    store.add(f"{EXIT_BARRIER_COUNTER}/TRACE", 1)
    assert counted == []
    store_util.barrier(store, 1, EXIT_BARRIER, barrier_timeout=30)
    assert counted == [False]


def test_an_error_of_the_notice_keeps_nobody_from_the_barrier(
    base: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the backend is away")

    store = round_store(base, on_exit_barrier=fail)
    store_util.barrier(store, 1, EXIT_BARRIER, barrier_timeout=30)
    assert "could not note that this node has finished" in caplog.text
    assert "the backend is away" in caplog.text


def test_the_exit_barrier_is_noticed_from_cpp() -> None:
    noticed: list[str] = []
    store = round_store(MemoryStore(), on_exit_barrier=lambda: noticed.append("yes"))
    dist.PrefixStore("torchelastic", store).add("num_members", 1)
    assert noticed == []
    dist.PrefixStore(EXIT_BARRIER, store).add("num_members", 1)
    assert noticed == ["yes"]


@pytest.mark.parametrize("clone", [False, True])
def test_release_ends_a_wait_in_the_exit_barrier_at_once(base: Any, clone: bool) -> None:
    store = round_store(base)
    waiter = store.clone() if clone else store
    waiting = Background(
        lambda: store_util.barrier(waiter, 2, EXIT_BARRIER, barrier_timeout=30)
    ).still_blocked()
    start = time.monotonic()
    store.release("round 2 has begun")
    with pytest.raises(dist.DistStoreError, match="round 2 has begun"):
        waiting.result()
    assert time.monotonic() - start < 1


def test_release_ends_later_waits_too(base: Any) -> None:
    store = round_store(base)
    store.release("round 2 has begun")
    for call in (
        lambda: store.wait([EXIT_BARRIER_END]),
        lambda: store.wait([EXIT_BARRIER_END], LONG),
        lambda: store.get(EXIT_BARRIER_END),
        lambda: store.multi_get([EXIT_BARRIER_END]),
    ):
        with pytest.raises(dist.DistStoreError, match="round 2 has begun"):
            call()


def test_release_does_not_undo_a_complete_barrier(base: Any) -> None:
    store = round_store(base)
    store.release("round 2 has begun")
    store.set(EXIT_BARRIER_END, "1")
    store.wait([EXIT_BARRIER_END])
    assert store.get(EXIT_BARRIER_END) == b"1"


def test_release_touches_no_other_wait(base: Any) -> None:
    store = round_store(base)
    store.set_timeout(LONG)
    waiting = Background(lambda: store.get("k")).still_blocked()
    store.release("round 2 has begun")
    waiting.still_blocked()
    store.set("k", "1")
    assert waiting.result() == b"1"


# Lifetime


class Kept:
    pass


@pytest.mark.parametrize("make_base", [MemoryStore, dist.HashStore, ThirdParty])
def test_the_newest_live_while_only_cpp_holds_them(make_base: Callable[[], Any]) -> None:
    base = make_base()
    held: list[Any] = [
        dist.PrefixStore("p", round_store(base, f"round/{n}")) for n in range(PINNED_MAX)
    ]
    gc.collect()
    for store in held:
        store.set("k", "1")
        assert store.get("k") == b"1"


def test_one_that_python_holds_lives_and_keeps(base: Any) -> None:
    kept = Kept()
    reference = weakref.ref(kept)
    store = round_store(base, keep=kept)
    del kept
    for number in range(2 * PINNED_MAX):
        round_store(base, f"later/{number}")
    gc.collect()
    assert reference() is not None
    store.set("k", "1")
    assert store.get("k") == b"1"


def test_old_rounds_leave_nothing_behind() -> None:
    base = MemoryStore()
    views: list[weakref.ref[dist.Store]] = []
    keeps: list[weakref.ref[Kept]] = []
    for number in range(3 * PINNED_MAX):
        kept = Kept()
        store = round_store(base, f"round/{number}", keep=kept)
        store.clone()
        views.append(weakref.ref(store._inner))
        keeps.append(weakref.ref(kept))
    del store, kept
    gc.collect()
    assert [bool(reference()) for reference in views] == [False] * 2 * PINNED_MAX + [
        True
    ] * PINNED_MAX
    assert sum(reference() is not None for reference in keeps) == PINNED_MAX


def test_one_that_was_never_pinned_is_gone_with_its_last_user() -> None:
    kept = Kept()
    reference = weakref.ref(kept)
    store = RoundStore(MemoryStore(), "round", on_exit_barrier=lambda: None, keep=kept)
    del store, kept
    gc.collect()
    assert reference() is None


def test_it_outlives_the_close_of_its_base() -> None:
    base = MemoryStore()
    store = round_store(base)
    store.set("k", "1")
    base.close()
    del base
    gc.collect()
    assert store.get("k") == b"1"


def test_a_base_that_cannot_be_cloned_for_want_of_a_server_says_so() -> None:
    class Unreachable(ThirdParty):
        def clone(self) -> dist.Store:
            raise dist.DistNetworkError("connection refused")

    with pytest.raises(dist.DistNetworkError, match="refused"):
        round_store(Unreachable())


def test_a_signal_that_comes_while_the_node_tells_that_it_has_finished_is_not_swallowed() -> None:
    def interrupted() -> None:
        raise SignalException("SIGTERM", signal.SIGTERM)

    store = RoundStore(MemoryStore(), "round", on_exit_barrier=interrupted)
    with pytest.raises(SignalException):
        store.add("torchelastic/agent/terminal_state/num_members", 1)
