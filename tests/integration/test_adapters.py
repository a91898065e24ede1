"""Third parties' backends, which have nothing but ``get_state`` and ``set_state``."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.adapters import BARE_NODES_MAX, FramedBackend, PollingWatch
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rdzv.ports import Entry, Question, Token

from .handler_kit import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    LIVENESS_WINDOW_SECONDS,
    Job,
    Stopwatch,
    close,
    grow,
    hold_for,
    lose_one,
    notice_moments,
    results,
    together,
    wait_until,
)

NOBODY = Question()
TTL_SECONDS = 4.0
Answer = tuple[bytes, Token, bool] | None


# ------------------------------------------------------------------- backends as others write them


class DictBackend(RendezvousBackend):
    """Numbers for tokens, in a dictionary that its nodes share."""

    def __init__(self, shared: dict[str, Any]) -> None:
        self._shared = shared
        self._lock: threading.Lock = shared.setdefault("lock", threading.Lock())

    @property
    def name(self) -> str:
        return "dictionary"

    def get_state(self) -> tuple[bytes, Token] | None:
        with self._lock:
            return self._current()

    def set_state(self, state: bytes, token: Token | None = None) -> Answer:
        with self._lock:
            current = self._current()
            if token != (None if current is None else current[1]):
                return None if current is None else (*current, False)
            number = self._shared["number"] = self._shared.get("number", 0) + 1
            self._shared["state"] = state
            return state, number, True

    def _current(self) -> tuple[bytes, int] | None:
        if "state" not in self._shared:
            return None
        return self._shared["state"], self._shared["number"]


class FileBackend(RendezvousBackend):
    """A file, and a hash of its content for a token."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        return "file"

    def get_state(self) -> tuple[bytes, Token] | None:
        with self._locked():
            return self._read()

    def set_state(self, state: bytes, token: Token | None = None) -> Answer:
        with self._locked():
            current = self._read()
            if token != (current[1] if current else None):
                return (*current, False) if current else None
            self._path.write_bytes(state)
            return state, hashlib.sha256(state).hexdigest(), True

    def _read(self) -> tuple[bytes, str] | None:
        content = self._path.read_bytes()
        return (content, hashlib.sha256(content).hexdigest()) if content else None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class TaciturnBackend(DictBackend):
    """Says nothing of what it lost to: torch's signature allows None there."""

    def set_state(self, state: bytes, token: Token | None = None) -> Answer:
        answer = super().set_state(state, token)
        return answer if answer is not None and answer[2] else None


class MoodyBackend(DictBackend):
    """Fails one call in eight with whatever comes to its driver's mind, written or not."""

    ERRORS = (OSError("broken pipe"), KeyError("pool"), RuntimeError(""), RendezvousTimeoutError())
    _random = random.Random(7)

    def get_state(self) -> tuple[bytes, Token] | None:
        self._fail_sometimes()
        return super().get_state()

    def set_state(self, state: bytes, token: Token | None = None) -> Answer:
        self._fail_sometimes()
        answer = super().set_state(state, token)
        self._fail_sometimes()
        return answer

    def _fail_sometimes(self) -> None:
        if self._random.random() < 1 / 8:
            raise self._random.choice(self.ERRORS)


def sharing(kind: type[DictBackend]) -> Callable[[str], RendezvousBackend]:
    shared: dict[str, Any] = {}
    return lambda run_id: kind(shared)


# ------------------------------------------------------------------------ under our handler


def serves(make_backend: Callable[[str], RendezvousBackend]) -> None:
    with Job("2:3", make_backend=make_backend) as job:
        close(lose_one(grow(job)))


def numbers_serve() -> None:
    serves(sharing(DictBackend))


def silence_on_what_was_lost_to_serves() -> None:
    serves(sharing(TaciturnBackend))


def errors_that_nobody_expects_cost_no_more_than_time() -> None:
    # They break contact too often for anybody's absence to be proven: see invariant 4.
    with Job("2:3", make_backend=sharing(MoodyBackend)) as job:
        close(grow(job))


