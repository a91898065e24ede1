"""The driver: effects performed, exceptions mapped, nothing after a stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

import rdzv.driver
from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.codec import encode_entry, encode_state
from rdzv.driver import ANNOUNCING_WAIT_SECONDS, TOMBSTONE_WINDOWS, Driver, Stopped
from rdzv.effects import (
    Announce,
    Beat,
    Effect,
    Found,
    ListRoster,
    Pause,
    Prepare,
    Read,
    Swap,
    Wait,
    Withdraw,
)
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rdzv.ports import Entry, FirstLook, Located, Pulse, Question, Token
from rdzv.state import Node, RosterEntry, State

WINDOW_SECONDS = 4.0
NOBODY = Question()
STATE = State(incarnation="i")
ENTRY = RosterEntry(Node("a", "host-a"))


def entry_of(entry: RosterEntry) -> Entry:
    return Entry(entry.node.id, encode_entry(entry))


class RaisingBackend(MemoryBackend, Located):
    """Raises what it is told from every call."""

    endpoint = "host:1"
    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__(MemorySpace(), "job")

    def route(self) -> tuple[str, int] | None:
        return None

    def get_state(self) -> tuple[bytes, Token] | None:
        if self.error is not None:
            raise self.error
        return super().get_state()


class BareBackend(RendezvousBackend):
    """What torch asks for, and None for a write that lost."""

    def __init__(self) -> None:
        self.inner = MemoryBackend(MemorySpace(), "job")

    @property
    def name(self) -> str:
        return "bare"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self.inner.get_state()

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        answer = self.inner.set_state(state, token)
        return answer if answer is not None and answer[2] else None


@pytest.fixture(params=[MemoryBackend, BareBackend])
def driver(request: pytest.FixtureRequest) -> Driver:
    if request.param is BareBackend:
        return Driver(BareBackend(), WINDOW_SECONDS)
    return Driver(MemoryBackend(MemorySpace(), "job"), WINDOW_SECONDS)


def test_effects_are_answered_as_described(driver: Driver) -> None:
    def steps() -> Generator[Effect, Any, str]:
        assert (yield Read()) == Found(None, None)
        made = yield Swap(STATE, None)
        assert made.swapped
        assert made.state == STATE
        assert (yield Read()) == Found(STATE, made.token)
        lost = yield Swap(State(incarnation="j"), None)
        assert lost == Found(STATE, made.token, swapped=False)
        pulse = yield Announce(entry_of(ENTRY), NOBODY)
        assert isinstance(pulse, Pulse)
        assert (pulse.present, pulse.live, pulse.token) == (True, 1, made.token)
        assert (yield Beat("a", NOBODY)).present
        present, withdrawn = yield ListRoster()
        assert [seen.entry for seen in present] == [ENTRY]
        assert withdrawn == frozenset()
        assert (yield Wait(made.token, None, 0.0, "")) is None
        assert (yield Wait(None, None, 0.0, "")) == Found(STATE, made.token)
        assert (yield Pause(0.0)) is None
        assert (yield Prepare(STATE)) == 0
        assert (yield Withdraw("a")) is None
        assert (yield ListRoster()) == ((), frozenset({"a"}))
        assert not (yield Beat("a", NOBODY)).present
        return "the end"

    assert driver.run(steps()) == "the end"


def test_who_reads_before_it_waits_is_answered_by_the_watch_where_that_can_do_it() -> None:
    class Looking(MemoryBackend, FirstLook):
        def look_and_watch(self) -> tuple[bytes, Any]:
            return encode_state(STATE), "looked"

    driver = Driver(Looking(MemorySpace(), "job"), WINDOW_SECONDS)
    assert driver.perform(Read()) == Found(None, None)
    assert driver.perform(Read(watches=True)) == Found(STATE, "looked")


def test_what_to_prepare_is_told() -> None:
    told: list[State] = []

    def prepare(state: State) -> int:
        told.append(state)
        return 4711

    assert Driver(BareBackend(), WINDOW_SECONDS, prepare).perform(Prepare(STATE)) == 4711
    assert told == [STATE]


def test_abilities_are_looked_for_once() -> None:
    assert Driver(MemoryBackend(MemorySpace(), "job"), WINDOW_SECONDS).has_roster
    assert not Driver(BareBackend(), WINDOW_SECONDS).has_roster
    assert Driver(RaisingBackend(), WINDOW_SECONDS).endpoint == "host:1"


def test_an_unknown_effect_is_refused(driver: Driver) -> None:
    with pytest.raises(RendezvousConnectionError, match="unknown effect"):
        driver.perform("a text")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        OSError("broken pipe"),
        ZeroDivisionError(),
        TimeoutError("slow"),
        RendezvousTimeoutError("of the backend's own"),
        RendezvousClosedError(),
    ],
)
def test_what_no_contract_names_is_a_lost_connection(error: Exception) -> None:
    backend = RaisingBackend()
    backend.error = error
    with pytest.raises(RendezvousConnectionError) as caught:
        Driver(backend, WINDOW_SECONDS).perform(Read())
    assert caught.value.__cause__ is error
    assert "host:1" in str(caught.value)
    assert f"{type(error).__name__}: {error}" in str(caught.value)


@pytest.mark.parametrize("error", [RendezvousConnectionError("x"), RendezvousStateError("x")])
def test_what_the_contract_names_passes(error: Exception) -> None:
    backend = RaisingBackend()
    backend.error = error
    with pytest.raises(type(error)) as caught:
        Driver(backend, WINDOW_SECONDS).perform(Read())
    assert caught.value is error


def test_secrets_of_a_drivers_message_are_masked() -> None:
    backend = RaisingBackend()
    backend.error = OSError("cannot reach redis://user:hunter22@host")
    with pytest.raises(RendezvousConnectionError) as caught:
        Driver(backend, WINDOW_SECONDS).perform(Read())
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError("x"), RendezvousStateError("x")])
def test_an_error_is_thrown_into_the_steps_which_may_go_on(error: Exception) -> None:
    backend = RaisingBackend()

    def steps() -> Generator[Effect, Any, str]:
        backend.error = error
        try:
            yield Read()
        except (RendezvousConnectionError, RendezvousStateError):
            backend.error = None
        return "went on" if (yield Read()) == Found(None, None) else ""

    assert Driver(backend, WINDOW_SECONDS).run(steps()) == "went on"


def test_an_error_that_the_steps_do_not_catch_ends_them() -> None:
    backend = RaisingBackend()
    backend.error = OSError("x")

    def steps() -> Generator[Effect, Any, None]:
        yield Read()

    with pytest.raises(RendezvousConnectionError):
        Driver(backend, WINDOW_SECONDS).run(steps())


@pytest.mark.parametrize("document", [b"garbage", encode_state(STATE)[:-1]])
def test_what_is_no_document_is_a_state_error(document: bytes) -> None:
    backend = MemoryBackend(MemorySpace(), "job")
    backend.set_state(document, None)
    with pytest.raises(RendezvousStateError):
        Driver(backend, WINDOW_SECONDS).perform(Read())


def test_a_damaged_entry_is_a_state_error() -> None:
    backend = MemoryBackend(MemorySpace(), "job")
    backend.announce(Entry("a", b"garbage"), WINDOW_SECONDS, NOBODY)
    with pytest.raises(RendezvousStateError):
        Driver(backend, WINDOW_SECONDS).perform(ListRoster())


def test_after_a_stop_nothing_is_performed(driver: Driver) -> None:
    closed = []

    def steps() -> Generator[Effect, Any, None]:
        try:
            yield Pause(0.0)
            driver.stop()
            yield Swap(STATE, None)
        finally:
            closed.append(True)

    with pytest.raises(Stopped):
        driver.run(steps())
    assert closed
    assert driver.perform(Read()) == Found(None, None)


def test_a_stop_ends_a_pause(driver: Driver) -> None:
    def steps() -> Generator[Effect, Any, None]:
        yield Pause(3600.0)
        yield Read()

    stopper = threading.Timer(0.05, driver.stop)
    stopper.start()
    with pytest.raises(Stopped):
        driver.run(steps())
    stopper.join()


def test_a_withdrawal_is_done_even_after_a_stop(driver: Driver) -> None:
    driver.perform(Announce(entry_of(ENTRY), NOBODY))
    driver.stop()
    driver.withdraw("a")
    assert driver.perform(ListRoster()) == ((), frozenset({"a"}))


def test_a_tombstone_outlives_the_window() -> None:
    clock = [0.0]
    driver = Driver(MemoryBackend(MemorySpace(lambda: clock[0]), "job"), WINDOW_SECONDS)
    driver.withdraw("a")
    clock[0] += TOMBSTONE_WINDOWS * WINDOW_SECONDS - 0.1
    assert driver.perform(ListRoster()) == ((), frozenset({"a"}))


class SlowBackend(MemoryBackend):
    """Holds an announcement until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(MemorySpace(), "job")
        self.announcing = threading.Event()
        self.go_on = threading.Event()

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        self.announcing.set()
        self.go_on.wait(30.0)
        return super().announce(entry, ttl_seconds, question)


