"""Records for the tests of rdzv.codec, and how those look at what it made of them."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from rdzv.codec import decode_entry, decode_state
from rdzv.errors import RendezvousStateError
from rdzv.state import Closing, Node, Proposal, RosterEntry, RoundId, State

GOLDEN_FOLDER = Path(__file__).resolve().parent / "golden"
HEADER_BYTES = 7

NODES = tuple(
    Node(f"node{number}-{4000 + number}-00{number:02x}", f"10.0.0.{number}") for number in range(3)
)
RUNNING = State("5f2c", 3, "91ab", NODES, coordinator=NODES[0].id, waiting=1, refill="77")
FROZEN = replace(
    RUNNING, proposal=Proposal("c0de", (NODES[1], NODES[2])), lost=(NODES[0].id,), waiting=0
)
CLOSED = replace(
    RUNNING, closed=Closing("all done", ended_well=True), replaces=("0001", "0002"), waiting=0
)
LARGE = State(
    "5f2c",
    12,
    "91ab",
    tuple(Node(f"gpu-{n}-{n}-{n:08x}", f"gpu-{n}.cluster.example") for n in range(64)),
    lost=("gpu-1-1-00000001", "gpu-2-2-00000002"),
    notice_age_seconds=2.5,
)
WAITING = RosterEntry(Node("höst-1-☃", "fe80::1%eth0"), rank_hint=7, topology="rack 1")
RUNS = RosterEntry(NODES[0], left=RoundId("5f2c", 2, "0a"), running=RoundId("5f2c", 3, "91ab"))
GOLDEN_STATES = {
    "state_new": State("5f2c"),
    "state_running": RUNNING,
    "state_frozen": FROZEN,
    "state_closed": CLOSED,
    "state_large": LARGE,
    "state_served": replace(RUNNING, port=29500),
}
GOLDEN_ENTRIES = {
    "entry_waiting": WAITING,
    "entry_running": RUNS,
    "entry_finished": replace(RUNS, left=None, finished=True),
    "entry_serves": replace(RUNS, port=29500),
}


def fields_of(data: bytes) -> dict[str, Any]:
    body = data[HEADER_BYTES:]
    fields: dict[str, Any] = json.loads(zlib.decompress(body) if data[6:7] == b"z" else body)
    return fields


def framed(kind: bytes, value: Any) -> bytes:
    return b"rdzv" + kind + b"1j" + json.dumps(value).encode()


def packed(kind: bytes, body: bytes) -> bytes:
    return b"rdzv" + kind + b"1z" + zlib.compress(body, 9)


def read_state(data: Any) -> State | None:
    """The record, checked; None when it was refused as it should be."""
    try:
        state = decode_state(data)
    except RendezvousStateError:
        return None
    state.check()
    return state


def read_entry(data: Any) -> RosterEntry | None:
    try:
        entry = decode_entry(data)
    except RendezvousStateError:
        return None
    entry.check()
    return entry
