"""Whatever the bytes are, they decode to a record that can exist or are refused: see rdzv.codec."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rdzv.codec import (
    decode_entry,
    decode_state,
    encode_entry,
    encode_state,
)
from rdzv.errors import RendezvousStateError
from rdzv.state import (
    NODES_MAX,
    TEXT_CHARACTERS_MAX,
    State,
)

from .codec_records import (
    FROZEN,
    GOLDEN_ENTRIES,
    GOLDEN_STATES,
    HEADER_BYTES,
    LARGE,
    RUNNING,
    RUNS,
    WAITING,
    fields_of,
    framed,
    packed,
    read_entry,
    read_state,
)

MUTATIONS = 6000

# What is not a record

PICKLED = pickle.dumps({"i": "5f2c", "participants": [1, 2]})


class _Bomb:
    """Its pickle runs code when it is loaded."""

    exploded = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _explode, ()


def _explode() -> None:
    _Bomb.exploded = True


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\0", b"rdzv", b"rdzvS", b"rdzvS1", b"rdzvE1", b"RDZVS1j{}", b"null", b"{}"),
        *(b"rdzvS1j", b"rdzvS1z", b"rdzvE1j", b"rdzvE1z", b"rdzvS1z{}", b"rdzvS1x{}"),
        *(b"rdzvS1jnull", b"rdzvS1j[]", b"rdzvS1j7", b'rdzvS1j"irnpfcwlaxbo"', b"rdzvS1j{}"),
        *(b"rdzvE1jNaN", b"rdzvE1j{", b"rdzvE1j\xff\xfe{}", b"rdzvS1j\xef\xbb\xbf{}", b"\xff" * 99),
        *(PICKLED, b"rdzvS1j" + PICKLED, b"rdzvE1j" + PICKLED, b"<html>502 Bad Gateway</html>"),
    ],
    ids=repr,
)
def test_garbage(data: bytes) -> None:
    assert read_state(data) is None
    assert read_entry(data) is None


@pytest.mark.parametrize("value", [None, "rdzvS1j{}", 7, 1.5, {}, [], (b"rdzvS1j",), True])
def test_what_is_not_bytes(value: Any) -> None:
    with pytest.raises(RendezvousStateError, match=f"Expected bytes.*{type(value).__name__}"):
        decode_state(value)
    with pytest.raises(RendezvousStateError, match="Expected bytes"):
        decode_entry(value)


def test_a_pickle_is_refused_and_never_run() -> None:
    payload = pickle.dumps(_Bomb())
    for data in (payload, b"rdzvS1j" + payload, packed(b"S", payload), packed(b"E", payload)):
        assert read_state(data) is None
        assert read_entry(data) is None
    assert not _Bomb.exploded
    pickle.loads(payload)
    assert _Bomb.exploded, "the payload was harmless, so this test showed nothing"


def test_the_other_kind_of_record() -> None:
    with pytest.raises(RendezvousStateError, match="not written by rdzv"):
        decode_entry(encode_state(RUNNING))
    with pytest.raises(RendezvousStateError, match="not written by rdzv"):
        decode_state(encode_entry(WAITING))


@pytest.mark.parametrize("version", [b"0", b"2", b"9", b"\xff"])
def test_another_version_says_so(version: bytes) -> None:
    data = encode_state(RUNNING)
    with pytest.raises(RendezvousStateError, match="same version of rdzv on all nodes"):
        decode_state(data[:5] + version + data[6:])
    entry = encode_entry(WAITING)
    with pytest.raises(RendezvousStateError, match="same version of rdzv on all nodes"):
        decode_entry(entry[:5] + version + entry[6:])


@pytest.mark.parametrize("state", [RUNNING, FROZEN, LARGE], ids=["plain", "frozen", "packed"])
def test_states_that_are_cut_off_anywhere(state: State) -> None:
    data = encode_state(state)
    for length in range(len(data)):
        assert read_state(data[:length]) is None


def test_entries_that_are_cut_off_anywhere() -> None:
    long = replace(RUNS, topology="rack " * 200)
    for data in (encode_entry(WAITING), encode_entry(RUNS), encode_entry(long)):
        for length in range(len(data)):
            assert read_entry(data[:length]) is None


def test_bytes_after_a_packed_record() -> None:
    data = encode_state(LARGE)
    with pytest.raises(RendezvousStateError, match="a wrong length"):
        decode_state(data + b"x")
    assert read_state(data + data[HEADER_BYTES:]) is None


@pytest.mark.parametrize("kind", [b"S", b"E"])
@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"i":' * 20_000, b"9" * 100_000])
def test_deep_and_wide_json_is_refused(kind: bytes, body: bytes) -> None:
    for data in (packed(kind, body), b"rdzv" + kind + b"1j" + body[:16_000]):
        assert read_state(data) is None
        assert read_entry(data) is None


# Damage


def _mutate(chance: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        place = chance.randrange(len(damaged))
        kind = chance.randrange(5)
        if kind < 2:
            damaged[place] ^= 1 << chance.randrange(8)
        elif kind == 2:
            damaged[place] = chance.choice(b'0123456789{}[],:"eE-+.ntf\\ \0\xff')
        elif kind == 3:
            damaged[place:place] = chance.randbytes(chance.randint(1, 3))
        elif len(damaged) > 8:
            del damaged[place : place + chance.randint(1, 4)]
    return bytes(damaged)


def test_flipped_bits_never_give_another_exception() -> None:
    chance = random.Random(11)
    states = [encode_state(state) for state in GOLDEN_STATES.values()]
    entries = [encode_entry(entry) for entry in GOLDEN_ENTRIES.values()]
    read = 0
    for _ in range(MUTATIONS):
        state = read_state(_mutate(chance, chance.choice(states)))
        entry = read_entry(_mutate(chance, chance.choice(entries)))
        read += (state is not None) + (entry is not None)
    assert 0 < read < MUTATIONS, "the damage was too small or too large to show anything"


JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 10**400, -(10**400), 2**63, 1.5, -0.1, 1e308, float("inf")),
    *(
        float("-inf"),
        float("nan"),
        "",
        "x",
        "ab",
        "nan",
        "1.5",
        "\0",
        "x" * (TEXT_CHARACTERS_MAX + 1),
    ),
    *([], [[]], [None], ["a", "b"], ["a", "b", "c"], [["a", "b"], ["a", "b"]], ["a", True, 1]),
    *({}, {"a": 1, "b": 2}, {"0": "n", "1": []}, [{"a": 1, "b": 2}], ["x", []], [[], "x"]),
)


def _replaced(chance: random.Random, value: Any) -> Any:
    """The value with one thing somewhere in it replaced by something else that JSON can hold."""
    if not isinstance(value, list | dict) or not value or chance.random() < 0.3:
        return chance.choice(JUNK)
    changed = value.copy()
    key = chance.choice(list(changed) if isinstance(changed, dict) else range(len(changed)))
    changed[key] = _replaced(chance, changed[key])
    if isinstance(changed, list) and chance.random() < 0.1:
        changed.append(chance.choice(JUNK))
    return changed


def test_values_of_the_wrong_kind_never_give_another_exception() -> None:
    chance = random.Random(12)
    states = [fields_of(encode_state(state)) for state in GOLDEN_STATES.values()]
    entries = [fields_of(encode_entry(entry)) for entry in GOLDEN_ENTRIES.values()]
    for _ in range(MUTATIONS):
        damaged = chance.choice(states).copy()
        key = chance.choice(list(damaged))
        damaged[key] = _replaced(chance, damaged[key])
        state = read_state(framed(b"S", damaged))
        if state is not None:
            again = decode_state(encode_state(state))
            assert replace(again, notice_age_seconds=0) == replace(state, notice_age_seconds=0)
        damaged = chance.choice(entries).copy()
        key = chance.choice(list(damaged))
        damaged[key] = _replaced(chance, damaged[key])
        entry = read_entry(framed(b"E", damaged))
        assert entry is None or decode_entry(encode_entry(entry)) == entry


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("a", "1.5"), ("a", True), ("a", 10**400), ("a", float("nan")), ("r", 3.0), ("r", True)),
        *(("w", "1"), ("w", -1), ("w", NODES_MAX + 1), ("i", 5), ("i", ""), ("n", None)),
        *(("p", "ab"), ("p", ["ab"]), ("p", [{"a": 1, "b": 2}]), ("p", [["a", "b", "c"]])),
        *(("f", {}), ("f", False), ("f", ["n", []]), ("f", ["n", [["a", "b"]], "more"])),
        *(("x", "ab"), ("x", ["r", 1]), ("x", ["r", True, 5]), ("x", 0), ("l", None), ("l", [1])),
        *(("l", ["nobody"]), ("o", ["5f2c"]), ("o", [str(n) for n in range(9)]), ("b", None)),
    ],
    ids=repr,
)
def test_fields_of_the_wrong_kind(key: str, value: Any) -> None:
    fields = fields_of(encode_state(RUNNING))
    assert read_state(framed(b"S", fields)) == RUNNING
    assert read_state(framed(b"S", {**fields, key: value})) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("n", "ab"), ("n", ["a"]), ("n", ["a", ""]), ("n", {"a": 1, "b": 2}), ("n", None)),
        *(("h", True), ("h", 1.0), ("h", "1"), ("t", None), ("f", 1), ("f", None), ("f", "true")),
        *(("l", "a1b"), ("l", ["a", 0, "b"]), ("l", ["a", 1]), ("l", ["", 1, "b"]), ("l", [])),
        *(("r", ["a", "1", "b"]), ("r", ["a", -1, "b"]), ("r", ["a", 1, "b", "c"]), ("r", False)),
    ],
    ids=repr,
)
def test_fields_of_the_wrong_kind_in_an_entry(key: str, value: Any) -> None:
    fields = fields_of(encode_entry(RUNS))
    assert read_entry(framed(b"E", fields)) == RUNS
    assert read_entry(framed(b"E", {**fields, key: value})) is None


def test_unknown_and_missing_fields_are_refused() -> None:
    """A node that ignored one would undo what the node that wrote it has decided."""
    state, entry = fields_of(encode_state(RUNNING)), fields_of(encode_entry(WAITING))
    for extra in ("z", "", "incarnation"):
        assert read_state(framed(b"S", {**state, extra: None})) is None
        assert read_entry(framed(b"E", {**entry, extra: None})) is None
    for key in state:
        assert read_state(framed(b"S", {k: v for k, v in state.items() if k != key})) is None
    for key in entry:
        assert read_entry(framed(b"E", {k: v for k, v in entry.items() if k != key})) is None