def many_nodes_join(count: int) -> None:
    with Job(f"{count}:{count}", make_backend=sharing(DictBackend)) as job:
        watch = Stopwatch()
        nodes, _ = job.start(count)
        assert watch.seconds < 10.0
        hold_for(
            "everybody stays",
            lambda: not any(node.noticed for node in nodes),
            2 * KEEP_ALIVE_INTERVAL_SECONDS,
        )
        assert not any(node.state.lost for node in nodes)


def eight_nodes_join() -> None:
    many_nodes_join(8)


def as_many_nodes_join_as_are_promised() -> None:
    many_nodes_join(BARE_NODES_MAX)


def joining_does_not_wait_for_a_keep_alive() -> None:
    options: dict[str, Any] = {"keep_alive_interval": 10.0, "keep_alive_max_attempt": 2}
    with Job("3:3", make_backend=sharing(DictBackend), **options) as job:
        watch = Stopwatch()
        job.start(3)
        assert watch.seconds < 5.0
        for node in job.nodes:
            assert node.handler.shutdown()


def a_spare_takes_a_free_place() -> None:
    with Job("2:2", make_backend=sharing(DictBackend)) as job:
        nodes, _ = job.start(2)
        spare = job.node()
        parked = spare.join()
        wait_until("it is parked", lambda: spare.handler._session.parked)
        nodes[1].exit()
        notice_moments(nodes[:1])
        results([nodes[0], spare], [nodes[0].join(), parked])


def a_document_that_was_lost_is_put_back() -> None:
    shared: dict[str, Any] = {}
    with Job("2:3", make_backend=lambda run_id: DictBackend(shared)) as job:
        nodes, _ = job.start(2)
        before = nodes[0].state
        with shared["lock"]:
            del shared["state"]
        wait_until("it is back", lambda: FramedBackend(DictBackend(shared)).get_state())
        hold_for(
            "nobody re-joins",
            lambda: not any(node.noticed for node in nodes),
            LIVENESS_WINDOW_SECONDS + 1.0,
        )
        assert nodes[0].state.round_id == before.round_id
        assert not nodes[0].state.lost


def a_run_id_serves_again_when_the_grace_was_watched() -> None:
    # Nobody tells how old the document is, so newcomers see for themselves.
    with Job("2:2", make_backend=sharing(DictBackend), closed_grace=1.0) as job:
        old, _ = job.start(2)
        assert all(node.handler.shutdown() for node in old)
        watch = Stopwatch()
        new, _ = job.start(2)
        assert watch.seconds >= 1.0
        assert new[0].state.incarnation != old[0].state.incarnation


def test_all_that_a_bare_backend_can_do(tmp_path: Path) -> None:
    """One test, for these spend their time waiting and can do so side by side."""

    def a_file_serves() -> None:
        serves(lambda run_id: FileBackend(tmp_path / "state"))

    together(
        numbers_serve,
        silence_on_what_was_lost_to_serves,
        a_file_serves,
        errors_that_nobody_expects_cost_no_more_than_time,
        eight_nodes_join,
        as_many_nodes_join_as_are_promised,
        joining_does_not_wait_for_a_keep_alive,
        a_spare_takes_a_free_place,
        a_document_that_was_lost_is_put_back,
        a_run_id_serves_again_when_the_grace_was_watched,
    )


def test_what_another_program_wrote_is_left_as_it_is() -> None:
    for content in (b"\x80\x04pickled by another handler", b"rdzv-frame1\n{damaged"):
        shared: dict[str, Any] = {}
        DictBackend(shared).set_state(content)
        with Job("1:1", make_backend=lambda run_id, shared=shared: DictBackend(shared)) as job:  # type: ignore[misc]
            node = job.node()
            with pytest.raises(RendezvousStateError, match="left as"):
                node.handler.next_rendezvous()
            node.handler.shutdown()
        assert shared["state"] == content


# ------------------------------------------------------------- the adapters alone, by a fake clock


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shared() -> dict[str, Any]:
    return {}


