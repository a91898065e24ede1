"""Rosters and watches under faults.

Where two objects are used, one goes through the proxy and the other, connected before, does not:
what that one sees is what has happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rdzv.conformance.backend_kit import LONG_SECONDS, announced, live_ids, tombstones
from rdzv.conformance.clauses import book
from rdzv.conformance.fault_kit import (
    BACKEND_ERRORS,
    BLOCKED_SECONDS,
    BUSY_SECONDS,
    Call,
    Calls,
    by_then,
    down,
    each_answer_lost,
    found_in_the_end,
    nothing_answers,
    paused,
    reach,
    server_is_away,
    through_proxy,
    tried,
)
from rdzv.conformance.target import Target
from rdzv.ports import Entry, Question

# ----------------------------------------------------------------------------------- the roster

roster_network = book("roster", "faults", needs=("roster",), controls=("network",))
roster_paused = book("roster", "faults", needs=("roster",), controls=("pause",))
roster_crash = book("roster", "faults", needs=("roster", "durable"), controls=("restart",))
roster_empty = book("roster", "faults", needs=("roster",), controls=("empty_restart",))


def _roster(backend: Any) -> Calls:
    return {
        "announce": lambda: announced(backend, "a"),
        "beat": lambda: backend.beat("a", LONG_SECONDS, Question("b", "round")),
        "entries": backend.entries,
        "withdraw": lambda: backend.withdraw("a", LONG_SECONDS),
    }


@roster_network
def roster_calls_in_a_black_hole_fail_in_time(target: Target) -> None:
    nothing_answers(target, "black hole", _roster)


@roster_network
def roster_calls_over_a_cut_network_fail_in_time(target: Target) -> None:
    nothing_answers(target, "cut", _roster)


@roster_network
def roster_calls_whose_answers_are_all_lost_fail_in_time(target: Target) -> None:
    nothing_answers(target, "lost answers", _roster)


@roster_paused
def roster_calls_to_a_paused_server_fail_in_time(target: Target) -> None:
    server_is_away(target, paused(target), _roster)


@roster_crash
def roster_calls_to_a_killed_server_fail_in_time(target: Target) -> None:
    server_is_away(target, down(target, keep_data=True), _roster)


@roster_network
def an_announcement_whose_answer_is_lost_counts_once(target: Target) -> None:
    """And an announcement made again keeps the place of the first."""
    observer = target.connect()
    announced(observer, "first")
    with through_proxy(target) as proxy:
        backend = target.connect()
        there = ["first"]
        for step in each_answer_lost(target, proxy, backend.entries, BACKEND_ERRORS):
            node = f"node{step}"
            outcome = tried(target, lambda node=node: announced(backend, node), BACKEND_ERRORS)  # type: ignore[misc]
            found = live_ids(observer)
            assert found in ([*there, node], there)
            if outcome.acknowledged:
                assert found[-1] == node
                assert outcome.value.live == len(found)
            announced(observer, f"later{step}")
            proxy.heal()
            reach(target, lambda node=node: announced(backend, node))  # type: ignore[misc]
            expected = [*found, f"later{step}"]
            there = expected if node in expected else [*expected, node]
            assert live_ids(observer) == there


@roster_network
def a_withdrawal_whose_answer_is_lost_holds_or_has_not_happened(target: Target) -> None:
    observer = target.connect()
    with through_proxy(target) as proxy:
        backend = target.connect()
        for step in each_answer_lost(target, proxy, backend.entries, BACKEND_ERRORS):
            node = f"node{step}"
            announced(observer, node)
            outcome = tried(target, partial(backend.withdraw, node, LONG_SECONDS), BACKEND_ERRORS)
            gone = node in tombstones(observer)
            assert gone or not outcome.acknowledged
            assert gone != (node in live_ids(observer))


@roster_network
def a_beat_whose_answer_is_lost_changes_nothing(target: Target) -> None:
    observer = target.connect()
    revision = announced(observer, "a").revision
    with through_proxy(target) as proxy:
        backend = target.connect()
        for _ in each_answer_lost(target, proxy, backend.entries, BACKEND_ERRORS):
            outcome = tried(
                target, lambda: backend.beat("a", LONG_SECONDS, Question()), BACKEND_ERRORS
            )
            if outcome.acknowledged:
                assert (outcome.value.present, outcome.value.live) == (True, 1)
            assert observer.beat("a", LONG_SECONDS, Question()).revision == revision


@roster_crash
def a_roster_outlives_a_crash(target: Target) -> None:
    backend = target.connect()
    names = ["c", "a", "b"]
    for name in names:
        backend.announce(Entry(name, b"data of " + name.encode(), "r"), 600.0, Question())
    backend.withdraw("a", 600.0)
    before = list(backend.entries())
    with down(target, keep_data=True):
        pass
    assert list(reach(target, backend.entries)) == before
    pulse = backend.beat("c", 600.0, Question("b", "r"))
    assert (pulse.present, pulse.live, pulse.peer_live, pulse.confirmed) == (True, 2, True, 2)


@roster_empty
def a_roster_that_was_lost_takes_announcements_again(target: Target) -> None:
    backend = target.connect()
    announced(backend, "a")
    announced(backend, "b")
    with down(target, keep_data=False):
        pass
    pulse = reach(target, lambda: backend.beat("b", LONG_SECONDS, Question("a")))
    assert (pulse.present, pulse.live, pulse.peer_live) == (False, 0, False)
    assert announced(backend, "b").live == 1
    assert live_ids(target.connect()) == ["b"]


# ------------------------------------------------------------------------------------ the watch

watch_network = book("watch", "faults", needs=("watch",), controls=("network",))
watch_of_roster = book("watch", "faults", needs=("watch", "roster"), controls=("network",))
watch_paused = book("watch", "faults", needs=("watch",), controls=("pause",))
watch_crash = book("watch", "faults", needs=("watch", "durable"), controls=("restart",))
watch_empty = book("watch", "faults", needs=("watch",), controls=("empty_restart",))

WAIT_SECONDS = 0.3


def _ends_in_time(target: Target, backend: Any, token: Any) -> None:
    """A wait during a fault ends, in vain or with an error; the others must be waited for too."""
    waits = [
        Call(partial(backend.wait_for_change, token, WAIT_SECONDS), f"wait {index}")
        for index in range(3)
    ]
    by = by_then(target, WAIT_SECONDS)
    for wait in waits:
        assert wait.outcome(BACKEND_ERRORS, by).value is None


def _finds(target: Target, waiting: Call, again: Callable[[], object]) -> Any:
    """What the wait returns, or, if it ended with an error, the next one after it; by the time
    that a healed network allows."""
    by = by_then(target, target.recovery_seconds_max)
    return found_in_the_end(waiting, again, BACKEND_ERRORS, by)


@watch_network
def waits_in_a_black_hole_end_in_time(target: Target) -> None:
    with through_proxy(target) as proxy:
        backend = target.connect()
        _, token, _ = backend.set_state(b"1")
        assert backend.wait_for_change(token, 0.0) is None
        proxy.black_hole()
        _ends_in_time(target, backend, token)
        proxy.heal()
        found = reach(target, partial(backend.wait_for_change, None, LONG_SECONDS))
        assert found == (b"1", token)


@watch_network
def waits_over_a_cut_network_end_in_time(target: Target) -> None:
    with through_proxy(target) as proxy:
        backend = target.connect()
        _, token, _ = backend.set_state(b"1")
        proxy.cut()
        _ends_in_time(target, backend, token)
        proxy.heal()
        found = reach(target, partial(backend.wait_for_change, None, LONG_SECONDS))
        assert found == (b"1", token)


@watch_paused
def waits_on_a_paused_server_end_in_time(target: Target) -> None:
    backend = target.connect()
    _, token, _ = backend.set_state(b"1")
    with paused(target):
        _ends_in_time(target, backend, token)
    found = reach(target, partial(backend.wait_for_change, None, LONG_SECONDS))
    assert found == (b"1", token)


@watch_network
def a_wait_that_was_cut_misses_nothing(target: Target) -> None:
    """Neither what was written before it was, of which it has not heard, nor what comes after."""
    observer = target.connect()
    _, token, _ = observer.set_state(b"1")
    with through_proxy(target) as proxy:
        backend = target.connect()
        wait = partial(backend.wait_for_change, token, BLOCKED_SECONDS)
        waiting = Call(wait, "the wait").still_blocked()
        proxy.black_hole()
        found = observer.set_state(b"2", token)[:2]
        proxy.cut()
        proxy.heal()
        assert _finds(target, waiting, wait) == found
        wait = partial(backend.wait_for_change, found[1], BLOCKED_SECONDS)
        waiting = Call(wait, "the wait").still_blocked()
        proxy.cut()
        found = observer.set_state(b"3", found[1])[:2]
        proxy.heal()
        assert _finds(target, waiting, wait) == found


@watch_network
def a_wait_through_a_black_hole_misses_nothing(target: Target) -> None:
    observer = target.connect()
    _, token, _ = observer.set_state(b"1")
    with through_proxy(target) as proxy:
        backend = target.connect()
        wait = partial(backend.wait_for_change, token, BLOCKED_SECONDS)
        waiting = Call(wait, "the wait").still_blocked()
        proxy.black_hole()
        found = observer.set_state(b"2", token)[:2]
        proxy.heal()
        assert _finds(target, waiting, wait) == found


@watch_network
def a_wait_whose_answer_is_lost_misses_nothing(target: Target) -> None:
    observer = target.connect()
    _, token, _ = observer.set_state(b"1")
    with through_proxy(target) as proxy:
        backend = target.connect()
        wait = partial(backend.wait_for_change, token, BLOCKED_SECONDS)
        waiting = Call(wait, "the wait").still_blocked()
        proxy.drop_answers(1)
        found = observer.set_state(b"2", token)[:2]
        assert _finds(target, waiting, wait) == found


@watch_of_roster
def a_wait_for_the_roster_that_was_cut_misses_nothing(target: Target) -> None:
    observer = target.connect()
    _, token, _ = observer.set_state(b"1")
    revision = announced(observer, "a").revision
    with through_proxy(target) as proxy:
        backend = target.connect()
        wait = partial(backend.wait_for_change, token, BLOCKED_SECONDS, revision)
        started = time.monotonic()
        waiting = Call(wait, "the wait").still_blocked()
        proxy.cut()
        announced(observer, "b")
        proxy.heal()
        assert _finds(target, waiting, wait) is None
        assert time.monotonic() - started < BLOCKED_SECONDS - BUSY_SECONDS


@watch_paused
def a_wait_on_a_paused_server_misses_nothing(target: Target) -> None:
    backend, observer = target.connect(), target.connect()
    _, token, _ = observer.set_state(b"1")
    wait = partial(backend.wait_for_change, token, BLOCKED_SECONDS)
    waiting = Call(wait, "the wait").still_blocked()
    with paused(target):
        waiting.still_blocked()
    found = reach(target, partial(observer.set_state, b"2", token))
    assert _finds(target, waiting, wait) == found[:2]


@watch_crash
def a_wait_during_a_crash_misses_nothing(target: Target) -> None:
    backend, observer = target.connect(), target.connect()
    _, token, _ = observer.set_state(b"1")
    wait = partial(backend.wait_for_change, token, BLOCKED_SECONDS)
    waiting = Call(wait, "the wait").still_blocked()
    with down(target, keep_data=True):
        pass
    reach(target, observer.get_state)
    found = observer.set_state(b"2", token)[:2]
    assert _finds(target, waiting, wait) == found


@watch_empty
def a_wait_hears_that_a_server_came_back_empty(target: Target) -> None:
    backend, observer = target.connect(), target.connect()
    _, token, _ = observer.set_state(b"1")
    wait = partial(backend.wait_for_change, token, BLOCKED_SECONDS)
    started = time.monotonic()
    waiting = Call(wait, "the wait").still_blocked()
    with down(target, keep_data=False):
        pass
    found = _finds(target, waiting, wait)
    assert found is None or found[1] != token
    assert time.monotonic() - started < BLOCKED_SECONDS - BUSY_SECONDS
    assert reach(target, observer.get_state) is None
    made = observer.set_state(b"1")[:2]
    assert reach(target, partial(backend.wait_for_change, token, BLOCKED_SECONDS)) == made
