"""Every clause about faults can fail: clients and servers with one mistake each, and who tells."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

# Importing the module fills the books.
from rdzv.conformance import fault_cases  # noqa: F401
from rdzv.conformance.clauses import BOOKS
from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.target import Server
from rdzv.errors import RendezvousConnectionError, RendezvousStateError
from rdzv.ports import Entry, Pulse, Question, Token
from rdzv.stores.base import Unanswered

from .network_targets import HttpTarget, NetworkTarget, http_server
from .remote_sqlite import RemoteBackend, RemoteTarget, remote_server

State = tuple[bytes, Token] | None

pytestmark = pytest.mark.full


class RepeatsBlindly(RemoteBackend):
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        written = bytes(16) + state
        try:
            found = self._ask("set_state", written, token)
        except RendezvousConnectionError:
            found = self._ask("set_state", written, token)
        return None if found is None else (found[0][16:], *found[1:])


class TakesSilenceForNothing(RemoteBackend):
    def get_state(self) -> State:
        with contextlib.suppress(RendezvousConnectionError):
            return super().get_state()
        return None


class AnswersFromMemory(RemoteBackend):
    last: State = None

    def get_state(self) -> State:
        with contextlib.suppress(RendezvousConnectionError):
            self.last = super().get_state()
        return self.last


class WaitsForEver(RemoteBackend):
    def _answer(self, request: Any, wait_seconds: float) -> Any:
        return super()._answer(request, 1e6)


class LetsOSErrorsOut(RemoteBackend):
    def _ask(self, method: str, *arguments: Any, wait_seconds: float = 0.0) -> Any:
        return self._answer((self._run_id, method, arguments), wait_seconds)


class CallsItCorrupt(RemoteBackend):
    def _ask(self, method: str, *arguments: Any, wait_seconds: float = 0.0) -> Any:
        try:
            return super()._ask(method, *arguments, wait_seconds=wait_seconds)
        except RendezvousConnectionError as error:
            raise RendezvousStateError("no state came") from error


class NeverConnectsAnew(RemoteBackend):
    broken = False

    def _answer(self, request: Any, wait_seconds: float) -> Any:
        if self.broken:
            raise OSError("the connection was lost")
        try:
            return super()._answer(request, wait_seconds)
        except OSError:
            self.broken = True
            raise


class LeavesConnectionsOpen(RemoteBackend):
    kept: list[socket.socket] = []  # noqa: RUF012

    def close(self) -> None:
        self.kept += self._idle


class AnnouncesTwice(RemoteBackend):
    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        try:
            return super().announce(entry, ttl_seconds, question)
        except RendezvousConnectionError:
            again = Entry(entry.node_id + "'", entry.data, entry.round_label)
            return super().announce(again, ttl_seconds, question)


class ForgetsToWithdraw(RemoteBackend):
    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        # The first answer that is lost is the one that counts: nobody asks again.
        with contextlib.suppress(RendezvousConnectionError):
            super().withdraw(node_id, ttl_seconds)


class AnnouncesToBeat(RemoteBackend):
    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        try:
            return super().beat(node_id, ttl_seconds, question)
        except RendezvousConnectionError:
            self.withdraw(node_id, ttl_seconds)
            return self.announce(Entry(node_id, b""), ttl_seconds, question)


class WaitsFromNowOn(RemoteBackend):
    """After an error it waits for what comes after what it reads then."""

    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: Any = None
    ) -> State:
        while True:
            try:
                return super().wait_for_change(token, timeout_seconds, revision)
            except RendezvousConnectionError:
                found = self.get_state()
                token = None if found is None else found[1]


class WaitsOnAndOn(RemoteBackend):
    """Nothing but a change ends its wait."""

    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()

    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: Any = None
    ) -> State:
        while not self.closed:
            with contextlib.suppress(RendezvousConnectionError):
                return super().wait_for_change(token, timeout_seconds, revision)
        return None


JOIN_SECONDS_MAX = 2.0
BACKENDS: list[tuple[type[RemoteBackend], str, str]] = [
    (RepeatsBlindly, "a_write_whose_answer_is_lost_happens_once_or_not_at_all", "False"),
    (RepeatsBlindly, "a_creation_whose_answer_is_lost_happens_once_or_not_at_all", "False"),
    (RepeatsBlindly, "writes_count_once_while_answers_are_lost", "counted"),
    (TakesSilenceForNothing, "calls_over_a_cut_network_fail_in_time", "nobody can have answered"),
    (TakesSilenceForNothing, "calls_to_a_killed_server_fail_in_time", "nobody can have answered"),
    (AnswersFromMemory, "calls_whose_answers_are_all_lost_fail_in_time", "nobody can have"),
    (WaitsForEver, "calls_in_a_black_hole_fail_in_time", "hangs"),
    (WaitsForEver, "calls_to_a_paused_server_fail_in_time", "hangs"),
    (WaitsForEver, "waits_in_a_black_hole_end_in_time", "hangs"),
    (LetsOSErrorsOut, "calls_over_a_cut_network_fail_in_time", "raised no"),
    (LetsOSErrorsOut, "roster_calls_over_a_cut_network_fail_in_time", "raised no"),
    (LetsOSErrorsOut, "waits_over_a_cut_network_end_in_time", "raised no"),
    (CallsItCorrupt, "calls_whose_answers_are_all_lost_fail_in_time", "raised no"),
    (NeverConnectsAnew, "a_connection_cut_while_idle_is_replaced", "does not work again"),
    (LeavesConnectionsOpen, "closing_after_faults_leaves_no_connection", "left open"),
    (AnnouncesTwice, "an_announcement_whose_answer_is_lost_counts_once", "first"),
    (ForgetsToWithdraw, "roster_calls_over_a_cut_network_fail_in_time", "nobody can have"),
    (AnnouncesToBeat, "a_beat_whose_answer_is_lost_changes_nothing", "=="),
    (WaitsFromNowOn, "a_wait_that_was_cut_misses_nothing", "hangs"),
    (WaitsFromNowOn, "a_wait_whose_answer_is_lost_misses_nothing", "hangs"),
    (WaitsOnAndOn, "waits_over_a_cut_network_end_in_time", "hangs"),
]


class AddsAnew(HttpTarget):
    """A repeat is taken for a new request."""

    def store(self, run_id: str = "job") -> Any:
        store = super().store(run_id)
        change = store._client._change
        store._client._change = lambda do, operation, **given: change(do, uuid.uuid4().hex, **given)
        return store


class SendsAndForgets(HttpTarget):
    """A write whose answer is lost is taken for done."""

    def store(self, run_id: str = "job") -> Any:
        store = super().store(run_id)
        write = store._client.set_many

        def set_many(pairs: Any, operation: str) -> None:
            with contextlib.suppress(Unanswered):
                write(pairs, operation)

        store._client.set_many = set_many
        return store


class TakesSilenceForAll(HttpTarget):
    """A wait that was not answered is taken to be over."""

    def store(self, run_id: str = "job") -> Any:
        store = super().store(run_id)
        wait = store._client.wait_for_keys

        def wait_for_keys(keys: Any, timeout_seconds: float) -> Any:
            with contextlib.suppress(Unanswered):
                return wait(keys, timeout_seconds)
            return []

        store._client.wait_for_keys = wait_for_keys
        return store


class StoreWaitsForEver(HttpTarget):
    def store(self, run_id: str = "job") -> Any:
        store = super().store(run_id)
        store._client._client.timeout_seconds = 1e6
        return store


class StoreLetsErrorsOut(HttpTarget):
    def store(self, run_id: str = "job") -> Any:
        store = super().store(run_id)
        ask = store._client.get_many

        def get_many(keys: Any) -> Any:
            try:
                return ask(keys)
            except Unanswered as error:
                raise ConnectionError(str(error)) from error

        store._client.get_many = get_many
        return store


STORES: list[tuple[type[HttpTarget], str, str]] = [
    (AddsAnew, "an_add_whose_answer_is_lost_counts_once", "counted|=="),
    (AddsAnew, "an_append_whose_answer_is_lost_happens_once", "happened twice"),
    (AddsAnew, "a_push_whose_answer_is_lost_happens_once", "happened twice"),
    (AddsAnew, "a_pop_whose_answer_is_lost_takes_one_value", "counted"),
    (AddsAnew, "a_deletion_whose_answer_is_lost_tells_the_truth", "False"),
    (AddsAnew, "a_set_that_is_repeated_undoes_nothing", "later"),
    (AddsAnew, "adds_count_once_while_answers_are_lost", "counted"),
    (SendsAndForgets, "store_calls_over_a_cut_network_fail_in_time", "nobody can have answered"),
    (SendsAndForgets, "store_calls_to_a_killed_server_fail_in_time", "nobody can have answered"),
    (TakesSilenceForAll, "those_who_wait_over_a_cut_network_are_released", "returned before"),
    (StoreWaitsForEver, "store_calls_in_a_black_hole_fail_in_time", "hangs"),
    (StoreLetsErrorsOut, "store_calls_over_a_cut_network_fail_in_time", "raised no"),
]


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    server = remote_server(tmp_path_factory.mktemp("remote"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    server = http_server(tmp_path_factory.mktemp("http"))
    yield server
    server.close()


ATTEMPTS_MAX = 3
"""Which answer is lost is up to chance: a mistake in one kind of call may be passed over once."""


def assert_fails(clause_name: str, target: NetworkTarget, text: str) -> None:
    [clause] = [each for book in BOOKS.values() for each in book if each.name == clause_name]
    assert clause.group == "faults"
    try:
        with pytest.raises(AssertionError, match=text):
            clause.function(target)
    finally:
        made = list(target.made)
        target.close()
        deadline = time.monotonic() + JOIN_SECONDS_MAX
        for thread in threading.enumerate():
            if thread.name.startswith("rdzv-"):
                thread.join(max(0.0, deadline - time.monotonic()))
        for each in made:  # what hung has been let go, and may have put back a connection
            each.close()


@pytest.mark.parametrize(("backend", "clause", "text"), BACKENDS)
def test_a_bad_backend_is_caught(
    remote: ProcessServer, backend: type[RemoteBackend], clause: str, text: str
) -> None:
    for attempt in range(ATTEMPTS_MAX):
        target = RemoteTarget(remote, f"{backend.__name__}-{clause}-{attempt}-")
        target.call_seconds_max, target.recovery_seconds_max = 1.5, 0.5
        target.backend = backend
        if attempt == ATTEMPTS_MAX - 1:
            assert_fails(clause, target, text)
            return
        with contextlib.suppress(pytest.fail.Exception):
            assert_fails(clause, target, text)
            return


@pytest.mark.parametrize(("kind", "clause", "text"), STORES)
def test_a_bad_store_is_caught(
    http: ProcessServer, kind: type[HttpTarget], clause: str, text: str
) -> None:
    target = kind(http, f"{kind.__name__}-{clause}-")
    target.call_seconds_max, target.recovery_seconds_max = 1.5, 0.5
    assert_fails(clause, target, text)


class Forgetful(Server):
    """It keeps what it should in memory only."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def address(self) -> tuple[str, int]:
        return self._server.address

    def pause(self) -> None:
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def kill(self) -> None:
        self._server.kill()

    def restart(self, *, keep_data: bool) -> None:
        self._server.restart(keep_data=False)


@pytest.mark.parametrize("clause", ["a_document_outlives_a_crash", "a_roster_outlives_a_crash"])
def test_a_forgetful_server_is_caught(remote: ProcessServer, clause: str) -> None:
    assert_fails(clause, RemoteTarget(Forgetful(remote), f"{clause}-"), ".")


def test_a_proxy_that_nobody_uses_is_noticed(remote: ProcessServer) -> None:
    class Elsewhere(RemoteTarget):
        def connect(self, run_id: str = "job") -> RemoteBackend:
            self.made.append(RemoteBackend(remote.address, self.prefix + run_id))
            return self.made[-1]  # type: ignore[no-any-return]

    name = "a_write_whose_answer_is_lost_happens_once_or_not_at_all"
    assert_fails(name, Elsewhere(remote, "elsewhere-"), "is Target.address used")