def entry(node_id: str, data: bytes = b"", round_label: str = "") -> Entry:
    return Entry(node_id, data, round_label)


def test_a_beat_is_no_change_of_the_state(clock: Clock, shared: dict[str, Any]) -> None:
    backend = FramedBackend(DictBackend(shared), clock)
    assert backend.set_state(b"state", None) is not None
    before = backend.get_state()
    assert before is not None
    token = before[1]
    backend.announce(entry("a"), TTL_SECONDS, NOBODY)
    pulse = backend.beat("a", TTL_SECONDS, NOBODY)
    assert pulse.token == token
    assert backend.get_state() == before
    written = backend.set_state(b"next", token)
    assert written is not None
    assert written[2]
    assert backend.set_state(b"late", token) == (b"next", written[1], False)


def test_the_state_is_made_once(clock: Clock, shared: dict[str, Any]) -> None:
    one, other = (FramedBackend(DictBackend(shared), clock) for _ in range(2))
    assert one.get_state() is None
    assert one.set_state(b"lost", "a token of nothing") is None
    one.announce(entry("a"), TTL_SECONDS, NOBODY)
    assert one.get_state() is None, "the roster is no state"
    made = other.set_state(b"made", None)
    assert made is not None
    assert made[2]
    assert one.set_state(b"made twice", None) == (*made[:2], False)


def test_an_entry_expires_when_the_observer_has_seen_it_stand_still(
    clock: Clock, shared: dict[str, Any]
) -> None:
    node, observer = (FramedBackend(DictBackend(shared), clock) for _ in range(2))
    node.announce(entry("a"), TTL_SECONDS, NOBODY)
    clock.now += 1000.0
    assert [row.entry.node_id for row in observer.entries()] == ["a"], "first seen just now"
    clock.now += TTL_SECONDS - 0.1
    node.beat("a", TTL_SECONDS, NOBODY)
    assert observer.beat("b", TTL_SECONDS, Question(peer_id="a")).peer_live
    clock.now += TTL_SECONDS - 0.1
    assert observer.beat("b", TTL_SECONDS, Question(peer_id="a")).peer_live
    clock.now += 0.1
    pulse = observer.beat("b", TTL_SECONDS, Question(peer_id="a"))
    assert not pulse.peer_live
    assert pulse.live == 0
    assert observer.entries() == []


def test_an_entry_is_proven_by_its_owner_or_when_it_has_moved(
    clock: Clock, shared: dict[str, Any]
) -> None:
    node = FramedBackend(DictBackend(shared), clock)
    node.announce(entry("a"), TTL_SECONDS, NOBODY)
    observer = FramedBackend(DictBackend(shared), clock)
    assert [row.proven for row in observer.entries()] == [False]
    assert [row.proven for row in node.entries()] == [True]
    node.beat("a", TTL_SECONDS, NOBODY)
    assert [row.proven for row in observer.entries()] == [True]
    clock.now += 1.0
    node.announce(entry("b"), TTL_SECONDS, NOBODY)
    assert [row.proven for row in observer.entries()] == [True, True], "b was seen to arrive"


def test_the_revision_moves_when_an_entry_is_proven(clock: Clock, shared: dict[str, Any]) -> None:
    node = FramedBackend(DictBackend(shared), clock)
    node.announce(entry("a"), TTL_SECONDS, NOBODY)
    observer = FramedBackend(DictBackend(shared), clock)
    before = observer.beat("b", TTL_SECONDS, NOBODY).revision
    assert observer.beat("b", TTL_SECONDS, NOBODY).revision == before
    node.beat("a", TTL_SECONDS, NOBODY)
    assert observer.beat("b", TTL_SECONDS, NOBODY).revision != before


