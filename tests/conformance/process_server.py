"""A server in a process of its own, which a clause may stop, kill and start again."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rdzv.conformance.servers.local import ATTEMPTS_MAX, free_port, has_died
from rdzv.conformance.target import Server

LOG_BYTES_SHOWN = 2000
LOOPBACK = "127.0.0.1"
GUARD = 'read line; kill -s KILL -- "-$0"'


class ProcessServer(Server):
    """Starts ``command`` and returns when the server answers.

    In the command ``{port}`` and ``{port_2}`` stand for free loopback ports and ``{data}`` for a
    folder of its own below ``folder``, which is empty at first and after a restart without data. A
    server that ends at its first start is tried again on other ports, since somebody else may take
    one between the look and the start; afterwards its ports stay. What the server prints goes to
    ``folder/server.log``. It is given a process group of its own, and what is done
    to it is done to all of the group. It ends with this process, however that ends: a shell waits
    for the end of a pipe that only this process holds open.

    Override :meth:`answers` where a connection that is accepted does not yet mean that requests
    are served, and :meth:`prepare` where the folder has to be filled before the first start.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        technology: str,
        version: str = "unknown",
        environment: Mapping[str, str] | None = None,
        start_seconds_max: float = 60.0,
    ) -> None:
        self.technology, self.version = technology, version
        self.data, self.log = folder / "data", folder / "server.log"
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        self._start_seconds_max = start_seconds_max
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        self._start_somewhere()

    @property
    def address(self) -> tuple[str, int]:
        return LOOPBACK, self._port

    def answers(self) -> bool:
        """Whether the server serves requests now. May raise ``OSError`` where it does not."""
        with socket.create_connection(self.address, timeout=1.0):
            return True

    def prepare(self) -> None:
        """Fill the empty folder ``self.data`` with what the server needs to start."""

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)
        if self._process is not None and self._process.returncode is None:
            # Each of its threads goes on until it is its turn to notice, on a busy machine for
            # long enough to answer.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._guard is not None:
            # First: once the server has been waited for, its number may be another's.
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def restart(self, *, keep_data: bool) -> None:
        self.kill()
        self._start(keep_data=keep_data)

    def close(self) -> None:
        """End the server for good."""
        self.kill()
        atexit.unregister(self.close)

    def _signal(self, number: signal.Signals) -> None:
        # Not once it has been waited for: the number may be another process's by then.
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _start_somewhere(self) -> None:
        for left in reversed(range(ATTEMPTS_MAX)):
            self._port, self._port_2 = free_port(), free_port()
            try:
                return self._start(keep_data=False)
            except _EndedEarly:
                if not left:
                    raise

    def _start(self, *, keep_data: bool) -> None:
        if not keep_data:
            shutil.rmtree(self.data, ignore_errors=True)
            self.data.mkdir(parents=True)
            self.prepare()
        ports = {"{port}": str(self._port), "{port_2}": str(self._port_2)}
        values = {**ports, "{data}": str(self.data)}
        command = [_filled(part, values) for part in self._command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._wait_until_it_answers(self._process)

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_seconds_max
        pause = threading.Event()
        while True:
            with contextlib.suppress(OSError):
                if self.answers():
                    return
            has_ended = has_died(process)
            if has_ended or time.monotonic() > deadline:
                self.kill()
                raise (_EndedEarly if has_ended else RuntimeError)(
                    f"{self.technology} does not answer at port {self._port}: "
                    + (f"it ended with {process.returncode}" if has_ended else "it takes too long")
                    + f"; it said {self._said()!r}"
                )
            pause.wait(0.02)

    def _said(self) -> str:
        return self.log.read_bytes()[-LOG_BYTES_SHOWN:].decode("utf-8", "replace")


class _EndedEarly(RuntimeError):
    """The server ended before it answered."""


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text
