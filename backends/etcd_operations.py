"""What transactions are made of: etcd's messages, and conditions and operations of them.

Of etcd3's family of clients (etcd-sdk-python, the living fork, unless a user brings another) only
the messages are taken, which may be loaded once in a process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

FAMILY_MODULE = "pyetcd"
LABEL_DIGEST_CHARACTERS = 32
REQUEST_BYTES_MAX = 1_000_000
"""What is put into one request: etcd's default limit is 1.5 MiB."""
OPERATIONS_MAX = 100
"""Of one transaction: etcd's default limit is 128."""


class EtcdOperations:
    """Makes the parts of transactions on the keys of one run, whose lease is ``run_lease``."""

    def __init__(self, run_lease: int, messages: Any) -> None:
        self.run_lease, self.messages = run_lease, messages

    def put(self, key: bytes, value: bytes, lease: int | None = None) -> Any:
        """Write a key, which hangs on the run's lease unless another is named."""
        lease = self.run_lease if lease is None else lease
        request = self.messages.PutRequest(key=key, value=value, lease=lease)
        return self.messages.RequestOp(request_put=request)

    def get(self, key: bytes, range_end: bytes | None = None, **more: Any) -> Any:
        """Read a key or a range; ``more`` are fields of etcd's RangeRequest."""
        request = self.messages.RangeRequest(key=key, range_end=range_end or b"", **more)
        return self.messages.RequestOp(request_range=request)

    def first(self, key: bytes, range_end: bytes) -> Any:
        """Read the key of a range that has been there for the longest time."""
        kind = self.messages.RangeRequest
        return self.get(key, range_end, limit=1, sort_order=kind.ASCEND, sort_target=kind.CREATE)

    def delete(self, key: bytes) -> Any:
        """Remove a key."""
        return self.messages.RequestOp(
            request_delete_range=self.messages.DeleteRangeRequest(key=key)
        )

    def is_absent(self, key: bytes) -> Any:
        """The condition that there is no such key."""
        return self.is_at(key, 0)

    def is_at(self, key: bytes, revision: int) -> Any:
        """The condition that a key was changed last at that revision; 0: that it is absent."""
        kind = self.messages.Compare
        return kind(result=kind.EQUAL, target=kind.MOD, key=key, mod_revision=revision)

    def is_there(self, key: bytes) -> Any:
        """The condition that there is such a key."""
        kind = self.messages.Compare
        return kind(result=kind.GREATER, target=kind.CREATE, key=key, create_revision=0)

    def holds(self, key: bytes, value: bytes) -> Any:
        """The condition that a key has that value."""
        kind = self.messages.Compare
        return kind(result=kind.EQUAL, target=kind.VALUE, key=key, value=value)


def messages_of(client: Any) -> Any:
    """The messages of the family's member that a client belongs to; they may be loaded once in a
    process, so those of the client are taken."""
    for kind in type(client).__mro__ if client is not None else ():
        package = kind.__module__.partition(".")[0]
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{package}.etcdrpc")
    return importlib.import_module(f"{FAMILY_MODULE}.etcdrpc")


def range_of(answer: Any, position: int) -> Any:
    """The range that was read at that position of a transaction."""
    return answer.responses[position].response_range


def end_of(prefix: bytes) -> bytes:
    """The key after all that begin with a prefix of ours, which never ends with 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def batches_of(operations: Sequence[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """Parts of a long list that fit into one transaction each."""
    batch: list[Any] = []
    batch_bytes = 0
    for operation, size_bytes in zip(operations, sizes, strict=True):
        if batch and (len(batch) >= OPERATIONS_MAX or batch_bytes + size_bytes > REQUEST_BYTES_MAX):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(operation)
        batch_bytes += size_bytes
    if batch:
        yield batch


def digest(label: str) -> bytes:
    """A text of a constant size in its place."""
    return hashlib.sha256(raw(label)).hexdigest()[:LABEL_DIGEST_CHARACTERS].encode()


def raw(text: str) -> bytes:
    """A text of any characters as etcd keeps it."""
    return text.encode("utf-8", "surrogatepass")


def whole_seconds(seconds: float) -> int:
    """As leases count them: rather longer than shorter."""
    return max(1, math.ceil(seconds))
