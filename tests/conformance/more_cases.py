"""Clauses that broken backends and stores have taught: each catches what no other clause did."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from rdzv.conformance.backend_kit import (
    DEADLINE_SECONDS,
    LONG_SECONDS,
    announced,
    asked,
    live_ids,
)
from rdzv.conformance.clauses import book
from rdzv.conformance.store_kit import LONG, Background, Connect, store_book
from rdzv.conformance.target import Target
from rdzv.errors import RendezvousStateError
from rdzv.ports import Entry, Namespaced, Question

BLANKS = (b" ", b"\n", b" x ", b"\tx\r\n", b"x\n\n")
CLOCK_ERROR_SECONDS = 3600.0
RELEASES = 100

state_case = book("backend", "state")
with_store = book("backend", "state", needs=("store",), controls=("store",))
roster_case = book("roster", "roster", needs=("roster",))
clocked = book("roster", "roster", needs=("roster", "server_clock"))
watch_case = book("watch", "watch", needs=("watch",))
watch_of_the_roster = book("watch", "watch", needs=("watch", "roster"))
corrupting = book("backend", "state", controls=("corrupt",))
value_case = store_book("values")
large_values = store_book("values", "large_values")
wait_case = store_book("waits")


# The document


@state_case
def every_answer_to_a_write_holds_bytes(target: Target) -> None:
    backend = target.connect()
    created = backend.set_state(b"1")
    replaced = backend.set_state(bytearray(b"2"), created[1])
    lost = backend.set_state(b"3", created[1])
    assert [answer[2] for answer in (created, replaced, lost)] == [True, True, False]
    for answer in (created, lost, backend.get_state()):
        assert type(answer[0]) is bytes, answer


@state_case
def blanks_at_the_ends_of_a_document_stay(target: Target) -> None:
    writer, reader = target.connect(), target.connect()
    token = None
    for state in BLANKS:
        token = writer.set_state(state, token)[1]
        assert reader.get_state() == (state, token)


@with_store
def stores_of_run_ids_do_not_meet(target: Target) -> None:
    mine, theirs = target.store(), target.store("other")
    mine.set("k", "mine")
    assert not theirs.check(["k"])
    theirs.set("k", "theirs")
    assert theirs.delete_key("k")
    assert mine.get("k") == b"mine"


# The roster


@corrupting
def what_is_not_ours_is_an_error_and_stays(target: Target) -> None:
    """Or it is handed over as it is: then rdzv's own codec refuses it."""
    backend = target.connect()
    _, token, _ = backend.set_state(b"ours")
    target.corrupt()
    for _ in range(2):
        with contextlib.suppress(RendezvousStateError):
            found = backend.get_state()
            assert found is not None
            assert found[0] != b"ours"
        for old in (token, None):
            with contextlib.suppress(RendezvousStateError):
                answer = backend.set_state(b"over it", old)
                assert answer is not None
                assert answer[0] != b"over it"
                assert not answer[2]


@contextlib.contextmanager
def clock_set(seconds: float) -> Iterator[None]:
    """Inside, this process's wall clock is that much ahead, for whoever asks ``time.time()``."""
    seconds_now, nanoseconds_now = time.time, time.time_ns

    def seconds_shifted() -> float:
        return seconds_now() + seconds

    def nanoseconds_shifted() -> int:
        return nanoseconds_now() + int(seconds * 1e9)

    with (
        mock.patch("time.time", seconds_shifted),
        mock.patch("time.time_ns", nanoseconds_shifted),
    ):
        yield


@roster_case
def the_clock_of_this_machine_expires_nobody(target: Target) -> None:
    backend = target.connect()
    announced(backend, "before")
    with clock_set(CLOCK_ERROR_SECONDS):
        announced(backend, "ahead")
        assert live_ids(backend) == ["before", "ahead"]
        pulse = backend.beat("before", LONG_SECONDS, Question("ahead"))
        assert (pulse.present, pulse.peer_live, pulse.live) == (True, True, 2)
    with clock_set(-CLOCK_ERROR_SECONDS):
        announced(backend, "behind")
    assert live_ids(backend) == ["before", "ahead", "behind"]
    # Nor does it keep anybody.
    with clock_set(CLOCK_ERROR_SECONDS):
        announced(backend, "lost", ttl=target.short_ttl_seconds)
    target.until(lambda: not asked(backend, "lost").peer_live)
    assert live_ids(backend) == ["before", "ahead", "behind"]


@clocked
def the_clock_of_this_machine_tells_no_age(target: Target) -> None:
    backend = target.connect()

    def age_seconds() -> Any:
        return asked(backend).state_age_seconds

    _, token, _ = backend.set_state(b"1")
    with clock_set(CLOCK_ERROR_SECONDS):
        assert 0 <= age_seconds() < DEADLINE_SECONDS
        backend.set_state(b"2", token)
    assert 0 <= age_seconds() < DEADLINE_SECONDS


@roster_case
def each_call_sets_how_long_an_entry_lives(target: Target) -> None:
    backend, short = target.connect(), target.short_ttl_seconds
    for node in ("announced again", "beats", "lost"):
        announced(backend, node, ttl=short)
    assert announced(backend, "announced again").present
    assert backend.beat("beats", LONG_SECONDS, Question()).present
    target.until(lambda: not asked(backend, "lost").peer_live)
    assert live_ids(backend) == ["announced again", "beats"]


