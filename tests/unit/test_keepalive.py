"""The background thread: orders, beats, and what it survives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import pytest

import rdzv.keepalive
from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.driver import Driver, Stopped
from rdzv.effects import Effect, Pause, Session
from rdzv.errors import RendezvousConnectionError, RendezvousTimeoutError
from rdzv.keepalive import KeepAlive
from rdzv.machine import Rules
from rdzv.ports import Pulse, Question, Token
from rdzv.state import Node, RosterEntry

INTERVAL_SECONDS = 0.05
PATIENCE_SECONDS = 30.0


class WatchedBackend(MemoryBackend):
    """Counts the beats, and fails when told so."""

    def __init__(self) -> None:
        super().__init__(MemorySpace(), "job")
        self.beats = 0
        self.error: Exception | None = None

    def get_state(self) -> tuple[bytes, Token] | None:
        if self.error is not None:
            raise self.error
        return super().get_state()

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        self.beats += 1
        if self.error is not None:
            raise self.error
        return super().beat(node_id, ttl_seconds, question)


@dataclass
class Subject:
    backend: WatchedBackend
    session: Session
    keep_alive: KeepAlive
    overtaken: list[bool] = field(default_factory=list)

    def join(self) -> None:
        self.keep_alive.join_round(PATIENCE_SECONDS).result(PATIENCE_SECONDS)

    def await_beats(self, count: int) -> None:
        until = self.backend.beats + count
        wait_until(lambda: self.backend.beats >= until)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


@pytest.fixture
def subject() -> Iterator[Subject]:
    backend = WatchedBackend()
    rules = Rules(
        min_nodes=1,
        max_nodes=1,
        keep_alive_interval_seconds=INTERVAL_SECONDS,
        liveness_window_seconds=60.0,
    )
    session = Session(
        rules=rules,
        entry=RosterEntry(Node("a", "host-a")),
        unique="u",
        clock=time.monotonic,
        jitter=lambda most_seconds: most_seconds,
    )
    overtaken: list[bool] = []
    keep_alive = KeepAlive(
        Driver(backend, 60.0), session, "node a", on_overtaken=lambda: overtaken.append(True)
    )
    yield Subject(backend, session, keep_alive, overtaken)
    keep_alive.stop()
    assert keep_alive.wait(PATIENCE_SECONDS)


def nothing() -> Generator[Effect, Any, str]:
    yield Pause(0.0)
    return "done"


def test_it_beats_after_a_join_and_not_before(subject: Subject) -> None:
    assert subject.keep_alive.ask(nothing).result(PATIENCE_SECONDS) == "done"
    assert subject.backend.beats == 0
    subject.join()
    subject.await_beats(3)
    assert subject.keep_alive.ask(nothing).result(PATIENCE_SECONDS) == "done"
    subject.await_beats(3)


def test_it_does_not_beat_after_leaving(subject: Subject) -> None:
    subject.join()
    subject.await_beats(1)
    subject.keep_alive.leave().result(PATIENCE_SECONDS)
    beats = subject.backend.beats
    threading.Event().wait(3 * INTERVAL_SECONDS)
    assert subject.backend.beats == beats
    assert [row.withdrawn for row in subject.backend.entries()] == [True]


def test_what_the_steps_raise_is_the_callers(subject: Subject) -> None:
    def failing() -> Generator[Effect, Any, None]:
        yield Pause(0.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        subject.keep_alive.ask(failing).result(PATIENCE_SECONDS)
    subject.join()


def test_it_survives_whatever_a_beat_raises(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beats = []

    def failing(session: Session) -> Generator[Effect, Any, None]:
        beats.append(True)
        yield Pause(0.0)
        raise ZeroDivisionError("as the test wanted")

    subject.join()
    with monkeypatch.context() as patch:
        patch.setattr(rdzv.keepalive, "keep_alive", failing)
        wait_until(lambda: len(beats) >= 3)
    subject.await_beats(2)
    assert subject.keep_alive.fatal is None
    assert "as the test wanted" in caplog.text


def test_it_survives_a_backend_that_raises_anything(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rdzv")
    subject.join()
    caplog.clear()
    subject.backend.error = KeyError("as the test wanted")
    subject.await_beats(4)
    assert subject.keep_alive.fatal is None
    subject.backend.error = None
    wait_until(lambda: "answers again" in caplog.text)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert "as the test wanted" in caplog.text


def test_it_is_fatal_when_the_outage_budget_is_spent_and_heals(subject: Subject) -> None:
    subject.session.outage_timeout_seconds = 0.2
    subject.join()
    subject.backend.error = OSError("as the test wanted")
    wait_until(lambda: subject.keep_alive.fatal is not None)
    assert isinstance(subject.keep_alive.fatal, RendezvousConnectionError)
    subject.await_beats(2)
    subject.backend.error = None
    wait_until(lambda: subject.keep_alive.fatal is None)


def test_who_was_overtaken_is_told(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(session: Session) -> Generator[Effect, Any, None]:
        session.overtaken = True
        session.next_beat = float("inf")
        yield Pause(0.0)

    monkeypatch.setattr(rdzv.keepalive, "keep_alive", overtaken)
    subject.join()
    wait_until(lambda: subject.overtaken)
    assert subject.keep_alive.ask(nothing).result(PATIENCE_SECONDS) == "done", "it never sleeps on"


def test_a_failed_join_leaves_no_entry(subject: Subject) -> None:
    subject.session.rules = Rules(
        min_nodes=2, max_nodes=2, keep_alive_interval_seconds=INTERVAL_SECONDS
    )
    joining = subject.keep_alive.join_round(0.2)
    with pytest.raises(RendezvousTimeoutError):
        joining.result(PATIENCE_SECONDS)
    wait_until(lambda: [row.withdrawn for row in subject.backend.entries()] == [True])
    beats = subject.backend.beats
    threading.Event().wait(3 * INTERVAL_SECONDS)
    assert subject.backend.beats == beats


def test_an_abandoned_join_ends_and_the_next_one_does_not(subject: Subject) -> None:
    rules = subject.session.rules
    subject.session.rules = Rules(
        min_nodes=2, max_nodes=2, keep_alive_interval_seconds=INTERVAL_SECONDS
    )
    joining = subject.keep_alive.join_round(PATIENCE_SECONDS)
    wait_until(lambda: subject.session.announced)
    subject.keep_alive.abandon(joining)
    never_begun = subject.keep_alive.join_round(PATIENCE_SECONDS)
    subject.keep_alive.abandon(never_begun)
    with pytest.raises(RendezvousTimeoutError, match="Nobody waits"):
        joining.result(PATIENCE_SECONDS)
    with pytest.raises((CancelledError, RendezvousTimeoutError)):
        never_begun.result(PATIENCE_SECONDS)
    subject.session.rules = rules
    subject.join()


def test_after_a_stop_orders_are_refused(subject: Subject) -> None:
    subject.join()
    subject.keep_alive.stop()
    assert subject.keep_alive.wait(PATIENCE_SECONDS)
    with pytest.raises(Stopped):
        subject.keep_alive.ask(nothing).result(PATIENCE_SECONDS)
    beats = subject.backend.beats
    threading.Event().wait(3 * INTERVAL_SECONDS)
    assert subject.backend.beats == beats


def test_a_stop_cancels_what_is_waiting_its_turn(subject: Subject) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Generator[Effect, Any, None]:
        begun.set()
        go_on.wait(PATIENCE_SECONDS)
        yield Pause(0.0)

    current = subject.keep_alive.ask(slow)
    assert begun.wait(PATIENCE_SECONDS)
    waiting = subject.keep_alive.ask(nothing)
    subject.keep_alive.stop()
    go_on.set()
    with pytest.raises(Stopped):
        current.result(PATIENCE_SECONDS)
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_SECONDS)
