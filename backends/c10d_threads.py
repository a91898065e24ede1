"""The threads that wait in torch's C++, and how such a wait is ended.

A ``TCPStore`` waits for an answer until its connection breaks, and offers no way to break it. So
the sockets that torch opens for a thread are found and noted, and whoever wants an end to the
thread shuts them down: the wait fails at once.

When the interpreter ends, none of these threads may be in C++: Python ends a thread that comes
back then by unwinding its stack, and C++ that must not be unwound aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from rdzv.backends.options import REQUEST_SECONDS_MAX

T = TypeVar("T")

OPEN_FILES = "/dev/fd"
CUT_AGAIN_SECONDS = 0.1
"""A ``TCPStore`` that is being made connects anew when its connection breaks."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds, seconds, probes. A firewall forgets what is silent for longer, often after minutes,
and one end of a connection that is forgotten waits for ever; torch sets nothing of this."""
ANSWER_SECONDS = REQUEST_SECONDS_MAX + 1.0
"""So long one of torch's requests waits for the next bytes of its answer: longer than anybody who
asked. It would wait for ever, and ``list_keys`` holds Python's global lock meanwhile: no thread of
the process could run. A ``wait`` has its own timeout, and is not cut short by this."""
EXIT_SECONDS = 5.0
"""So long the interpreter's end waits for a thread that does not end, such as one in a file."""

_Peer = tuple[str, int]


class WrongServiceError(OSError):
    """Somebody answers who is not what was asked for: to try again is of no use."""


class _Opening:
    """The connections to ``peer`` that were made since."""

    def __init__(self, peer: _Peer) -> None:
        self._peer = peer
        self._before = {inode for _, inode in _sockets()}

    def sockets(self) -> list[tuple[int, int]]:
        """Their descriptors and inodes."""
        new = [each for each in _sockets() if each[1] not in self._before]
        return [each for each in new if _with_socket(*each, self._is_ours)]

    def _is_ours(self, connection: socket.socket) -> bool:
        host, port = connection.getpeername()[:2]
        # Torch's sockets are of IPv6, also where the address is not.
        return (host.removeprefix("::ffff:"), port) == self._peer


_lock = threading.Lock()
_threads: dict[threading.Thread, Callable[[], None]] = {}
"""How each is told to end."""
_opening: weakref.WeakKeyDictionary[threading.Thread, _Opening] = weakref.WeakKeyDictionary()
_opened: weakref.WeakKeyDictionary[threading.Thread, list[tuple[int, int]]] = (
    weakref.WeakKeyDictionary()
)
_one_at_a_time: dict[_Peer, threading.Lock] = {}
_cut: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Those that are to make no further connection."""
_exiting = threading.Event()


def start(target: Callable[[], None], name: str, stop: Callable[[], None]) -> threading.Thread:
    """A thread that may call torch's stores, and that ends after ``stop`` as soon as its
    connection breaks. Raises ``OSError`` when the interpreter ends."""

    def run() -> None:
        try:
            target()
        finally:
            with _lock:
                _threads.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _lock:
        _refuse_at_exit()
        _threads[thread] = stop
    thread.start()
    return thread


def connected(peer: _Peer, make: Callable[[], T], seconds: float) -> T:
    """What ``make`` makes, whose sockets to ``peer`` are this thread's from now on.

    One thread of the process at a time connects to a peer, so that it is known whose a socket is.
    Raises what ``make`` raises, and ``OSError`` where it is not its turn within ``seconds`` or the
    thread is to end.
    """
    thread = threading.current_thread()
    lock = _one_at_a_time.setdefault(peer, threading.Lock())
    if not lock.acquire(timeout=seconds):
        raise TimeoutError("another connection to the same host has not come about")
    try:
        refuse_to_end()
        opening = _opening[thread] = _Opening(peer)
        made = make()
        _opened[thread] = opening.sockets()
        for descriptor, inode in _opened[thread]:
            _with_socket(descriptor, inode, _bound)
        return made
    finally:
        _opening.pop(thread, None)
        lock.release()


def refuse_to_end() -> None:
    """Raises ``OSError`` where this thread is to end, and need not connect any more."""
    _refuse_at_exit()
    if threading.current_thread() in _cut:
        raise OSError(errno.ECANCELED, "nobody waits for this connection any more")


def cut(thread: threading.Thread) -> None:
    """Break the thread's connection, or the one that it is making, and let it make no other. Does
    not wait."""
    _cut.add(thread)
    disconnect(thread)


def disconnect(thread: threading.Thread) -> None:
    """Break the thread's connection, so that it makes another. Does not wait."""
    opening = _opening.get(thread)
    for descriptor, inode in opening.sockets() if opening else _opened.get(thread, []):
        _with_socket(descriptor, inode, _shut_down)


def end(thread: threading.Thread, seconds: float) -> None:
    """Cut the thread, which was told to end, and wait so long for its end."""
    deadline = time.monotonic() + seconds
    while thread.is_alive() and thread is not threading.current_thread():
        cut(thread)
        left = deadline - time.monotonic()
        if left <= 0:
            return
        thread.join(min(left, CUT_AGAIN_SECONDS))


def _sockets() -> list[tuple[int, int]]:
    """All of this process: descriptor and inode."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(OPEN_FILES):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.append((int(name), status.st_ino))
    return found


def _with_socket(descriptor: int, inode: int, act: Callable[[socket.socket], bool]) -> bool:
    """Whether ``act`` says so of the socket; False where it is closed. Another that has taken its
    descriptor is left alone."""
    try:
        copy = os.dup(descriptor)
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            return False
        with socket.socket(fileno=copy) as connection:
            return act(connection)
    except OSError:
        return False


def _shut_down(connection: socket.socket) -> bool:
    connection.shutdown(socket.SHUT_RDWR)
    return True


def _bound(connection: socket.socket) -> bool:
    """Let a connection on which nothing comes any more not be waited for for ever."""
    seconds = struct.pack("ll", int(ANSWER_SECONDS), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return True


def _refuse_at_exit() -> None:
    if _exiting.is_set():
        raise OSError("the interpreter ends")


def _forget() -> None:
    """A forked child has none of the threads, and locks that they held are never released."""
    global _lock
    _lock = threading.Lock()
    _threads.clear()
    _opening.clear()
    _opened.clear()
    _one_at_a_time.clear()
    _cut.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _end_all() -> None:
    with _lock:
        _exiting.set()
        threads = dict(_threads)
    for stop in threads.values():
        stop()
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in threads:
        end(thread, deadline - time.monotonic())
