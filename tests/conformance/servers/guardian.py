"""Removes servers whatever becomes of the process that started them.

Theory: a test process may be killed, may die with its servers stopped, may be forked. So a second
process, the guardian, holds the reading end of a pipe. Once the pipe ends, or the process it serves
is gone, it removes all that it was told to watch and not told to forget. (The kernel's
``PR_SET_PDEATHSIG`` acts when the *thread* that started a server ends, and does not see children.)

Rules:

* The standard library only, and no import of rdzv: this file is also the guardian's program.
* A server is a tree of processes, not a process group: PostgreSQL's have a session each. It is
  stopped from the root on before anything is killed, so that nothing is born unseen.
* Removing never fails because something is gone already.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GONE_SECONDS_MAX = 10.0
POLL_SECONDS = 0.005
CLOSE_SECONDS_MAX = 30.0


def processes() -> dict[int, tuple[int, str]]:
    """Parent and state (``R``, ``S``, ``T`` for stopped, ``Z``, ...) of every process."""
    found = {}
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, text=True, check=True
        )
        rows = (line.split() for line in listed.stdout.splitlines())
        return {int(pid): (int(parent), state[0]) for pid, parent, state in rows}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                # The command's name comes before, in parentheses, and may hold anything.
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                found[int(name)] = (int(fields[1]), fields[0])
    return found


def tree(root: int) -> list[int]:
    """The process and all that descend from it, parents first; [] when it is gone."""
    table = {pid: one for pid, one in processes().items() if one[1] not in "ZX"}
    members = [root] if root in table else []
    for member in members:
        members += [pid for pid, (parent, _) in table.items() if parent == member]
    return members


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def stop(root: int) -> list[int]:
    """Stop a tree of processes; returns it once all of it stands still."""
    deadline = time.monotonic() + GONE_SECONDS_MAX
    send([root], signal.SIGSTOP)
    while True:
        members, table = tree(root), processes()
        moving = [pid for pid in members if table.get(pid, (0, "Z"))[1] not in "TtZX"]
        if not moving:
            return members
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes that do not stop: {moving}")
        send(moving, signal.SIGSTOP)
        threading.Event().wait(POLL_SECONDS)


def go_on(root: int) -> None:
    """Let a stopped tree of processes go on, children first."""
    send(reversed(tree(root)), signal.SIGCONT)


def kill(root: int) -> None:
    """Kill a tree of processes and return when all of it is gone, but for what its parent has not
    waited for."""
    try:
        members = stop(root)
    except TimeoutError:  # one waits for the disk, for instance
        members = tree(root)
    send(members, signal.SIGKILL)
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while alive(members):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes that survive SIGKILL: {alive(members)}")
        threading.Event().wait(POLL_SECONDS)


def alive(pids: Iterable[int]) -> list[int]:
    table = processes()
    return [pid for pid in pids if table.get(pid, (0, "Z"))[1] not in "ZX"]


def release_shared_memory(directory: Path) -> None:
    """Free the segment that a killed PostgreSQL leaves in the kernel; its processes are gone."""
    for note in directory.glob("*/postmaster.pid"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The seventh line holds the key and the id; see src/include/utils/pidfile.h there.
            ctypes.CDLL(None).shmctl(int(note.read_text().splitlines()[6].split()[1]), 0, None)
        note.unlink(missing_ok=True)


def remove(what: dict[str, Any]) -> None:
    """Remove a server: ``{"pid": 1, "directory": "/tmp/x"}``, or ``{"container": "id", "host": x}``
    where x is the value of ``DOCKER_HOST`` or ""."""
    if "pid" in what:
        kill(what["pid"])
    if "directory" in what:
        release_shared_memory(Path(what["directory"]))
        shutil.rmtree(what["directory"], ignore_errors=True)
    if "container" in what:
        import docker  # type: ignore[import-untyped,import-not-found,unused-ignore]

        if what["host"]:
            os.environ["DOCKER_HOST"] = what["host"]
        with contextlib.suppress(docker.errors.NotFound):
            docker.from_env().containers.get(what["container"]).remove(force=True, v=True)


class Guardian:
    """The guardian of this process; runs while there is something to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[str, dict[str, Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def watch(self, name: str, **what: Any) -> None:
        """Remove it should this process die; replaces what was watched under the name."""
        if os.getpid() != self._owner:
            raise RuntimeError("test servers belong to the process that imported their module")
        with self._lock:
            self._watched[name] = what
            self._tell({name: what})

    def forget(self, name: str) -> None:
        with self._lock:
            if self._watched.pop(name, None) is None or os.getpid() != self._owner:
                return
            self._tell({name: None})
            if not self._watched and self._process is not None:
                process, self._process = self._process, None
                assert process.stdin is not None
                process.stdin.close()
                process.wait(CLOSE_SECONDS_MAX)

    def _tell(self, news: dict[str, Any]) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", __file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # else it would keep the readers of ours waiting
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is not for it
            )
            news = self._watched
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(news).encode() + b"\n")
        self._process.stdin.flush()


GUARDIAN = Guardian()


def main(served: int) -> None:
    """Read what to watch until whoever writes it is gone, then remove it."""
    watched: dict[str, dict[str, Any]] = {}
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    if hasattr(os, "pidfd_open"):
        # A forked child of the served process holds the pipe open, though nobody writes to it.
        selector.register(os.pidfd_open(served), selectors.EVENT_READ)
    os.set_blocking(sys.stdin.fileno(), False)
    text = b""
    while True:
        gone = any(key.fileobj is not sys.stdin for key, _ in selector.select())
        while True:
            try:
                read = os.read(sys.stdin.fileno(), 65536)
            except BlockingIOError:
                break
            gone = gone or not read
            text += read
            if not read:
                break
        *lines, text = text.split(b"\n")
        for line in lines:
            watched.update(json.loads(line))
        if gone:
            break
    for what in watched.values():
        if what is not None:
            with contextlib.suppress(Exception):  # the others are to be removed all the same
                remove(what)


if __name__ == "__main__":
    main(int(sys.argv[1]))