@clocked
def the_next_expiry_is_told(target: Target) -> None:
    backend, short = target.connect(), target.short_ttl_seconds

    def next_expiry_seconds() -> Any:
        return asked(backend).next_expiry_seconds

    assert next_expiry_seconds() is None
    announced(backend, "long")
    backend.withdraw("left", short)  # a tombstone is no entry
    assert short < next_expiry_seconds() <= LONG_SECONDS
    announced(backend, "short", ttl=short)
    assert 0 <= next_expiry_seconds() <= short
    target.until(lambda: not asked(backend, "short").peer_live)
    assert short < next_expiry_seconds() <= LONG_SECONDS
    backend.withdraw("long", LONG_SECONDS)
    assert next_expiry_seconds() is None


@roster_case
def a_changed_entry_is_listed_as_changed(target: Target) -> None:
    mine, theirs = target.connect(), target.connect()
    for entry in (Entry("n", b"1", "a"), Entry("n", b"2", "a"), Entry("n", b"", "b")):
        mine.announce(entry, LONG_SECONDS, Question())
        assert [row.entry for row in theirs.entries()] == [entry]
        pulse = theirs.beat("nobody", LONG_SECONDS, Question("", entry.round_label))
        assert pulse.confirmed == 1


# The watch


@watch_case
def every_answer_to_a_wait_holds_bytes(target: Target) -> None:
    backend = target.connect()
    _, token, _ = backend.set_state(b"\0\xff")
    found = backend.wait_for_change(None, LONG_SECONDS)
    assert found == (b"\0\xff", token)
    assert type(found[0]) is bytes


@watch_of_the_roster
def what_is_no_change_wakes_nobody(target: Target) -> None:
    backend, peer, other = target.connect(), target.connect(), target.connect("other")
    _, token, _ = backend.set_state(b"1")
    revision = announced(backend, "a").revision
    waiting = Background(lambda: backend.wait_for_change(token, LONG_SECONDS, revision))
    waiting.still_blocked()
    peer.beat("a", LONG_SECONDS, Question())
    announced(peer, "a")
    peer.set_state(b"2", "1:no-token")
    other.set_state(b"2")
    announced(other, "b")
    waiting.still_blocked()
    found = peer.set_state(b"2", token)[:2]
    assert waiting.result() == found


@watch_of_the_roster
def a_wait_holds_up_no_other_call(target: Target) -> None:
    backend = target.connect()
    _, token, _ = backend.set_state(b"1")
    waiting = Background(lambda: backend.wait_for_change(token, DEADLINE_SECONDS))
    waiting.still_blocked()
    assert backend.get_state() == (b"1", token)
    assert announced(backend, "node").present
    assert live_ids(backend) == ["node"]
    found = backend.set_state(b"2", token)[:2]
    assert waiting.result() == found


# The store


@value_case
def blanks_at_the_ends_of_a_value_stay(connect: Connect) -> None:
    store, peer = connect(), connect()
    for value in BLANKS:
        store.set("k", value)
        assert peer.get("k") == value


@large_values
def values_of_four_megabytes_are_stored(connect: Connect) -> None:
    store, peer = connect(), connect()
    value = random.Random(4).randbytes(4_000_000)
    store.set("k", value)
    assert peer.get("k") == value
    assert peer.compare_set("k", value, value[::-1]) == value[::-1]
    assert store.get("k") == value[::-1]


@value_case
def long_keys_do_not_meet(connect: Connect) -> None:
    store, peer = connect(), connect()
    for length in (32, 64, 128, 255, 256, 1000):
        keys = [f"{'x' * (length - 1)}{end}" for end in "abc"]
        for key in keys:
            store.set(key, key)
        assert [peer.get(key) for key in keys] == [key.encode() for key in keys], length


@value_case
def a_round_has_keys_of_its_own(connect: Connect) -> None:
    store = connect()
    names = ["r", "r1", "r_", "R1", "r%"]
    rooms = [_room(store, name) for name in names]
    for name, room in zip(names, rooms, strict=True):
        for key in ("k", "1k", "_k"):
            room.set(key, f"{name} {key}")
    for name, room in zip(names, rooms, strict=True):
        assert [room.get(key) for key in ("k", "1k", "_k")] == [
            f"{name} {key}".encode() for key in ("k", "1k", "_k")
        ]
        if isinstance(store, Namespaced):
            assert sorted(room.list_keys()) == ["1k", "_k", "k"], name
            assert room.num_keys() == 3, name
    rooms[0].delete_key("k")
    assert [room.check(["k"]) for room in rooms] == [False, True, True, True, True]


def _room(store: Any, name: str) -> Any:
    """The keys of a round, made as the handler makes them."""
    return store.namespace(name) if isinstance(store, Namespaced) else dist.PrefixStore(name, store)


@wait_case
def no_release_is_lost(connect: Connect) -> None:
    """A set races with the begin of a wait, again and again."""
    store, peer = connect(), connect()
    ready, chance = threading.Barrier(2), random.Random(5)

    def write() -> None:
        for number in range(RELEASES):
            ready.wait()
            for _ in range(chance.randrange(2000)):
                pass
            peer.set(f"k{number}", "1")

    writing = Background(write)
    for number in range(RELEASES):
        ready.wait()
        store.wait([f"k{number}"], LONG)
    writing.result()
