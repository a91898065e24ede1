"""The document and its tokens: torch's own interface, to the letter."""

from __future__ import annotations

import pickle
import random

from rdzv.conformance.backend_kit import (
    LONG_SECONDS,
    after_loss,
    announced,
    asked,
    connected,
    live_ids,
)
from rdzv.conformance.clauses import book
from rdzv.conformance.store_kit import in_threads
from rdzv.conformance.target import Target
from rdzv.ports import Question

case = book("backend", "state")
wiping = book("backend", "state", controls=("wipe",))
roster_case = book("roster", "roster", needs=("roster",))


@case
def an_empty_backend_has_no_document(target: Target) -> None:
    backend = target.connect()
    assert backend.name
    assert backend.get_state() is None
    # There is nothing that a token could fit, and nothing to return.
    assert backend.set_state(b"x", "1:no-token-of-ours") is None
    assert backend.get_state() is None


@case
def a_write_without_token_only_creates(target: Target) -> None:
    first, second = target.connect(), target.connect()
    state, token, success = first.set_state(b"first")
    assert (state, success) == (b"first", True)
    assert second.set_state(b"second", None) == (b"first", token, False)
    assert first.get_state() == second.get_state() == (b"first", token)


@case
def a_write_with_the_token_replaces(target: Target) -> None:
    first, second = target.connect(), target.connect()
    _, old, _ = first.set_state(b"1")
    state, new, success = second.set_state(b"2", old)
    assert (state, success) == (b"2", True)
    assert new != old
    assert first.get_state() == (b"2", new)


@case
def a_stale_token_loses(target: Target) -> None:
    first, second = target.connect(), target.connect()
    _, old, _ = first.set_state(b"1")
    _, new, _ = first.set_state(b"2", old)
    assert second.set_state(b"3", old) == (b"2", new, False)
    assert first.get_state() == (b"2", new)


@case
def a_token_that_was_never_ours_loses(target: Target) -> None:
    backend, other = target.connect(), target.connect("other")
    _, token, _ = backend.set_state(b"ours")
    _, foreign, _ = other.set_state(b"theirs")
    odd = [foreign, 0, 1, -1, True, False, 1.5, "", "x", "1", "1:", ":", "9" * 40, b"", b"x"]
    odd += [
        (),
        ("1",),
        [],
        {},
        object(),
        f"{token}x",
        str(token)[:-1],
        "\N{ARABIC-INDIC DIGIT ONE}:",
    ]
    for bad in odd:
        assert backend.set_state(b"stolen", bad) == (b"ours", token, False), repr(bad)
    assert backend.get_state() == (b"ours", token)


@case
def equal_bytes_are_a_new_version(target: Target) -> None:
    backend = target.connect()
    tokens = [backend.set_state(b"same")[1]]
    for _ in range(5):
        state, token, success = backend.set_state(b"same", tokens[-1])
        assert (state, success) == (b"same", True)
        tokens.append(token)
    assert len(set(tokens)) == 6
    assert backend.set_state(b"same", tokens[-2]) == (b"same", tokens[-1], False)


@case
def any_bytes_come_back_unchanged(target: Target) -> None:
    writer, reader = target.connect(), target.connect()
    token = None
    for state in (b"", b"\0", bytes(range(256)) * 4, b"'\"\\", pickle.dumps({"a": 1}), b"0" * 63):
        answer = writer.set_state(state, token)
        assert answer[0] == state
        assert answer[2]
        token = answer[1]
        assert reader.get_state() == (state, token)
        assert type(reader.get_state()[0]) is bytes


@case
def a_document_may_have_a_megabyte(target: Target) -> None:
    writer, reader = target.connect(), target.connect()
    big, other = (random.Random(seed).randbytes(1_000_000) for seed in (1, 2))
    _, token, success = writer.set_state(big)
    assert success
    assert reader.get_state() == (big, token)
    _, token, success = reader.set_state(other, token)
    assert success
    assert writer.get_state() == (other, token)


@wiping
def a_lost_document_makes_all_tokens_stale(target: Target) -> None:
    backend = target.connect()
    _, old, _ = backend.set_state(b"same")
    target.wipe()
    after_loss(backend)
    assert backend.get_state() is None
    assert backend.set_state(b"same", old) is None
    _, new, success = backend.set_state(b"same")
    assert success
    assert new != old
    assert backend.set_state(b"later", old) == (b"same", new, False)


@case
def no_write_is_lost_among_many_writers(target: Target) -> None:
    writers, each = 8, 15
    target.connect().set_state(b"0")

    def count(index: int) -> int:
        backend, lost = target.connect(), 0
        for _ in range(each):
            state, token = backend.get_state()
            success = False
            while not success:
                wanted = str(int(state) + 1).encode()
                state, token, success = backend.set_state(wanted, token)
                lost += not success
        return lost

    in_threads(writers, count)
    assert target.connect().get_state()[0] == str(writers * each).encode()


@case
def one_object_serves_many_threads(target: Target) -> None:
    backend = target.connect()
    backend.set_state(b"0")

    def use(index: int) -> None:
        for _ in range(10):
            assert backend.get_state() is not None
            state, _, success = backend.set_state(b"1", "1:no-token")
            assert (state, success) == (b"0", False)

    in_threads(8, use)


@case
def run_ids_do_not_meet(target: Target) -> None:
    backends = connected(target)
    for number, (run_id, backend) in enumerate(backends.items()):
        _, _, success = backend.set_state(f"{number}".encode())
        assert success, repr(run_id)
    for number, (run_id, backend) in enumerate(backends.items()):
        assert backend.get_state()[0] == f"{number}".encode(), repr(run_id)
        assert target.connect(run_id).get_state() == backend.get_state()


@roster_case
def one_roster_serves_many_threads(target: Target) -> None:
    backend = target.connect()

    def use(index: int) -> None:
        node = f"node{index}"
        announced(backend, node)
        for _ in range(10):
            assert backend.beat(node, LONG_SECONDS, Question()).present
            assert node in live_ids(backend)

    in_threads(8, use)
    assert len(backend.entries()) == 8
    assert asked(backend).live == 8


@roster_case
def rosters_of_run_ids_do_not_meet(target: Target) -> None:
    backends = connected(target)
    for number, backend in enumerate(backends.values()):
        announced(backend, f"node {number}")
    for number, backend in enumerate(backends.values()):
        assert live_ids(backend) == [f"node {number}"]
    backends["job"].withdraw("node 0", LONG_SECONDS)
    others = [1] * (len(backends) - 1)
    assert [asked(backend).live for backend in backends.values()] == [0, *others]
