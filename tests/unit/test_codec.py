"""Records to bytes and back: see rdzv.codec. What is no record is in test_codec_damage.

The files in ``golden/`` were written by version 1 of the format and are never written again: a
release that cannot read one of them breaks the jobs that are running when it is installed.
"""

from __future__ import annotations

import json
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rdzv.codec import (
    ENTRY_BYTES_MAX,
    PACK_FROM_BYTES,
    STATE_BYTES_MAX,
    UNPACKED_FACTOR_MAX,
    decode_entry,
    decode_state,
    encode_entry,
    encode_state,
)
from rdzv.errors import RendezvousStateError
from rdzv.state import (
    NODES_MAX,
    REPLACED_INCARNATIONS_MAX,
    TEXT_CHARACTERS_MAX,
    Closing,
    Node,
    Proposal,
    RosterEntry,
    RoundId,
    State,
)

from .codec_records import (
    GOLDEN_ENTRIES,
    GOLDEN_FOLDER,
    GOLDEN_STATES,
    HEADER_BYTES,
    LARGE,
    NODES,
    RUNNING,
    WAITING,
    fields_of,
    framed,
    read_entry,
    read_state,
)

# Golden files


@pytest.mark.parametrize("name", GOLDEN_STATES)
def test_golden_states(name: str) -> None:
    golden = (GOLDEN_FOLDER / f"{name}.bin").read_bytes()
    assert decode_state(golden) == GOLDEN_STATES[name]
    assert decode_state(encode_state(GOLDEN_STATES[name])) == GOLDEN_STATES[name]


@pytest.mark.parametrize("name", GOLDEN_ENTRIES)
def test_golden_entries(name: str) -> None:
    golden = (GOLDEN_FOLDER / f"{name}.bin").read_bytes()
    assert decode_entry(golden) == GOLDEN_ENTRIES[name]
    assert decode_entry(encode_entry(GOLDEN_ENTRIES[name])) == GOLDEN_ENTRIES[name]


def test_every_golden_file_is_read() -> None:
    on_disk = {path.stem for path in GOLDEN_FOLDER.iterdir()}
    assert on_disk == set(GOLDEN_STATES) | set(GOLDEN_ENTRIES)


def test_golden_files_show_both_packings() -> None:
    packings = {path.read_bytes()[6:7] for path in GOLDEN_FOLDER.iterdir()}
    assert packings == {b"j", b"z"}


# Round trips

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz0123456789.-:",
    "\0\n\t \"'\\/{}[],:",
    "äß☃日本語\u202e\u0301\ufeff",
    "😀🧪\U0010ffff",
)


def _random_text(chance: random.Random, characters_min: int = 0) -> str:
    alphabet = chance.choice(ALPHABETS)
    longest = TEXT_CHARACTERS_MAX if chance.random() < 0.02 else 24
    length = chance.randint(characters_min, longest)
    return "".join(chance.choice(alphabet) for _ in range(length))


def _random_nodes(chance: random.Random, count: int) -> tuple[Node, ...]:
    ids = {_random_text(chance, 1) for _ in range(count)}
    return tuple(Node(node_id, _random_text(chance, 1)) for node_id in sorted(ids))


def _random_state(chance: random.Random) -> State:
    nodes = _random_nodes(chance, chance.choice([0, 1, 2, 5, 40]))
    incarnation = _random_text(chance, 1)
    replaces = {_random_text(chance) for _ in range(chance.randint(0, REPLACED_INCARNATIONS_MAX))}
    closed = proposal = None
    if chance.random() < 0.3:
        closed = Closing(_random_text(chance), chance.random() < 0.5)
    elif chance.random() < 0.5:
        proposal = Proposal(_random_text(chance, 1), _random_nodes(chance, chance.randint(1, 9)))
    return State(
        incarnation=incarnation,
        round=chance.choice([1, 7, 2**40]) if nodes else 0,
        nonce=_random_text(chance, 1) if nodes else "",
        participants=nodes,
        proposal=proposal,
        coordinator=_random_text(chance),
        waiting=chance.choice([0, 1, NODES_MAX]),
        lost=tuple(sorted(node.id for node in nodes if chance.random() < 0.3)),
        notice_age_seconds=chance.choice([0.0, 0.1, 1234.5678, 1e9]),
        closed=closed,
        refill=_random_text(chance),
        replaces=tuple(replaces - {incarnation}),
    )


def _random_round(chance: random.Random) -> RoundId | None:
    if chance.random() < 0.4:
        return None
    return RoundId(_random_text(chance, 1), chance.choice([1, 9, 2**40]), _random_text(chance, 1))


