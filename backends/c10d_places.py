"""Where a C10d store is: a TCPStore that one of the nodes hosts, or a file that all nodes share.

Which node hosts is found by trying: whoever can listen on the endpoint's port, because the address
is its own, does; all others connect. Of several agents on one machine the operating system chooses
one. A host that is gone is replaced in the same way, by any agent on its machine that notices.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import random
import resource
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from rdzv.address import is_own, join_host_port, resolve
from rdzv.backends import c10d_threads
from rdzv.backends.c10d_file import GuardedFileStore
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousSettingsError,
    RendezvousStateError,
    mask_secrets,
)

logger = logging.getLogger("rdzv")

BACKLOG = 4096
OPEN_FILES_WANTED = 65_536
"""A host holds two connections for each node: the usual limit of 1,024 is too few for 500."""
RETRY_SECONDS_FIRST = 0.05
RETRY_SECONDS_LAST = 0.5
ATTEMPT_SECONDS = 1.5
"""So long torch may try to connect. Between its own tries it sleeps, at last for seconds, and
cannot be told that nobody waits; long enough for a lost packet to be sent again."""
WRONG_ANSWER = "Ping failed, invalid value"
"""What torch's client says of somebody who does not answer as a TCPStore does."""
FILE_STORE_BEGINS = [struct.pack("=I", len(key)) + key for key in (b"refcount/", b"cleanup/")]
"""What torch writes first into the file of a FileStore: when one is opened, or closed."""
LINGER_POLL_SECONDS = 0.05


