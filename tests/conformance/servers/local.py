"""Servers that are processes of this machine, with data that is thrown away."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
from pathlib import Path
from typing import IO

from rdzv.conformance.servers import guardian
from rdzv.conformance.servers.base import RealServer, ServerFailed, wait_for_answer
from rdzv.conformance.servers.programs import Program, Workplace, unprivileged
from rdzv.conformance.servers.technologies import Technology

PORTS = range(20000, 32000)
"""Below those that a kernel gives to outgoing connections: while a server is down, such a one
could take its port, or a client that tries again and again could connect to itself."""
ATTEMPTS_MAX = 3


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody listens on at the moment."""
    choose = random.SystemRandom()
    while True:
        port = choose.choice(PORTS)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind((host, port))
            return port


def has_died(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended, though nobody has waited for it: its number stays its own, and that of
    its group."""
    if process.returncode is not None:
        return True
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, how) is not None


class LocalServer(RealServer):
    """A process, or a tree of them. Starts when it is made; returns when it answers."""

    def __init__(self, technology: Technology, program: Program) -> None:
        self._technology = technology
        self.technology = technology.name
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        users = technology.refuses_root
        user = None if users is None else unprivileged(users)
        self._place = Workplace.make(technology.name, user)
        self._name = str(self._place.directory)
        guardian.GUARDIAN.watch(self._name, directory=self._name)
        try:
            self._program = self._place.bring(program)
            technology.prepare(self._program, self._place)
            self._start_somewhere()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    @property
    def pid(self) -> int:
        """Of the server's first process."""
        assert self._process is not None, "it does not run"
        return self._process.pid

    @property
    def directory(self) -> Path:
        """What the server keeps on disk, and its log; removed at the end."""
        return self._place.directory

    def endpoint(self, address: tuple[str, int] | None = None) -> str:
        return self._technology.endpoint(*(address or self.address))

    def pause(self) -> None:
        guardian.stop(self.pid)

    def resume(self) -> None:
        guardian.go_on(self.pid)

    def kill(self) -> None:
        if self._process is None:
            return
        guardian.kill(self._process.pid)
        # Before it is waited for, since its number may be another's afterwards.
        guardian.GUARDIAN.watch(self._name, directory=self._name)
        self._process.wait()
        self._process = None
        guardian.release_shared_memory(self._place.directory)

    def restart(self, *, keep_data: bool) -> None:
        self.kill()
        if not keep_data:
            shutil.rmtree(self._place.data, ignore_errors=True)  # a start may have failed
            self._technology.prepare(self._program, self._place)
        self._start()

    def runs(self) -> bool:
        return self._process is not None and not has_died(self._process)

    def close(self) -> None:
        if os.getpid() != self._owner:
            return  # a forked child's copy
        self.kill()
        guardian.remove({"directory": self._name})
        guardian.GUARDIAN.forget(self._name)

    def _start_somewhere(self) -> None:
        # Another program may take a port between the look and the start.
        for attempt in range(ATTEMPTS_MAX):
            self._port, self._port_2 = free_port(), free_port()
            try:
                return self._start()
            except ServerFailed:
                if self._process is not None or attempt == ATTEMPTS_MAX - 1:
                    raise

    def _start(self) -> None:
        command = self._technology.command(self._program, self._place, self._port, self._port_2)
        with self._place.log.open("ab") as log:
            self._process = self._spawn(command, log)
        guardian.GUARDIAN.watch(self._name, directory=self._name, pid=self._process.pid)
        self.technology, self.version = wait_for_answer(
            lambda: self._technology.ask(self.endpoint()), self._ended, self._place.last_words
        )

    def _spawn(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._place.words(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self._place.directory,
            env=self._place.environment(),
            start_new_session=True,  # an interrupt from the keyboard is not for it
        )

    def _ended(self) -> str:
        code = None if self._process is None else self._process.poll()
        if code is None:
            return ""
        self._process = None
        guardian.GUARDIAN.watch(self._name, directory=self._name)
        return f"{self._program.path} ended with {code}"
