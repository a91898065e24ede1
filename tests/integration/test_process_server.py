"""The server process of the conformance kit: what is done to it has happened when it returns."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.conformance import process_server
from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.servers.local import ATTEMPTS_MAX, free_port

from .operations import until

A_WHILE_SECONDS = 0.1
PROGRAM = """
import functools, http.server, socketserver, sys
print("serving", flush=True)
socketserver.ThreadingTCPServer.allow_reuse_address = True
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[2])
socketserver.ThreadingTCPServer(("127.0.0.1", int(sys.argv[1])), handler).serve_forever()
"""
"""Serves the files in its folder."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ProcessServer]:
    command = [sys.executable, "-c", PROGRAM, "{port}", "{data}"]
    with contextlib.closing(ProcessServer(command, tmp_path, technology="files")) as server:
        yield server


def status(server: ProcessServer, name: str) -> str:
    """What it says of the file."""
    with socket.create_connection(server.address, timeout=A_WHILE_SECONDS) as client:
        client.settimeout(A_WHILE_SECONDS)
        try:
            client.sendall(f"GET /{name} HTTP/1.0\r\n\r\n".encode())
            return client.recv(100).split()[1].decode()
        except TimeoutError:
            return "silent"


def patient_status(server: ProcessServer, name: str) -> str:
    """As above, of a server that answers in the end."""
    answers = (status(server, name) for _ in range(200))
    return next(answer for answer in answers if answer != "silent")


def test_it_is_paused_killed_and_started_again(server: ProcessServer) -> None:
    address = server.address
    (server.data / "file").write_text("kept")
    assert patient_status(server, "file") == "200"
    server.pause()
    assert status(server, "file") == "silent"
    server.resume()
    assert patient_status(server, "file") == "200"
    server.kill()
    with pytest.raises(ConnectionRefusedError):
        status(server, "file")
    server.restart(keep_data=True)
    assert server.address == address
    assert patient_status(server, "file") == "200"
    server.kill()
    server.restart(keep_data=False)
    assert patient_status(server, "file") == "404"
    assert server.log.read_text().count("serving") == 3


def test_a_paused_server_can_be_killed(server: ProcessServer) -> None:
    server.pause()
    server.kill()
    with pytest.raises(ConnectionRefusedError):
        status(server, "file")


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no port today')"]
    with pytest.raises(RuntimeError, match=r"broken does not answer.*ended with 1.*no port today"):
        ProcessServer(command, tmp_path, technology="broken")


def test_it_goes_to_other_ports_if_one_is_taken_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", f"import sys; del sys.argv[2]{PROGRAM}"]
    command += ["{port}", "{port_2}", "{data}"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        free = [free_port() for _ in range(3)]
        chosen = [taken.getsockname()[1], *free]
        monkeypatch.setattr(process_server, "free_port", lambda: chosen.pop(0))
        with contextlib.closing(ProcessServer(command, tmp_path, technology="files")) as server:
            assert server.address[1] == free[1]
            server.kill()
            server.restart(keep_data=True)
            assert server.address[1] == free[1]
    assert "Address already in use" in server.log.read_text()


def test_what_one_has_started_that_does_not_start_is_ended_too(tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 100000 & echo $! >> pids; exit 3".replace("pids", "$0")]
    with pytest.raises(RuntimeError, match="ended with 3"):
        ProcessServer([*command, str(tmp_path / "pids")], tmp_path, technology="broken")
    numbers = (tmp_path / "pids").read_text().split()
    assert len(numbers) == ATTEMPTS_MAX
    until(lambda: not any(map(runs, numbers)))


def runs(number: str) -> bool:
    """Whether the process is there, and no mere entry in the kernel's table."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_that_never_answers_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(RuntimeError, match="it takes too long"):
        ProcessServer(command, tmp_path, technology="deaf", start_seconds_max=0.2)


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, sys
from rdzv.conformance.process_server import ProcessServer
command = [sys.executable, "-c", {PROGRAM!r}, "{{port}}", "{{data}}"]
server = ProcessServer(command, pathlib.Path(sys.argv[1]), technology="files")
print(server.address[1], flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    address = "127.0.0.1", int(ended.stdout)
    deadline, pause = time.monotonic() + 10.0, threading.Event()
    with contextlib.suppress(ConnectionRefusedError):
        while time.monotonic() < deadline:
            socket.create_connection(address, timeout=1.0).close()
            pause.wait(0.02)
        pytest.fail("it still answers")
