"""Bytes to records and back.

Format: ``b"rdzv"``, one byte for the kind (``S`` a state, ``E`` a roster entry), one for the
version (``1``), one for the packing (``j`` plain JSON, ``z`` zlib), then the packed JSON object
with short keys. Rules:

* Never pickle: whoever can write the row must not be able to run code on a node.
* What does not decode raises ``RendezvousStateError`` and is never overwritten by the caller: it
  may be of a newer version, or somebody else's.
* A record is checked when it is written and when it is read; unknown keys of this version are an
  error, for a node that ignored one would undo a decision of the node that wrote it.
* Sizes are limited both ways, before and after unpacking.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from rdzv.errors import RendezvousStateError
from rdzv.state import (
    Closing,
    Node,
    Proposal,
    RecordError,
    RosterEntry,
    RoundId,
    State,
)

STATE_BYTES_MAX = 1_000_000
"""Of an encoded state: etcd refuses requests over 1.5 MB."""
ENTRY_BYTES_MAX = 16_384
UNPACKED_FACTOR_MAX = 8
"""How many times over its own limit a record's JSON may be."""
DECODED_STATES_KEPT_MAX = 4
PACK_FROM_BYTES = 512
"""Below this, compression does not pay for its time."""

RecordT = TypeVar("RecordT", State, RosterEntry)

_MAGIC = b"rdzv"
_VERSION = b"1"


def encode_state(state: State) -> bytes:
    """The document's bytes. Raises ``RendezvousStateError`` for one that cannot exist or is over
    ``STATE_BYTES_MAX``."""
    proposal = state.proposal
    fields: dict[str, Any] = {
        "i": state.incarnation,
        "r": state.round,
        "n": state.nonce,
        "p": _nodes_out(state.participants),
        "f": [proposal.nonce, _nodes_out(proposal.participants)] if proposal else None,
        "c": state.coordinator,
        "w": state.waiting,
        "l": list(state.lost),
        "a": round(state.notice_age_seconds, 4),
        "x": [state.closed.reason, state.closed.ended_well] if state.closed else None,
        "b": state.refill,
        "o": list(state.replaces),
    }
    if state.port:
        fields["d"] = state.port
    return _encode(b"S", state.check, fields, STATE_BYTES_MAX)


def decode_state(data: bytes) -> State:
    """The document in ``data``. Raises ``RendezvousStateError`` for anything else.

    Nodes of one process that read the same bytes share what is in them, which nobody can change.
    """
    if not isinstance(data, bytes):
        return _decode(b"S", data, STATE_BYTES_MAX, _state_in)
    return _decoded_state(data)


@lru_cache(maxsize=DECODED_STATES_KEPT_MAX)
def _decoded_state(data: bytes) -> State:
    return _decode(b"S", data, STATE_BYTES_MAX, _state_in)


def encode_entry(entry: RosterEntry) -> bytes:
    """The entry's bytes. Raises ``RendezvousStateError`` for one that cannot exist."""
    fields: dict[str, Any] = {
        "n": [entry.node.id, entry.node.address],
        "h": entry.rank_hint,
        "t": entry.topology,
        "l": _round_out(entry.left),
        "r": _round_out(entry.running),
        "s": entry.settled,
        "f": entry.finished,
    }
    if entry.port:
        fields["d"] = entry.port
    return _encode(b"E", entry.check, fields, ENTRY_BYTES_MAX)


def decode_entry(data: bytes) -> RosterEntry:
    """The entry in ``data``. Raises ``RendezvousStateError`` for anything else."""
    return _decode(b"E", data, ENTRY_BYTES_MAX, _entry_in)


def _encode(kind: bytes, check: Callable[[], None], fields: dict[str, Any], limit: int) -> bytes:
    try:
        check()
    except RecordError as error:
        raise RendezvousStateError(f"This record cannot be written: it has {error}.") from error
    body = json.dumps(fields, separators=(",", ":")).encode()
    unpacked_bytes = len(body)
    packing = b"j"
    if len(body) >= PACK_FROM_BYTES:
        packing, body = b"z", zlib.compress(body, 6)
    data = _MAGIC + kind + _VERSION + packing + body
    if len(data) > limit or unpacked_bytes > limit * UNPACKED_FACTOR_MAX:
        raise RendezvousStateError(
            f"A record of {len(data)} bytes, {unpacked_bytes} unpacked, is over the limit of "
            f"{limit}, {limit * UNPACKED_FACTOR_MAX} unpacked. Use shorter labels and addresses or "
            "fewer nodes."
        )
    return data


