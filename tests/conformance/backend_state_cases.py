"""The document and its tokens: torch's own interface, to the letter."""

from __future__ import annotations

import pickle
import random

from rdzv.conformance.backend_kit import (
    LONG_SECONDS,
    ODD_TEXTS,
    Space,
    after_loss,
    announced,
    asked,
    case,
    live_ids,
)
from rdzv.conformance.store_kit import in_threads
from rdzv.ports import Question


@case
def an_empty_backend_has_no_document(space: Space) -> None:
    backend = space.connect()
    assert backend.name
    assert backend.get_state() is None
    # There is nothing that a token could fit, and nothing to return.
    assert backend.set_state(b"x", "1:no-token-of-ours") is None
    assert backend.get_state() is None


@case
def a_write_without_token_only_creates(space: Space) -> None:
    first, second = space.connect(), space.connect()
    state, token, success = first.set_state(b"first")
    assert (state, success) == (b"first", True)
    assert second.set_state(b"second", None) == (b"first", token, False)
    assert first.get_state() == second.get_state() == (b"first", token)


@case
def a_write_with_the_token_replaces(space: Space) -> None:
    first, second = space.connect(), space.connect()
    _, old, _ = first.set_state(b"1")
    state, new, success = second.set_state(b"2", old)
    assert (state, success) == (b"2", True)
    assert new != old
    assert first.get_state() == (b"2", new)


@case
def a_stale_token_loses(space: Space) -> None:
    first, second = space.connect(), space.connect()
    _, old, _ = first.set_state(b"1")
    _, new, _ = first.set_state(b"2", old)
    assert second.set_state(b"3", old) == (b"2", new, False)
    assert first.get_state() == (b"2", new)


@case
def a_token_that_was_never_ours_loses(space: Space) -> None:
    backend, other = space.connect(), space.connect("other")
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
def equal_bytes_are_a_new_version(space: Space) -> None:
    backend = space.connect()
    tokens = [backend.set_state(b"same")[1]]
    for _ in range(5):
        state, token, success = backend.set_state(b"same", tokens[-1])
        assert (state, success) == (b"same", True)
        tokens.append(token)
    assert len(set(tokens)) == 6
    assert backend.set_state(b"same", tokens[-2]) == (b"same", tokens[-1], False)


@case
def any_bytes_come_back_unchanged(space: Space) -> None:
    writer, reader = space.connect(), space.connect()
    token = None
    for state in (b"", b"\0", bytes(range(256)) * 4, b"'\"\\", pickle.dumps({"a": 1}), b"0" * 63):
        answer = writer.set_state(state, token)
        assert answer[0] == state
        assert answer[2]
        token = answer[1]
        assert reader.get_state() == (state, token)
        assert type(reader.get_state()[0]) is bytes


@case
def a_document_may_have_a_megabyte(space: Space) -> None:
    writer, reader = space.connect(), space.connect()
    big, other = (random.Random(seed).randbytes(1_000_000) for seed in (1, 2))
    _, token, success = writer.set_state(big)
    assert success
    assert reader.get_state() == (big, token)
    _, token, success = reader.set_state(other, token)
    assert success
    assert writer.get_state() == (other, token)


@case
def a_lost_document_makes_all_tokens_stale(space: Space) -> None:
    backend = space.connect()
    _, old, _ = backend.set_state(b"same")
    space.wipe()
    after_loss(backend)
    assert backend.get_state() is None
    assert backend.set_state(b"same", old) is None
    _, new, success = backend.set_state(b"same")
    assert success
    assert new != old
    assert backend.set_state(b"later", old) == (b"same", new, False)


@case
def no_write_is_lost_among_many_writers(space: Space) -> None:
    writers, each = 8, 15
    space.connect().set_state(b"0")

    def count(index: int) -> int:
        backend, lost = space.connect(), 0
        for _ in range(each):
            state, token = backend.get_state()
            success = False
            while not success:
                wanted = str(int(state) + 1).encode()
                state, token, success = backend.set_state(wanted, token)
                lost += not success
        return lost

    in_threads(writers, count)
    assert space.connect().get_state()[0] == str(writers * each).encode()


@case
def one_object_serves_many_threads(space: Space) -> None:
    backend = space.connect()
    backend.set_state(b"0")

    def use(index: int) -> None:
        node = f"node{index}"
        announced(backend, node)
        for _ in range(10):
            assert backend.get_state() is not None
            assert backend.beat(node, LONG_SECONDS, Question()).present
            backend.set_state(b"1", "1:no-token")

    in_threads(8, use)
    assert len(backend.entries()) == 8
    assert asked(backend).live == 8


@case
def run_ids_do_not_meet(space: Space) -> None:
    backends = {run_id: space.connect(run_id) for run_id in ODD_TEXTS}
    for number, (run_id, backend) in enumerate(backends.items()):
        _, _, success = backend.set_state(f"{number}".encode())
        assert success, repr(run_id)
        announced(backend, f"node {number}")
    for number, (run_id, backend) in enumerate(backends.items()):
        assert backend.get_state()[0] == f"{number}".encode(), repr(run_id)
        assert live_ids(backend) == [f"node {number}"]
        assert space.connect(run_id).get_state() == backend.get_state()
    backends["job"].withdraw("node 0", LONG_SECONDS)
    assert [asked(backend).live for backend in backends.values()] == [0] + [1] * (
        len(ODD_TEXTS) - 1
    )