def test_an_announcement_under_way_does_not_undo_a_withdrawal() -> None:
    backend = SlowBackend()
    driver = Driver(backend, WINDOW_SECONDS)
    announcing = threading.Thread(target=driver.perform, args=(Announce(entry_of(ENTRY), NOBODY),))
    announcing.start()
    assert backend.announcing.wait(30.0)
    driver.stop()
    leaving = threading.Thread(target=driver.withdraw, args=("a",))
    leaving.start()
    backend.go_on.set()
    leaving.join(30.0)
    announcing.join(30.0)
    assert driver.perform(ListRoster()) == ((), frozenset({"a"}))
    with pytest.raises(Stopped):
        driver.perform(Announce(entry_of(ENTRY), NOBODY))


def test_an_announcement_that_hangs_does_not_hold_a_withdrawal() -> None:
    backend = SlowBackend()
    driver = Driver(backend, WINDOW_SECONDS)
    announcing = threading.Thread(target=driver.perform, args=(Announce(entry_of(ENTRY), NOBODY),))
    announcing.start()
    assert backend.announcing.wait(30.0)
    leaving = threading.Thread(target=driver.withdraw, args=("a",))
    leaving.start()
    leaving.join(ANNOUNCING_WAIT_SECONDS + 5.0)
    assert not leaving.is_alive()
    assert driver.perform(ListRoster()) == ((), frozenset({"a"}))
    backend.go_on.set()
    announcing.join(30.0)


def test_threads_that_read_one_document_at_once_decode_it_once() -> None:
    state = State("i", 1, "n", tuple(Node(f"node-{n}", f"host-{n}") for n in range(2000)))
    space = MemorySpace()
    MemoryBackend(space, "job").set_state(encode_state(state))
    gate = threading.Barrier(8)

    def read(_: int) -> Any:
        driver = Driver(MemoryBackend(space, "job"), WINDOW_SECONDS)
        gate.wait(30.0)
        return driver.perform(Read()).state

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read, range(8)))
    assert found[0] == state
    assert all(each is found[0] for each in found)


def test_a_child_that_was_forked_while_somebody_decoded_decodes_too(driver: Driver) -> None:
    driver.perform(Swap(STATE, None))
    with rdzv.driver._Decoding.lock:
        child = os.fork()
        if not child:
            signal.alarm(10)  # instead of hanging for ever
            os._exit(0 if driver.perform(Read()).state == STATE else 1)
    assert os.waitpid(child, 0)[1] == 0
