"""Saying goodbye: at exit, and on SIGTERM while it would end the process without a word."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import rdzv.departure
from rdzv.departure import Departure

PATIENCE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def default_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def counted() -> tuple[list[int], Callable[[], None]]:
    calls: list[int] = []
    return calls, lambda: calls.append(1)


def test_it_withdraws_once() -> None:
    calls, withdraw = counted()
    departure = Departure(withdraw)
    departure.now()
    departure.now()
    assert calls == [1]


def test_who_has_withdrawn_by_itself_owes_nothing() -> None:
    calls, withdraw = counted()
    departure = Departure(withdraw)
    departure.cancel()
    departure.now()
    assert calls == []


def test_it_never_raises() -> None:
    def withdraw() -> None:
        raise ZeroDivisionError

    Departure(withdraw).now()


def test_it_waits_no_longer_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdzv.departure, "WITHDRAW_TIMEOUT_SECONDS", 0.1)
    released = threading.Event()
    started = time.monotonic()

    def hangs() -> None:
        released.wait(PATIENCE_SECONDS)

    Departure(hangs).now()
    assert time.monotonic() - started < 0.1 + 2.0
    released.set()


def test_it_withdraws_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    calls, withdraw = counted()
    departure = Departure(withdraw)
    monkeypatch.setattr(threading.Thread, "start", start)
    departure.now()
    assert calls == [1]


def test_sigterm_is_put_back() -> None:
    departure = Departure(lambda: None)
    with departure.on_sigterm():
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(ZeroDivisionError), departure.on_sigterm():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_others_do_on_sigterm_is_left_alone() -> None:
    def handler(number: int, frame: object) -> None:
        pass

    departure = Departure(lambda: None)
    for other in (handler, signal.SIG_IGN):
        signal.signal(signal.SIGTERM, other)
        with departure.on_sigterm():
            assert signal.getsignal(signal.SIGTERM) is other
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with departure.on_sigterm():
        signal.signal(signal.SIGTERM, handler)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_thread_that_is_not_the_main_one_touches_no_signal() -> None:
    seen = []

    def inside() -> None:
        with Departure(lambda: None).on_sigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert seen == [signal.SIG_DFL]


# -------------------------------------------------------------------------- real ends of processes

PROLOGUE = """
import os, signal, sys, threading
from rdzv.departure import Departure
departure = Departure(lambda: print("withdrawn", flush=True))
"""


def run(program: str, send: signal.Signals | None = None) -> tuple[str, int]:
    """What the program prints after it has said "ready", if it is to be sent a signal then."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process:
        if send is not None:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(send)
        printed = process.stdout.read()
        return printed, process.wait(PATIENCE_SECONDS)


def test_sigterm_in_the_barrier_withdraws_and_ends_the_process() -> None:
    program = """
    with departure.on_sigterm():
        print("ready", flush=True)
        threading.Event().wait(30)
    """
    assert run(program, signal.SIGTERM) == ("withdrawn\n", -signal.SIGTERM)


def test_sigterm_after_the_barrier_means_what_it_did() -> None:
    program = """
    with departure.on_sigterm():
        pass
    print("ready", flush=True)
    threading.Event().wait(30)
    """
    assert run(program, signal.SIGTERM) == ("", -signal.SIGTERM)


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ZeroDivisionError", 1)]
)
def test_the_end_of_the_process_withdraws(end: str, code: int) -> None:
    program = f"other = Departure(lambda: print('other', flush=True))\n{end}"
    printed, returned = run(program)
    assert sorted(printed.split()) == ["other", "withdrawn"]
    assert returned == code


def test_the_end_of_a_process_that_was_shut_down_does_nothing() -> None:
    assert run("departure.cancel()") == ("", 0)


def test_the_end_of_a_forked_child_is_not_the_end_of_its_parent() -> None:
    program = """
    child = os.fork()
    if not child:
        sys.exit(0)
    os.waitpid(child, 0)
    print("the child has ended", flush=True)
    """
    assert run(program) == ("the child has ended\nwithdrawn\n", 0)


def test_a_withdrawal_that_hangs_does_not_hold_the_process() -> None:
    program = f"""
    import rdzv.departure
    rdzv.departure.WITHDRAW_TIMEOUT_SECONDS = 0.2
    stuck = Departure(lambda: threading.Event().wait({PATIENCE_SECONDS}))
    """
    started = time.monotonic()
    assert run(program) == ("withdrawn\n", 0)
    assert time.monotonic() - started < PATIENCE_SECONDS / 2