def test_arrival_is_kept_and_tombstones_come_last(clock: Clock, shared: dict[str, Any]) -> None:
    backend = FramedBackend(DictBackend(shared), clock)
    for name in "abc":
        backend.announce(entry(name), TTL_SECONDS, NOBODY)
    backend.announce(entry("a", b"other"), TTL_SECONDS, NOBODY)
    backend.withdraw("b", TTL_SECONDS)
    backend.withdraw("never came", TTL_SECONDS)
    listed = [(row.entry.node_id, row.withdrawn) for row in backend.entries()]
    assert listed == [("a", False), ("c", False), ("b", True), ("never came", True)]
    assert not backend.beat("b", TTL_SECONDS, NOBODY).present, "a beat does not bring it back"
    backend.announce(entry("b"), TTL_SECONDS, NOBODY)
    listed = [(row.entry.node_id, row.withdrawn) for row in backend.entries()]
    assert listed[:3] == [("a", False), ("c", False), ("b", False)], "it arrives anew"


def test_the_revision_moves_with_announcements_and_withdrawals_alone(
    clock: Clock, shared: dict[str, Any]
) -> None:
    backend = FramedBackend(DictBackend(shared), clock)
    announced = backend.announce(entry("a"), TTL_SECONDS, NOBODY).revision
    assert backend.beat("a", TTL_SECONDS, NOBODY).revision == announced
    other = backend.announce(entry("b"), TTL_SECONDS, NOBODY).revision
    assert other != announced
    backend.withdraw("b", TTL_SECONDS)
    assert backend.beat("a", TTL_SECONDS, NOBODY).revision not in (announced, other)


def test_confirmations_are_counted(clock: Clock, shared: dict[str, Any]) -> None:
    backend = FramedBackend(DictBackend(shared), clock)
    backend.announce(entry("a", round_label="7"), TTL_SECONDS, NOBODY)
    backend.announce(entry("b", round_label="8"), TTL_SECONDS, NOBODY)
    assert backend.beat("a", TTL_SECONDS, Question(round_label="7")).confirmed == 1
    assert backend.beat("a", TTL_SECONDS, NOBODY).confirmed == 0


def test_what_nobody_keeps_alive_is_taken_out(clock: Clock, shared: dict[str, Any]) -> None:
    backend = FramedBackend(DictBackend(shared), clock)
    backend.announce(entry("dead"), TTL_SECONDS, NOBODY)
    backend.withdraw("gone", TTL_SECONDS)
    small = len(shared["state"])
    for number in range(50):
        clock.now += 2 * TTL_SECONDS
        backend.announce(entry(f"node-{number}"), TTL_SECONDS, NOBODY)
    assert len(shared["state"]) < 4 * small


def test_a_crowd_that_never_lets_one_write_ends_in_an_error() -> None:
    class Crowded(DictBackend):
        def set_state(self, state: bytes, token: Token | None = None) -> Answer:
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rdzv.adapters.WRITE_BACK_OFF_SECONDS", 0.0)
        with pytest.raises(RendezvousConnectionError, match=f"up to {BARE_NODES_MAX} nodes"):
            FramedBackend(Crowded({})).announce(entry("a"), TTL_SECONDS, NOBODY)


def test_polling_notices_every_change_and_looks_at_least_once(shared: dict[str, Any]) -> None:
    backend = FramedBackend(DictBackend(shared))
    watch = PollingWatch(backend)
    assert watch.wait_for_change(None, 0.0) is None
    written = backend.set_state(b"state", None)
    assert written is not None
    assert watch.wait_for_change(None, 0.0) == written[:2]
    assert watch.wait_for_change(written[1], 0.05) is None
    revision = backend.announce(entry("a"), TTL_SECONDS, NOBODY).revision
    timer = threading.Timer(0.1, backend.announce, (entry("b"), TTL_SECONDS, NOBODY))
    timer.start()
    elapsed = Stopwatch()
    assert watch.wait_for_change(written[1], 30.0, revision) is None
    assert elapsed.seconds < 5.0
    timer.join()


def test_polling_a_backend_that_tells_no_revision_returns_after_a_pause() -> None:
    backend = DictBackend({})
    written = backend.set_state(b"state", None)
    assert written is not None
    elapsed = Stopwatch()
    assert PollingWatch(backend).wait_for_change(written[1], 30.0, revision=1) is None
    assert elapsed.seconds < 5.0
