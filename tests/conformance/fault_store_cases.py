"""Stores under faults: calls end in time, and happen once or not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rdzv.conformance.clauses import Function, book
from rdzv.conformance.fault_kit import (
    ANSWERS_OF_A_CALL_MAX,
    BLOCKED_SECONDS,
    FAULTS,
    NO_ANSWER,
    STORE_ERRORS,
    STORE_TIMEOUT_SECONDS,
    Call,
    Calls,
    Tally,
    all_fail_in_time,
    all_recover,
    by_then,
    down,
    each_answer_lost,
    paused,
    reach_store,
    recovered,
    settle,
    store_of,
    through_proxy,
    tried,
    try_store,
    until,
)
from rdzv.conformance.store_kit import in_threads
from rdzv.conformance.target import Target

THREADS, CALLS = 4, 6


def _on(*controls: str, needs: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    return book("store", "faults", needs=("store", *needs), controls=controls)


faulty_network = _on("network")
multi_network = _on("network", needs=("multi",))
queue_network = _on("network", needs=("queues",))
paused_server = _on("pause")
killed_server = _on("restart")


def _value(target: Target, store: Any, key: str) -> Any:
    """What is there, or None. It must be possible to ask."""
    return reach_store(target, lambda: store.get(key) if store.check([key]) else None)


def _lose_each_answer(
    target: Target, call: Callable[[Any, int], Any], after: Callable[[Any, int, Any], None]
) -> Tally:
    """Make a call, again and again, and each time another of its answers is lost. ``after`` is
    given a store that does not go through the proxy, the number of the step and the outcome."""
    tally, observer = Tally(), target.store()
    with through_proxy(target) as proxy:
        store = store_of(target)
        ready = partial(store.check, ["nothing"])
        for step in each_answer_lost(target, proxy, ready, STORE_ERRORS):
            outcome = try_store(target, partial(call, store, step))
            tally.note(outcome, step)
            proxy.heal()
            after(observer, step, outcome)
    return tally


def _every_call(target: Target, store: Any, mark: str) -> Calls:
    """Calls of every method, on keys of their own but for ``there``."""
    calls = {
        "set": lambda: store.set(f"{mark}/set", "1"),
        "get": lambda: store.get("there"),
        "add": lambda: store.add(f"{mark}/add", 1),
        "compare_set": lambda: store.compare_set(f"{mark}/compare_set", "", "1"),
        "check": lambda: store.check(["there"]),
        "wait": lambda: store.wait(["there"]),
        "delete_key": lambda: store.delete_key(f"{mark}/deleted"),
        "num_keys": store.num_keys,
    }
    if "multi" not in target.without:
        calls["append"] = lambda: store.append(f"{mark}/append", "1")
        calls["multi_get"] = lambda: store.multi_get(["there"])
        calls["multi_set"] = lambda: store.multi_set([f"{mark}/multi_set"], ["1"])
    if "queues" not in target.without:
        calls["queue_push"] = lambda: store.queue_push(f"{mark}/queue", "1")
        calls["queue_pop"] = lambda: store.queue_pop(f"{mark}/queue")
        calls["queue_len"] = lambda: store.queue_len(f"{mark}/queue")
    if "list_keys" not in target.without:
        calls["list_keys"] = store.list_keys
    return calls


def _fail_in_time(target: Target, store: Any, mark: str) -> None:
    calls = _every_call(target, store, mark)
    all_fail_in_time(target, calls, STORE_ERRORS, STORE_TIMEOUT_SECONDS)


def _recover(target: Target, store: Any, mark: str) -> None:
    calls = _every_call(target, store, mark)
    all_recover(target, calls, STORE_ERRORS, STORE_TIMEOUT_SECONDS)
    assert store.get(f"{mark}/set") == b"1"


def _nothing_answers(target: Target, fault: str) -> None:
    with through_proxy(target) as proxy:
        store = store_of(target)
        store.set("there", "1")
        assert store.get("there") == b"1"
        FAULTS[fault](proxy)
        _fail_in_time(target, store, "during")
        proxy.heal()
        _recover(target, store, "after")


def _server_is_away(target: Target, away: AbstractContextManager[None]) -> None:
    store = store_of(target)
    store.set("there", "1")
    assert store.get("there") == b"1"
    with away:
        _fail_in_time(target, store, "during")
    if not reach_store(target, partial(store.check, ["there"])):
        store.set("there", "1")
    _recover(target, store, "after")


# -------------------------------------------------------------------------------- calls in time


@faulty_network
def a_slow_network_changes_nothing_in_a_store(target: Target) -> None:
    with through_proxy(target) as proxy:
        store = store_of(target, target.call_seconds_max)
        proxy.delay(min(0.03, target.call_seconds_max / 100))
        store.set("a", "1")
        assert store.add("a", 2) == 3
        assert store.get("a") == b"3"
        assert not store.check(["b"])


@faulty_network
def store_calls_in_a_black_hole_fail_in_time(target: Target) -> None:
    _nothing_answers(target, "black hole")


@faulty_network
def store_calls_over_a_cut_network_fail_in_time(target: Target) -> None:
    _nothing_answers(target, "cut")


@faulty_network
def store_calls_whose_answers_are_all_lost_fail_in_time(target: Target) -> None:
    _nothing_answers(target, "lost answers")


@paused_server
def store_calls_to_a_paused_server_fail_in_time(target: Target) -> None:
    _server_is_away(target, paused(target))


@killed_server
def store_calls_to_a_killed_server_fail_in_time(target: Target) -> None:
    _server_is_away(target, down(target, keep_data=True))


@faulty_network
def a_store_connection_cut_while_idle_is_replaced(target: Target) -> None:
    with through_proxy(target) as proxy:
        store = store_of(target)
        store.set("a", "1")
        for number in range(1, 4):
            assert store.get("a") == str(number).encode()
            proxy.cut()
            proxy.heal()
            reach_store(target, partial(store.check, ["a"]))
            assert store.add("a", 1) == number + 1


# ----------------------------------------------------------------------------- counted just once


@faulty_network
def an_add_whose_answer_is_lost_counts_once(target: Target) -> None:
    tally = Tally()

    def after(observer: Any, step: int, outcome: Any) -> None:
        # So that no answer can be right by being the last one again.
        observer.add("count", 1000)
        if outcome.acknowledged:
            assert outcome.value // 1000 == step
            tally.note(outcome)

    counted = _lose_each_answer(target, lambda store, step: store.add("count", 1), after)
    total = int(target.store().get("count"))
    counted.fits_count(total % 1000)
    assert total // 1000 == len(counted.acknowledged) + len(counted.unknown)
    assert len(set(tally.acknowledged)) == len(tally.acknowledged)


@multi_network
def an_append_whose_answer_is_lost_happens_once(target: Target) -> None:
    found: list[int] = []

    def after(observer: Any, step: int, outcome: Any) -> None:
        text = _value(target, observer, "text") or b""
        found[:] = [int(part) for part in text.split(b";") if part]

    _lose_each_answer(
        target, lambda store, step: store.append("text", f"{step};"), after
    ).fits_list(found)
    assert found == sorted(found)


@queue_network
def a_push_whose_answer_is_lost_happens_once(target: Target) -> None:
    tally = _lose_each_answer(
        target,
        lambda store, step: store.queue_push("queue", str(step)),
        lambda observer, step, outcome: None,
    )
    store = target.store()
    found = [int(store.queue_pop("queue")) for _ in range(store.queue_len("queue"))]
    tally.fits_list(found)
    assert found == sorted(found)


@queue_network
def a_pop_whose_answer_is_lost_takes_one_value(target: Target) -> None:
    """A value may be lost only with an error."""
    values = Tally()
    feeder = target.store()
    for number in range(100):
        feeder.queue_push("queue", str(number))

    def after(observer: Any, step: int, outcome: Any) -> None:
        values.note(outcome)

    calls = _lose_each_answer(target, lambda store, step: store.queue_pop("queue"), after)
    popped = [int(value) for value in values.acknowledged]
    left = [int(feeder.queue_pop("queue")) for _ in range(feeder.queue_len("queue"))]
    assert sorted({*popped, *left}) == sorted([*popped, *left]), "popped twice"
    assert popped == sorted(popped)
    assert left == list(range(100 - len(left), 100))
    calls.fits_count(100 - len(left))


@faulty_network
def a_compare_set_whose_answer_is_lost_tells_the_truth(target: Target) -> None:
    def call(store: Any, step: int) -> Any:
        return store.compare_set(f"key{step}", "", "mine")

    def after(observer: Any, step: int, outcome: Any) -> None:
        value = _value(target, observer, f"key{step}")
        assert value in (b"mine", None)
        if outcome.acknowledged:
            assert outcome.value == value == b"mine"

    _lose_each_answer(target, call, after)


@faulty_network
def a_deletion_whose_answer_is_lost_tells_the_truth(target: Target) -> None:
    def call(store: Any, step: int) -> Any:
        return store.delete_key(f"key{step}")

    def after(observer: Any, step: int, outcome: Any) -> None:
        gone = not observer.check([f"key{step}"])
        if outcome.acknowledged:
            assert (outcome.value, gone) == (True, True)

    feeder = target.store()
    for number in range(30):
        feeder.set(f"key{number}", "1")
    _lose_each_answer(target, call, after)


@faulty_network
def a_set_that_is_repeated_undoes_nothing(target: Target) -> None:
    """Nobody may see a value again that has been seen to be replaced."""
    observer = target.store()
    with through_proxy(target) as proxy:
        store = store_of(target, BLOCKED_SECONDS)
        for step in range(ANSWERS_OF_A_CALL_MAX):
            observer.set("a", "before")
            recovered(target, lambda: store.check(["a"]), STORE_ERRORS, BLOCKED_SECONDS)
            before = proxy.answers_dropped
            proxy.drop_answers(1, after=step, then_black_hole=True)
            setting = Call(partial(store.set, "a", "mine"), "set")
            until(
                "an answer to lose",
                lambda before=before, setting=setting: (  # type: ignore[misc]
                    proxy.answers_dropped > before or setting.has_ended
                ),
            )
            applied = observer.get("a") == b"mine"
            if applied:
                observer.set("a", "later")
            proxy.heal()
            setting.outcome(STORE_ERRORS, by_then(target, target.recovery_seconds_max))
            settle(proxy)
            assert not applied or observer.get("a") == b"later"
            if proxy.answers_dropped == before:
                break
        assert proxy.answers_dropped, NO_ANSWER


@faulty_network
def calls_that_were_given_up_count_once_at_most(target: Target) -> None:
    """What they sent arrives late, perhaps several times."""
    tally, observer = Tally(), target.store()
    observer.add("count", 0)
    with through_proxy(target) as proxy:
        stores = [store_of(target) for _ in range(THREADS)]
        for store in stores:
            tally.note(try_store(target, partial(store.add, "count", 1)))
        proxy.black_hole()
        running = [Call(partial(store.add, "count", 1), "add") for store in stores]
        by = by_then(target, STORE_TIMEOUT_SECONDS)
        for each in running:
            tally.note(each.outcome(STORE_ERRORS, by))
        proxy.heal()
        settle(proxy)
        for store in stores:
            tally.note(try_store(target, partial(store.add, "count", 1)))
    tally.fits_count(int(observer.get("count")))


@faulty_network
def adds_count_once_while_answers_are_lost(target: Target) -> None:
    tally, observer = Tally(), target.store()
    observer.add("count", 0)
    with through_proxy(target) as proxy:
        stores = [store_of(target, target.call_seconds_max) for _ in range(2)]
        for store in stores:
            store.check(["count"])
        proxy.drop_answers(3 * THREADS, every=3)

        def count(index: int) -> None:
            store = stores[index % len(stores)]
            for _ in range(CALLS):
                call = partial(store.add, "count", 1)
                tally.note(tried(target, call, STORE_ERRORS, target.call_seconds_max, "add"))

        in_threads(THREADS, count)
        assert proxy.answers_dropped
    tally.fits_count(int(observer.get("count")))
    assert len(set(tally.acknowledged)) == len(tally.acknowledged)