class TcpPlace:
    """A TCPStore at ``host:port``. ``is_host``: whether this node hosts it; None tries."""

    pushes = True

    def __init__(self, host: str, port: int, is_host: bool | None) -> None:
        self.host, self.port = host, port
        self.endpoint = join_host_port(host, port)
        self._is_host = is_host
        self._lock = threading.Lock()
        self._server: Any = None
        self._leaving = False
        self._peer_address = ""
        """Where somebody listened a moment ago."""

    @property
    def hosts(self) -> bool:
        """Whether this process serves the store."""
        return self._server is not None

    def open(self, seconds: float) -> None:
        """Serve the store, if that falls to this node. Name resolution is tried again until the
        time is over.

        Raises ``RendezvousSettingsError`` where it was told to and cannot,
        ``RendezvousConnectionError`` where the host has no address.
        """
        if self._is_host is False:
            return
        deadline = time.monotonic() + seconds
        while not (addresses := self._addresses()):
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(
                    f"The host of --rdzv-endpoint={self.endpoint} has no address: look at its "
                    "spelling and at this machine's name resolution."
                )
            time.sleep(min(RETRY_SECONDS_LAST, max(0.0, deadline - time.monotonic())))
        if self._is_host or any(map(is_own, addresses)):
            self._serve(addresses)

    def connect(self, seconds: float) -> Any:
        """Another connection. Raises ``OSError`` or torch's own where there is none in time."""
        deadline = time.monotonic() + seconds
        pause = RETRY_SECONDS_FIRST
        while True:
            try:
                return self._attempt(max(0.01, deadline - time.monotonic()))
            except (OSError, RuntimeError) as error:
                if WRONG_ANSWER in str(error):
                    raise c10d_threads.WrongServiceError(
                        "something else than a TCPStore answers there: look at the port"
                    ) from error
                if getattr(error, "errno", 0) == errno.ECONNREFUSED:
                    if self._leaving:
                        raise
                    if self._is_host is None:
                        self._take_over()
                self._peer_address = ""
                c10d_threads.refuse_to_end()
                if time.monotonic() + pause >= deadline:
                    raise
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, RETRY_SECONDS_LAST)

    def _attempt(self, seconds: float) -> Any:
        peer = self._peer_address = self._peer_address or self._peer(seconds)
        # By its address: torch resolves names again, and logs what it cannot reach at once.
        return c10d_threads.connected(
            (peer, self.port),
            lambda: dist.TCPStore(
                peer,
                self.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=min(seconds, ATTEMPT_SECONDS)),
            ),
            seconds,
        )

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """In the block, a host that is gone is not waited for, and nobody takes its place."""
        self._leaving = True
        try:
            yield
        finally:
            self._leaving = False

    def doubt(self) -> None:
        """Somebody's connection has failed: look first whether anybody listens."""
        self._peer_address = ""

    def close(self) -> None:
        """Serve no longer."""
        with self._lock:
            self._server = None

    def stamp_ms(self, store: Any) -> int | None:
        """A TCPStore has no clock."""
        return None

    def exclusive(self) -> contextlib.AbstractContextManager[object]:
        """For what takes several steps: each of a TCPStore's is atomic by itself."""
        return contextlib.nullcontext()

    def _addresses(self) -> tuple[str, ...]:
        try:
            return resolve(self.host)
        except OSError:
            return ()

    def _peer(self, seconds: float) -> str:
        """The address at which somebody listens."""
        try:
            with socket.create_connection((self.host, self.port), timeout=seconds) as probe:
                return str(probe.getpeername()[0])
        except UnicodeError as error:
            raise OSError(errno.EINVAL, "not a host name") from error

    def _take_over(self) -> None:
        addresses = self._addresses()
        if any(map(is_own, addresses)):
            with contextlib.suppress(RendezvousSettingsError):
                self._serve(addresses)

    def _serve(self, addresses: tuple[str, ...]) -> None:
        with self._lock:
            if self._server is not None:
                return
            try:
                listening = _listen(self.port, addresses)
            except OSError as error:
                if error.errno == errno.EADDRINUSE and not self._is_host:
                    return
                raise RendezvousSettingsError(
                    f"This node cannot listen on port {self.port} of --rdzv-endpoint="
                    f"{self.endpoint} ({error.strerror}). Give another port, or is_host=false in "
                    "--rdzv-conf if another process serves the store there."
                ) from error
            _allow_many_files()
            self.port = listening.getsockname()[1]
            self.endpoint = join_host_port(self.host, self.port)
            # Torch connects to it: where the host has several addresses, to one of our own.
            self._server = dist.TCPStore(
                next(filter(is_own, addresses), "127.0.0.1"),
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        logger.info("this node hosts the store at %s", self.endpoint)


def _listen(port: int, addresses: tuple[str, ...]) -> socket.socket:
    """At all addresses of this machine. At those of IPv4 alone where that is all that is asked
    for: torch's server looks up the name of everybody who connects, and while the names of
    addresses like ``::ffff:10.0.0.1`` are looked for, in vain, it serves nobody."""
    if any(":" in address for address in addresses) and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    return socket.create_server(("", port), backlog=BACKLOG)


def _allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(OPEN_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class FilePlace:
    """A FileStore. A file that nobody has written to for ``lifetime_seconds``, by the clock of its
    file system, is what a crashed run has left: it is removed, and a new one begun."""

    pushes = False

    def __init__(self, path: str, lifetime_seconds: float) -> None:
        self.endpoint = mask_secrets(path)
        self._path = Path(path)
        self._lifetime_seconds = lifetime_seconds
        self._was_here = False
        self._mine = threading.local()

    def open(self, seconds: float) -> None:
        """Make the file. Raises ``RendezvousSettingsError`` where that cannot be,
        ``RendezvousConnectionError`` where others keep its lock for longer than the time."""
        try:
            with self._lock_file() as lock:
                self._lock_within(lock, seconds)
                if self._path.exists():
                    self._refuse_foreign()
                    self._remove_stale()
                self._path.touch()
        except OSError as error:
            raise RendezvousSettingsError(
                f"--rdzv-endpoint={self.endpoint}: {error.strerror or error}. Give the path of a "
                "file in a folder that exists and that all nodes share and may write to."
            ) from error
        self._was_here = True

    def connect(self, seconds: float) -> Any:
        """Another view of the file. Raises ``RendezvousStateError`` where it was removed."""
        if self._was_here:
            self.inode()
        return GuardedFileStore(self, self._path)

    def doubt(self) -> None:
        """A file is looked for every time."""

    def leaving(self) -> contextlib.AbstractContextManager[object]:
        """A file is not waited for."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Nothing is held open."""

    def exclusive(self) -> contextlib.AbstractContextManager[object]:
        """For what takes several steps: alone among all that use this file."""
        return self.turn()

    @contextlib.contextmanager
    def turn(self, *, shared: bool = False) -> Iterator[None]:
        """Alone among all that use this file; with ``shared``, beside others that only read. Whose
        turn it is may take another."""
        if getattr(self._mine, "is_my_turn", False):
            yield
            return
        with self._lock_file() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            self._mine.is_my_turn = True
            try:
                yield
            finally:
                self._mine.is_my_turn = False

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[TextIO]:
        with self._path.with_name(self._path.name + ".lock").open("a+") as lock:
            try:
                yield lock
            finally:
                # A child that was forked meanwhile has it open too: to close it would not do.
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _lock_within(self, lock: TextIO, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise RendezvousConnectionError(
                        f"Another process has kept the lock {self.endpoint}.lock for {seconds:g} s:"
                        " look which one hangs (`lsof`), and end it."
                    ) from error
            time.sleep(RETRY_SECONDS_FIRST)

    def stamp_ms(self, store: Any) -> int | None:
        """Now, by the clock of the file system."""
        os.utime(self._path)
        return self._path.stat().st_mtime_ns // 1_000_000

    def inode(self) -> int:
        """Which file it is now."""
        try:
            return self._path.stat().st_ino
        except FileNotFoundError:
            raise RendezvousStateError(
                f"The file {self._path} was removed while a run used it. Stop the run's agents "
                "and start them again, and remove it only when none of them is left."
            ) from None

    def _refuse_foreign(self) -> None:
        """Nobody's file is to be removed, or written to, because an endpoint was mistyped."""
        with self._path.open("rb") as file:
            begin = file.read(max(map(len, FILE_STORE_BEGINS)))
        if not any(each.startswith(begin[: len(each)]) for each in FILE_STORE_BEGINS):
            raise RendezvousSettingsError(
                f"--rdzv-endpoint={self.endpoint} is a file that no FileStore has written. It is "
                "left as it is: give the path of a file that does not exist yet."
            )

    def _remove_stale(self) -> None:
        with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".rdzv-now-") as probe:
            now = os.stat(probe.name).st_mtime
        if now - self._path.stat().st_mtime > self._lifetime_seconds:
            logger.warning("%s was left by a run that has ended; it is begun anew", self._path)
            self._path.unlink()


Place = TcpPlace | FilePlace
