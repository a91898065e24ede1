"""The document and its tokens under faults.

Where two objects are used, one goes through the proxy and the other, connected before, does not:
what that one sees is what has happened.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from rdzv.conformance.clauses import book
from rdzv.conformance.fault_kit import (
    BACKEND_ERRORS,
    FAULTS,
    Call,
    Calls,
    Tally,
    all_fail_in_time,
    by_then,
    down,
    each_answer_lost,
    no_connection_is_left,
    nothing_answers,
    paused,
    reach,
    server_is_away,
    settle,
    through_proxy,
    tried,
    until,
)
from rdzv.conformance.store_kit import in_threads
from rdzv.conformance.target import Target

WRITERS, WRITES = 4, 6

faulty_network = book("backend", "faults", controls=("network",))
paused_server = book("backend", "faults", controls=("pause",))
crash = book("backend", "faults", needs=("durable",), controls=("restart",))
empty_restart = book("backend", "faults", controls=("empty_restart",))


def _writes(backend: Any, text: bytes) -> Calls:
    return {
        "get_state": backend.get_state,
        "set_state": partial(backend.set_state, text, "1:no-token-of-ours"),
        "create": partial(backend.set_state, text),
    }


# --------------------------------------------------------------------------------- the document


@faulty_network
def a_slow_network_changes_no_answer(target: Target) -> None:
    with through_proxy(target) as proxy:
        backend = target.connect()
        proxy.delay(min(0.03, target.call_seconds_max / 100))
        assert backend.get_state() is None
        _, token, success = backend.set_state(b"1")
        assert success
        assert backend.set_state(b"2") == (b"1", token, False)
        assert backend.get_state() == (b"1", token)


@faulty_network
def calls_in_a_black_hole_fail_in_time(target: Target) -> None:
    nothing_answers(target, "black hole", lambda backend: _writes(backend, b"x"))


@faulty_network
def calls_over_a_cut_network_fail_in_time(target: Target) -> None:
    nothing_answers(target, "cut", lambda backend: _writes(backend, b"x"))


@faulty_network
def calls_whose_answers_are_all_lost_fail_in_time(target: Target) -> None:
    nothing_answers(target, "lost answers", lambda backend: _writes(backend, b"x"))


@paused_server
def calls_to_a_paused_server_fail_in_time(target: Target) -> None:
    server_is_away(target, paused(target), lambda backend: _writes(backend, b"x"))


@crash
def calls_to_a_killed_server_fail_in_time(target: Target) -> None:
    away = down(target, keep_data=True)
    server_is_away(target, away, lambda backend: _writes(backend, b"x"))


@faulty_network
def a_connection_cut_while_idle_is_replaced(target: Target) -> None:
    with through_proxy(target) as proxy:
        backend = target.connect()
        _, token, _ = backend.set_state(b"1")
        for _ in range(3):
            proxy.cut()
            proxy.heal()
            assert reach(target, backend.get_state) == (b"1", token)


@faulty_network
def a_write_whose_answer_is_lost_happens_once_or_not_at_all(target: Target) -> None:
    """Whoever tries it again blindly loses against itself."""
    observer = target.connect()
    old, token, _ = observer.set_state(b"before")
    with through_proxy(target) as proxy:
        backend = target.connect()
        for step in each_answer_lost(target, proxy, backend.get_state, BACKEND_ERRORS):
            new = b"after step %d" % step
            outcome = tried(target, partial(backend.set_state, new, token), BACKEND_ERRORS)
            found = observer.get_state()
            if outcome.acknowledged:
                assert outcome.value == (new, found[1], True)
            assert found[0] in (old, new)
            assert (found[1] == token) == (found[0] == old)
            old, token = found


@faulty_network
def a_creation_whose_answer_is_lost_happens_once_or_not_at_all(target: Target) -> None:
    with through_proxy(target) as proxy:
        for step in each_answer_lost(target, proxy, target.connect().get_state, BACKEND_ERRORS):
            run_id = f"job{step}"
            opened = tried(target, partial(target.connect, run_id), BACKEND_ERRORS)
            if not opened.acknowledged:
                # It asks the server when it is made: nothing has been written.
                proxy.heal()
                continue
            backend = opened.value
            outcome = tried(target, partial(backend.set_state, b"made"), BACKEND_ERRORS)
            proxy.heal()
            found = reach(target, backend.get_state)
            if outcome.acknowledged:
                assert outcome.value == (b"made", found[1], True)
            assert found is None or found[0] == b"made"


@faulty_network
def a_write_that_arrives_late_undoes_nothing(target: Target) -> None:
    observer = target.connect()
    _, token, _ = observer.set_state(b"before")
    with through_proxy(target) as proxy:
        backend = target.connect()
        backend.get_state()
        proxy.black_hole()
        writing = Call(partial(backend.set_state, b"late", token), "set_state").still_blocked()
        newer = observer.set_state(b"newer", token)
        assert newer[2]
        outcome = writing.outcome(BACKEND_ERRORS, by_then(target))
        assert not outcome.acknowledged, f"nobody can have answered: {outcome.value}"
        proxy.heal()
        settle(proxy)
        assert observer.get_state() == newer[:2]


@faulty_network
def writes_count_once_while_answers_are_lost(target: Target) -> None:
    """Each writer adds one to the number in the document."""
    tally = Tally()
    observer = target.connect()
    observer.set_state(b"0")
    with through_proxy(target) as proxy:
        backends = [target.connect() for _ in range(WRITERS)]
        for backend in backends:
            backend.get_state()
        proxy.drop_answers(3 * WRITERS, every=3)

        def write(index: int) -> None:
            backend = backends[index]
            for _ in range(WRITES):
                success = False
                while not success:
                    state, token = reach(target, backend.get_state)
                    wanted = str(int(state) + 1).encode()
                    outcome = tried(
                        target, partial(backend.set_state, wanted, token), BACKEND_ERRORS
                    )
                    success = not outcome.acknowledged or outcome.value[2]
                tally.note(outcome, True)

        in_threads(WRITERS, write)
        assert proxy.answers_dropped
    tally.fits_count(int(observer.get_state()[0]))


@crash
def a_document_outlives_a_crash(target: Target) -> None:
    """It keeps its token, and every write that was acknowledged while the server was killed."""
    backend, other = target.connect(), target.connect()
    other.set_state(b"0")
    enough, stop = threading.Event(), threading.Event()
    acknowledged = [other.get_state()]

    def write() -> object:
        for number in range(1, 1_000_000):
            if stop.is_set():
                break
            wanted = str(number).encode()
            state, token, success = backend.set_state(wanted, acknowledged[-1][1])
            assert (state, success) == (wanted, True)
            acknowledged.append((state, token))
            if number == 20:
                enough.set()
        return None

    writing = Call(write, "set_state")
    until("20 writes", lambda: enough.is_set() or writing.has_ended)
    with down(target, keep_data=True):
        stop.set()
    writing.outcome(BACKEND_ERRORS, by_then(target))
    found = reach(target, backend.get_state)
    assert found is not None, "acknowledged and lost"
    state, token = found
    last_state, last_token = acknowledged[-1]
    assert int(state) - int(last_state) in (0, 1)
    assert int(state) > int(last_state) or token == last_token
    assert reach(target, other.get_state) == found
    assert backend.set_state(b"on", token)[2]


@empty_restart
def a_server_that_comes_back_empty_knows_no_token(target: Target) -> None:
    backend, idle = target.connect(), target.connect()
    _, old, _ = backend.set_state(b"same")
    assert idle.get_state() == (b"same", old)
    with down(target, keep_data=False):
        all_fail_in_time(target, {"get_state": backend.get_state}, BACKEND_ERRORS)
    assert reach(target, backend.get_state) is None
    assert backend.set_state(b"same", old) is None
    _, new, success = backend.set_state(b"same")
    assert success
    assert new != old
    assert reach(target, partial(idle.set_state, b"later", old)) == (b"same", new, False)


@faulty_network
def closing_after_faults_leaves_no_connection(target: Target) -> None:
    with through_proxy(target) as proxy:
        backends = [target.connect() for _ in range(3)]
        for fault in ("cut", "black hole", "lost answers"):
            for backend in backends:
                reach(target, backend.get_state)
            FAULTS[fault](proxy)
            all_fail_in_time(
                target,
                {f"{fault} {index}": each.get_state for index, each in enumerate(backends)},
                BACKEND_ERRORS,
            )
            proxy.heal()
        for backend in backends:
            reach(target, backend.get_state)
        target.close()
        no_connection_is_left(proxy)
