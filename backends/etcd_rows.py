"""Roster entries as etcd holds them: the length of the round's label, the label, the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rdzv.backends.etcd_age import foreign
from rdzv.backends.etcd_client import EtcdConnections
from rdzv.backends.etcd_operations import raw
from rdzv.ports import Entry


@dataclass(frozen=True, slots=True)
class Row:
    """An entry as it is stored."""

    entry: Entry
    revision: int
    lease: int


def value_of(entry: Entry) -> bytes:
    """What is stored under the node's key."""
    label = raw(entry.round_label)
    return str(len(label)).encode() + b":" + label + entry.data


def entry_of(connections: EtcdConnections, node_id: str, value: bytes) -> Entry:
    """What :func:`value_of` was made of. Raises ``RendezvousStateError`` for anything else."""
    size, colon, rest = value.partition(b":")
    if not colon or not size.isdigit() or len(size) > 9 or int(size) > len(rest):
        raise foreign(connections, "an entry")
    return Entry(node_id, rest[int(size) :], text_of(connections, rest[: int(size)]))


def row_of(connections: EtcdConnections, node_id: str, found: Any) -> Row | None:
    """What was found under the node's key. Raises ``RendezvousStateError``."""
    if not found.kvs:
        return None
    kv = found.kvs[0]
    return Row(entry_of(connections, node_id, kv.value), kv.mod_revision, kv.lease)


def text_of(connections: EtcdConnections, stored: bytes) -> str:
    """The text that ``raw()`` has made bytes of. Raises ``RendezvousStateError``."""
    try:
        return stored.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise foreign(connections, "a name") from None


def revision_of(kv: Any) -> str:
    """The roster's revision, of the key that is written with every change of it."""
    return f"{kv.mod_revision}:{kv.value.hex()}"
