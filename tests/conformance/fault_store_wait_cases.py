"""Stores under faults: who waits is released, and what is there outlives the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from rdzv.conformance.clauses import book
from rdzv.conformance.fault_kit import (
    BLOCKED_SECONDS,
    FAULTS,
    LONG_ENOUGH_TO_SEE_SECONDS,
    STORE_ERRORS,
    STORE_TIMEOUT_SECONDS,
    Call,
    Calls,
    Tally,
    all_fail_in_time,
    by_then,
    down,
    found_in_the_end,
    no_connection_is_left,
    paused,
    reach_store,
    store_of,
    through_proxy,
    try_store,
    until,
)
from rdzv.conformance.target import Target

faulty_network = book("store", "faults", needs=("store",), controls=("network",))
paused_server = book("store", "faults", needs=("store",), controls=("pause",))
killed_server = book("store", "faults", needs=("store",), controls=("restart",))
crash = book("store", "faults", needs=("store", "durable"), controls=("restart",))
empty_restart = book("store", "faults", needs=("store",), controls=("empty_restart",))


def _waits(target: Target, store: Any) -> Calls:
    waits = {"get": lambda: store.get("late"), "wait": lambda: store.wait(["late"])}
    if "multi" not in target.without:
        waits["multi_get"] = lambda: store.multi_get(["late"])
    if "queues" not in target.without:
        waits["queue_pop"] = lambda: store.queue_pop("late queue")
    return waits


def _release(target: Target, store: Any) -> None:
    reach_store(target, partial(store.set, "late", "1"), "set")
    if "queues" not in target.without:
        reach_store(target, partial(store.queue_push, "late queue", "1"), "queue_push")


def _are_released(target: Target, fault: Callable[[], object], releasing: Any) -> None:
    """Those who wait while the fault comes and goes are released by what is set after it; or they
    have been told, and then wait again with the same object."""
    waiter = store_of(target, BLOCKED_SECONDS)
    waits = _waits(target, waiter)
    running = {name: Call(function, name) for name, function in waits.items()}
    for call in running.values():
        call.still_blocked()
    fault()
    threading.Event().wait(LONG_ENOUGH_TO_SEE_SECONDS)
    early = [name for name, call in running.items() if call.has_returned]
    assert not early, f"returned before what they wait for was set: {early}"
    _release(target, releasing)
    by = by_then(target, target.recovery_seconds_max)
    released = {"get": b"1", "wait": None, "multi_get": [b"1"], "queue_pop": b"1"}
    for name, call in running.items():
        assert found_in_the_end(call, waits[name], STORE_ERRORS, by) == released[name], name


@faulty_network
def those_who_wait_over_a_cut_network_are_released(target: Target) -> None:
    releasing = store_of(target)
    with through_proxy(target) as proxy:

        def fault() -> None:
            proxy.cut()
            proxy.heal()

        _are_released(target, fault, releasing)


@faulty_network
def those_who_wait_through_a_black_hole_are_released(target: Target) -> None:
    releasing = store_of(target)
    with through_proxy(target) as proxy:

        def fault() -> None:
            proxy.black_hole()
            releasing.set("unrelated", "1")
            proxy.heal()

        _are_released(target, fault, releasing)


@faulty_network
def those_whose_release_is_lost_are_released_again(target: Target) -> None:
    releasing = store_of(target)
    with through_proxy(target) as proxy:
        _are_released(target, lambda: proxy.drop_answers(3), releasing)
        proxy.heal()


@paused_server
def those_who_wait_on_a_paused_server_are_released(target: Target) -> None:
    def fault() -> None:
        with paused(target):
            threading.Event().wait(STORE_TIMEOUT_SECONDS)

    _are_released(target, fault, store_of(target))


@killed_server
def those_who_wait_while_the_server_restarts_are_released(target: Target) -> None:
    def fault() -> None:
        with down(target, keep_data=True):
            pass

    _are_released(target, fault, store_of(target))


@empty_restart
def those_who_wait_while_the_server_loses_all_are_released(target: Target) -> None:
    def fault() -> None:
        with down(target, keep_data=False):
            pass

    _are_released(target, fault, store_of(target))


# ------------------------------------------------------------------------------------- restarts


@crash
def what_was_acknowledged_outlives_a_crash(target: Target) -> None:
    writer, reader = store_of(target), store_of(target)
    stop, adds, keys = threading.Event(), Tally(), Tally()

    def write() -> None:
        for number in range(1_000_000):
            if stop.is_set():
                return
            adds.note(try_store(target, partial(writer.add, "count", 1), "add"))
            keys.note(try_store(target, partial(writer.set, f"key{number}", "1"), "set"), number)
            # A stall before the crash is not what this is about.
            if len(keys.acknowledged) >= 20 and (adds.unknown or keys.unknown):
                return

    writing = Call(write, "writing")
    until("20 writes", lambda: len(keys.acknowledged) >= 20 or writing.has_ended)
    with down(target, keep_data=True):
        stop.set()
    writing.outcome(STORE_ERRORS, by_then(target, 2 * STORE_TIMEOUT_SECONDS))
    adds.fits_count(int(reach_store(target, partial(reader.get, "count"))))
    asked = len(keys.acknowledged) + len(keys.unknown)
    keys.fits_list([number for number in range(asked) if reader.check([f"key{number}"])])


@empty_restart
def a_server_that_comes_back_empty_serves_on(target: Target) -> None:
    store, idle = store_of(target), store_of(target)
    store.add("count", 5)
    assert idle.check(["count"])
    with down(target, keep_data=False):
        pass
    assert reach_store(target, partial(store.check, ["count"])) is False
    assert store.add("count", 1) == 1
    assert reach_store(target, partial(idle.get, "count")) == b"1"


@faulty_network
def closing_a_store_after_faults_leaves_no_connection(target: Target) -> None:
    with through_proxy(target) as proxy:
        stores = [store_of(target) for _ in range(3)]
        for fault in ("cut", "black hole", "lost answers"):
            for store in stores:
                reach_store(target, partial(store.check, ["a"]))
            FAULTS[fault](proxy)
            calls = {f"{fault} {index}": each.num_keys for index, each in enumerate(stores)}
            all_fail_in_time(target, calls, STORE_ERRORS, STORE_TIMEOUT_SECONDS)
            proxy.heal()
        for store in stores:
            reach_store(target, partial(store.check, ["a"]))
        target.close()
        no_connection_is_left(proxy)
