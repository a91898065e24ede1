"""What SQLite needs from the file system, and where it would silently go wrong.

* Its locks and shared memory only work among processes of one kernel: a file on a network file
  system is refused, because two machines would destroy it without an error.
* A database file that is removed while it is open lives on unseen: who holds it open must notice
  by its identity, and who makes a new one must first remove what the old one left beside it,
  above all the shared memory that others may still use.
* Making a file and its tables is several steps: they are taken under a lock on the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError

# fmt: off
NETWORK_FILESYSTEMS = frozenset((
    "9p", "acfs", "afs", "beegfs", "blobfuse", "blobfuse2", "ceph", "ceph-fuse", "cifs",
    "coda", "curlftpfs", "cvfs", "davfs", "davfs2", "gcsfuse", "gfs2", "glusterfs", "gpfs",
    "gvfsd-fuse", "hdfs", "juicefs", "lustre", "mfs", "mmfs", "moosefs", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "pvfs2", "rclone", "s3fs", "seaweedfs", "smb3", "smbfs",
    "smbnetfs", "sshfs", "virtiofs", "wekafs",
))
# fmt: on
"""Types that several machines can mount at once. ``9p`` and ``virtiofs`` are among them because a
host can hand one folder to several virtual machines, whose kernels do not share memory. Of a
file system in user space (``fuse.sshfs``) this is the part after the dot."""

SIDE_FILE_SUFFIXES = ("-wal", "-shm", "-journal")
LOCK_POLL_SECONDS = 0.005

Identity = tuple[int, int]


def filesystem_type(directory: Path) -> str:
    """The type of the file system that holds the directory, as the kernel names it; "" where it
    cannot be told."""
    best, found = -1, ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                left, _, right = line.partition(" - ")
                mount = _unescaped(left.split(" ")[4])
                # Of two mounts at one place the later one is on top.
                if directory.is_relative_to(mount) and len(mount) >= best:
                    best, found = len(mount), right.split(" ")[0]
    except (OSError, IndexError):
        return ""
    return found


def is_network(filesystem: str) -> bool:
    """Whether several machines can mount a file system of this type at once."""
    return filesystem.removeprefix("fuse.") in NETWORK_FILESYSTEMS


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def check_path(path: Path, filesystem: str, allow_network: bool) -> None:
    """Raise ``RendezvousSettingsError`` where no database can be at this path."""
    directory = path.parent
    if path.is_dir():
        raise RendezvousSettingsError(
            f"{path} is a directory: give the path of a file in it, such as {path / 'rdzv.db'}"
        )
    if path.exists() and not path.is_file():
        raise RendezvousSettingsError(f"{path} is not a regular file: give another path")
    if not directory.is_dir():
        raise RendezvousSettingsError(
            f"{directory} is no directory that can be seen from here: create it, or give another "
            "path"
        )
    if is_network(filesystem) and not allow_network:
        raise RendezvousSettingsError(
            f"{path} is on a network file system ({filesystem}), where SQLite's locks do not hold "
            "between machines and the file would be destroyed. Put it on a local disk if all "
            "nodes run on this machine; else use a backend that is a server. If the file is used "
            "by one machine only, allow_network_filesystem=true lifts this check."
        )
    for place, what in ((directory, "directory"), (path, "file")):
        if place.exists() and not os.access(place, os.W_OK):
            raise RendezvousSettingsError(
                f"the {what} {place} cannot be written by this user: SQLite writes the file and "
                "makes others beside it. Change its permissions, or give another path."
            )


def identity(path: Path) -> Identity | None:
    """What tells this file from another one put in its place; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def directory_lock(directory: Path, deadline: float) -> Iterator[None]:
    """Hold the directory for this process, or raise at ``deadline`` (``time.monotonic()``)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise RendezvousConnectionError(
                        f"{directory} stayed locked by another process that makes a database in "
                        "it: look which process holds it, or raise read_timeout"
                    ) from None
                time.sleep(LOCK_POLL_SECONDS)
            except OSError:
                # No such locks here: SQLite's own remain, and creation may need a second try.
                break
        yield
    finally:
        os.close(descriptor)


def remove_side_files(path: Path) -> None:
    """Remove what a database that is gone has left; the caller holds the directory's lock."""
    for suffix in SIDE_FILE_SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")