def _decode(
    kind: bytes, data: bytes, limit: int, read: Callable[[dict[str, Any]], RecordT]
) -> RecordT:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise RendezvousStateError(f"Expected bytes, but the backend gave {type(data).__name__}.")
    data = bytes(data)
    header, body = data[:7], data[7:]
    if len(data) > limit or header[:5] != _MAGIC + kind or len(header) < 7:
        raise RendezvousStateError(
            f"{len(data)} bytes beginning with {data[:12]!r} were not written by rdzv. They are "
            "left as they are: use another run id, or delete them if nothing else needs them."
        )
    if header[5:6] != _VERSION:
        raise RendezvousStateError(
            f"This record has format {header[5:6]!r} and this version of rdzv reads format "
            f"{_VERSION!r} only. Run the same version of rdzv on all nodes of a job."
        )
    try:
        return read(json.loads(_unpack(header[6:7], body, limit * UNPACKED_FACTOR_MAX)))
    except RecordError as error:
        raise RendezvousStateError(f"A damaged record: it has {error}.") from error
    except (ValueError, OverflowError, zlib.error, RecursionError) as error:
        raise RendezvousStateError(
            f"A damaged record of {len(data)} bytes ({type(error).__name__}: {error}). It is left "
            "as it is: use another run id, or delete it once no node of the run is alive."
        ) from error


def _unpack(packing: bytes, body: bytes, limit: int) -> bytes:
    if packing == b"j":
        return body
    if packing != b"z":
        raise RecordError(f"unknown packing {packing!r}")
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(body, limit)
    if not unpacker.eof or unpacker.unused_data:
        raise RecordError("a wrong length")
    return unpacked


def _state_in(fields: dict[str, Any]) -> State:
    _expect_keys(fields, "irnpfcwlaxbo", optional="d")
    state = State(
        incarnation=_text(fields["i"]),
        round=_whole(fields["r"]),
        nonce=_text(fields["n"]),
        participants=_nodes_in(fields["p"]),
        proposal=_proposal_in(fields["f"]),
        coordinator=_text(fields["c"]),
        waiting=_whole(fields["w"]),
        lost=tuple(_text(lost) for lost in _list(fields["l"])),
        notice_age_seconds=_number(fields["a"]),
        closed=_closing_in(fields["x"]),
        refill=_text(fields["b"]),
        replaces=tuple(_text(old) for old in _list(fields["o"])),
        port=_whole(fields.get("d", 0)),
    )
    state.check()
    return state


def _entry_in(fields: dict[str, Any]) -> RosterEntry:
    _expect_keys(fields, "nhtlrsf", optional="d")
    hint = fields["h"]
    entry = RosterEntry(
        node=_node_in(fields["n"]),
        rank_hint=None if hint is None else _whole(hint),
        topology=_text(fields["t"]),
        left=_round_in(fields["l"]),
        running=_round_in(fields["r"]),
        settled=_truth(fields["s"]),
        finished=_truth(fields["f"]),
        port=_whole(fields.get("d", 0)),
    )
    entry.check()
    return entry


def _proposal_in(row: Any) -> Proposal | None:
    if row is None:
        return None
    nonce, participants = _list(row)
    return Proposal(_text(nonce), _nodes_in(participants))


def _closing_in(row: Any) -> Closing | None:
    if row is None:
        return None
    reason, ended_well = _list(row)
    return Closing(_text(reason), _truth(ended_well))


def _nodes_out(nodes: tuple[Node, ...]) -> list[list[str]]:
    return [[node.id, node.address] for node in nodes]


def _nodes_in(rows: Any) -> tuple[Node, ...]:
    # In bulk: every node reads thousands of them in each document.
    pairs = _list(rows)
    for kind in set(map(type, pairs)) - {list}:
        raise RecordError(f"{kind.__name__} where a list belongs")
    for kind in {type(part) for pair in pairs for part in pair} - {str}:
        raise RecordError(f"{kind.__name__} where a text belongs")
    return tuple([Node(node_id, address) for node_id, address in pairs])


def _node_in(row: Any) -> Node:
    node_id, address = _list(row)
    return Node(_text(node_id), _text(address))


def _round_out(round_id: RoundId | None) -> list[Any] | None:
    return None if round_id is None else [round_id.incarnation, round_id.round, round_id.nonce]


def _round_in(row: Any) -> RoundId | None:
    if row is None:
        return None
    incarnation, number, nonce = _list(row)
    return RoundId(_text(incarnation), _whole(number), _text(nonce))


def _expect_keys(fields: Any, keys: str, *, optional: str) -> None:
    if not isinstance(fields, dict) or set(fields) - set(optional) != set(keys):
        raise RecordError("other fields than this version writes")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{type(value).__name__} where a text belongs")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RecordError(f"{type(value).__name__} where a whole number belongs")
    return value


def _number(value: Any) -> float:
    return value if isinstance(value, float) else float(_whole(value))


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise RecordError(f"{type(value).__name__} where true or false belongs")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RecordError(f"{type(value).__name__} where a list belongs")
    return value