def _random_entry(chance: random.Random) -> RosterEntry:
    return RosterEntry(
        node=Node(_random_text(chance, 1), _random_text(chance, 1)),
        rank_hint=chance.choice([None, 0, 3, NODES_MAX - 1]),
        topology=_random_text(chance),
        left=_random_round(chance),
        running=_random_round(chance),
        finished=chance.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(10))
def test_random_records_survive_the_round_trip(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        state = _random_state(chance)
        assert decode_state(encode_state(state)) == state
        entry = _random_entry(chance)
        assert decode_entry(encode_entry(entry)) == entry


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_whatever_kind_of_bytes_a_driver_gives(kind: Callable[[bytes], Any]) -> None:
    assert decode_state(kind(encode_state(RUNNING))) == RUNNING
    assert decode_entry(kind(encode_entry(WAITING))) == WAITING


@pytest.mark.parametrize(
    "text", ["a\0b", "😀", "日本", "\u202eevil", "fe80::1%eth0", "\ufeff", '"\\']
)
def test_unusual_addresses(text: str) -> None:
    entry = RosterEntry(Node(text, text), topology=text)
    assert decode_entry(encode_entry(entry)) == entry


@pytest.mark.parametrize("text", ["\ud800", "\ud83d\ude00", "a\udfffb"])
def test_halves_of_characters_are_refused(text: str) -> None:
    """Two halves side by side would be read back as another text than was written."""
    with pytest.raises(RendezvousStateError, match="no valid Unicode"):
        encode_entry(RosterEntry(Node("n", text)))
    fields = fields_of(encode_entry(WAITING))
    written = json.dumps({**fields, "n": ["n", "PLACE"]}).replace("PLACE", "\\ud800")
    with pytest.raises(RendezvousStateError, match="no valid Unicode"):
        decode_entry(b"rdzvE1j" + written.encode())


def test_ages_keep_a_tenth_of_a_millisecond() -> None:
    state = replace(RUNNING, notice_age_seconds=1.23456789)
    assert decode_state(encode_state(state)).notice_age_seconds == 1.2346


# Sizes


def test_packing_begins_where_it_pays() -> None:
    small, large = encode_state(RUNNING), encode_state(LARGE)
    assert small[:HEADER_BYTES] == b"rdzvS1j"
    assert large[:HEADER_BYTES] == b"rdzvS1z"
    assert len(small) < PACK_FROM_BYTES < len(json.dumps(fields_of(large)))
    assert len(large) < len(json.dumps(fields_of(large))) / 2


def test_the_largest_round_fits_well_under_a_megabyte() -> None:
    chance = random.Random(7)
    nodes = tuple(
        Node(
            f"ip-10-{number // 256}-{number % 256}-17.eu-central-1.compute.internal"
            f"-{chance.randrange(4_000_000)}-{chance.getrandbits(64):016x}",
            f"ip-10-{number // 256}-{number % 256}-17.eu-central-1.compute.internal",
        )
        for number in range(NODES_MAX)
    )
    state = State("5f2c0a7b", 9, "91ab77de", nodes, coordinator=nodes[5].id)
    frozen = replace(
        state,
        proposal=Proposal("c0de", tuple(chance.sample(nodes, NODES_MAX))),
        lost=tuple(sorted(node.id for node in nodes)),
    )
    assert decode_state(encode_state(frozen)) == frozen
    assert len(encode_state(state)) < 150_000
    assert len(encode_state(frozen)) < 400_000


def _nodes_of_bytes(count: int, address: str) -> tuple[Node, ...]:
    return tuple(Node(f"n{number}", address) for number in range(count))


def test_a_state_that_could_not_be_read_again_is_not_written() -> None:
    """It packs to a few kilobytes, and unpacks to more than a reader accepts."""
    nodes = _nodes_of_bytes(NODES_MAX, "a" * 1000)
    state = State("i", 1, "n", nodes, Proposal("m", nodes))
    with pytest.raises(RendezvousStateError, match=r"over the limit.*fewer nodes"):
        encode_state(state)


def test_a_state_of_exactly_the_unpacked_limit_is_read() -> None:
    limit = STATE_BYTES_MAX * UNPACKED_FACTOR_MAX
    nodes = _nodes_of_bytes(NODES_MAX, "a" * 940)
    state = State("i", 1, "n", nodes, Proposal("m", nodes))
    missing = limit - len(json.dumps(fields_of(encode_state(state)), separators=(",", ":")))
    each, rest = divmod(missing, NODES_MAX)
    grown = tuple(
        replace(node, address=node.address + "b" * (each + (number < rest)))
        for number, node in enumerate(nodes)
    )
    full = State("i", 1, "n", grown, Proposal("m", nodes))
    assert decode_state(encode_state(full)) == full
    with pytest.raises(RendezvousStateError, match="over the limit"):
        encode_state(replace(full, coordinator="c"))


def test_limits_of_encoded_records() -> None:
    chance = random.Random(3)
    noises = [
        "".join(chr(chance.randrange(0x4E00, 0x9FFF)) for _ in range(TEXT_CHARACTERS_MAX))
        for _ in range(7)
    ]
    entry = RosterEntry(Node(noises[0], noises[1]), topology=noises[2])
    assert decode_entry(encode_entry(entry)) == entry
    left, running = RoundId(noises[3], 1, noises[4]), RoundId(noises[5], 1, noises[6])
    with pytest.raises(RendezvousStateError, match=f"limit of {ENTRY_BYTES_MAX}"):
        encode_entry(replace(entry, left=left, running=running))
    crowd = tuple(
        Node(f"n{number}", f"{chance.getrandbits(2400):0600x}") for number in range(NODES_MAX)
    )
    with pytest.raises(RendezvousStateError, match=f"limit of {STATE_BYTES_MAX}"):
        encode_state(State("i", 1, "n", crowd))


def test_oversized_bytes_are_refused_before_they_are_unpacked() -> None:
    padded = encode_state(RUNNING) + b" " * STATE_BYTES_MAX
    assert read_state(padded) is None
    assert read_state(padded[: STATE_BYTES_MAX + 1]) is None
    assert read_state(padded[:STATE_BYTES_MAX]) == RUNNING
    entry = encode_entry(WAITING) + b" " * ENTRY_BYTES_MAX
    assert read_entry(entry[: ENTRY_BYTES_MAX + 1]) is None
    assert read_entry(entry[:ENTRY_BYTES_MAX]) == WAITING


@pytest.mark.parametrize(
    ("kind", "limit", "read"),
    [(b"S", STATE_BYTES_MAX, read_state), (b"E", ENTRY_BYTES_MAX, read_entry)],
)
def test_a_zip_bomb_costs_little(
    kind: bytes, limit: int, read: Callable[[bytes], State | RosterEntry | None]
) -> None:
    pump = zlib.compressobj(9)
    zeros = b"0" * 1_000_000
    begin = pump.compress(zeros) + pump.flush(zlib.Z_FULL_FLUSH)
    again = pump.compress(zeros) + pump.flush(zlib.Z_FULL_FLUSH)  # stands by itself: repeatable
    bomb = (b"rdzv" + kind + b"1z" + begin + again * (limit // len(again)))[:limit]
    assert len(zlib.decompressobj().decompress(bomb[HEADER_BYTES:4000])) > 1_000_000
    began_at_seconds = time.process_time()
    tracemalloc.start()
    try:
        assert read(bomb) is None
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * limit * UNPACKED_FACTOR_MAX
    assert time.process_time() - began_at_seconds < 5


def test_lost_nodes_are_in_order() -> None:
    ids = [node.id for node in NODES]
    assert decode_state(encode_state(replace(RUNNING, lost=tuple(ids)))).lost == tuple(ids)
    with pytest.raises(RendezvousStateError, match="lost nodes out of order"):
        encode_state(replace(RUNNING, lost=tuple(ids[::-1])))
    fields = fields_of(encode_state(RUNNING))
    for wrong in (ids[::-1], [ids[0], ids[0]]):
        with pytest.raises(RendezvousStateError, match="lost nodes out of order"):
            decode_state(framed(b"S", {**fields, "l": wrong}))


def test_records_that_cannot_exist_are_not_written() -> None:
    long = "x" * (TEXT_CHARACTERS_MAX + 1)
    for state in (State(""), replace(RUNNING, coordinator=long), replace(RUNNING, waiting=-1)):
        with pytest.raises(RendezvousStateError, match="cannot be written"):
            encode_state(state)
    crowd = _nodes_of_bytes(NODES_MAX + 1, "a")
    with pytest.raises(RendezvousStateError, match=f"more than {NODES_MAX}"):
        encode_state(State("i", 1, "n", crowd))
    for entry in (RosterEntry(Node("", "a")), replace(WAITING, topology=long)):
        with pytest.raises(RendezvousStateError, match="cannot be written"):
            encode_entry(entry)
    assert decode_entry(encode_entry(replace(WAITING, topology=long[1:]))).topology == long[1:]


def test_the_message_says_what_to_do_and_shows_little() -> None:
    with pytest.raises(RendezvousStateError, match="use another run id") as caught:
        decode_state(b"somebody's document, with a secret far behind its beginning")
    assert "secret" not in str(caught.value)
    with pytest.raises(RendezvousStateError, match="use another run id"):
        decode_state(encode_state(RUNNING)[:-1])
