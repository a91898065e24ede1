"""torch's FileStore, kept from what makes it hang: a file replaced, half a record at its end.

The file is a log of records: length and bytes of a key, length and bytes of its value. torch writes
each of the four by itself. Of a process that is killed between two of them, or to which the disk
is full, half a record stays behind; and torch reads on at the end of the file for ever, one whole
core each, with the file's lock held, so that nobody can use the file any more. So all who use it
take turns by a lock of their own, beside the file: while one alone writes, what is there has been
written by somebody who is done or dead. A half record is cut off before torch sees it, by which
the write of the dead one was not done at all.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import struct
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from rdzv.backends import c10d_threads

logger = logging.getLogger("rdzv")

READS = frozenset({"get", "multi_get", "check", "num_keys", "list_keys"})
LENGTH = struct.Struct("=I")
BLOCK_BYTES = 1 << 20
MISSING = timedelta(milliseconds=1)
"""So long a key is waited for that is not there: nobody could write it meanwhile."""


class Folder(Protocol):
    """Where the file is."""

    def inode(self) -> int:
        """Which file it is now. Raises ``RendezvousStateError`` where it was removed."""

    def turn(self, *, shared: bool = False) -> AbstractContextManager[object]:
        """Alone among all that use the file; with ``shared``, beside others that only read."""


class GuardedFileStore:
    """torch's FileStore, which would make a file anew that was removed, and go on.

    It opens its path for every call, and once more when it is given up. In a file that has taken
    the place of its own it would read on from the middle of a record, and at the end for ever, with
    the file's lock held, and in the latter case Python's. So its path is that of a descriptor of
    the file that it began with.
    """

    _descriptor = -1
    _store: Any = None

    def __init__(self, folder: Folder, path: Path) -> None:
        self._folder, self._path = folder, path
        self._whole_bytes = 0
        """Up to here the file has been seen to consist of whole records."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        with folder.turn():
            self._mend()
            self._store = dist.FileStore(f"{c10d_threads.OPEN_FILES}/{self._descriptor}", -1)
        self._store.set_timeout(MISSING)

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing is waited for in here, see :data:`MISSING`."""

    def has_extended_api(self) -> bool:
        """Whether it can append."""
        return bool(self._store.has_extended_api())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._folder.inode()  # which says so where it was removed, and its folder with it
        with self._folder.turn(shared=name in READS):
            if self._folder.inode() != os.fstat(self._descriptor).st_ino:
                raise OSError(errno.ESTALE, "the file was replaced by another")
            if self._is_whole():
                return getattr(self._store, name)(*arguments)
        with self._folder.turn():
            self._mend()
            return getattr(self._store, name)(*arguments)

    def _is_whole(self) -> bool:
        # A file system of the network may show an old size to who has not locked the file itself.
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        try:
            size = os.fstat(self._descriptor).st_size
            self._whole_bytes = whole_bytes(self._descriptor, self._whole_bytes, size)
            return size <= self._whole_bytes
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _mend(self) -> None:
        if self._is_whole():
            return
        # Should somebody write without taking turns, it is with this lock, of torch's.
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            size = os.fstat(self._descriptor).st_size
            whole = whole_bytes(self._descriptor, self._whole_bytes, size)
            if size > whole:
                os.ftruncate(self._descriptor, whole)
                logger.warning(
                    "%s: a process was killed, or the disk was full, in the middle of a write; "
                    "the half of it, %d bytes at the end of the file, was removed",
                    self._path,
                    size - whole,
                )
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def __del__(self) -> None:
        # When it is given up it writes to its path once more, which of all things is now a place
        # that keeps nothing: collections of garbage come while the same thread holds a lock.
        if self._store is not None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, self._descriptor, inheritable=False)
            os.close(nowhere)
            self._store = None
        if self._descriptor >= 0:
            os.close(self._descriptor)


def whole_bytes(descriptor: int, begin: int, size: int) -> int:
    """Where the last whole record ends, of a file of this size. A record begins at ``begin``."""
    block, block_begin, end = b"", begin, begin
    while True:
        position = end
        for _ in range(2):  # key and value
            if position + LENGTH.size > size:
                return end
            if position + LENGTH.size > block_begin + len(block):
                block, block_begin = os.pread(descriptor, BLOCK_BYTES, position), position
                if len(block) < LENGTH.size:
                    return end
            (length,) = LENGTH.unpack_from(block, position - block_begin)
            position += LENGTH.size + length
        if position > size:
            return end
        end = position
