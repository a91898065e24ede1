"""Which server a technology gets, what a run says of it, and what it says of what it lacks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rdzv.conformance.servers.base import NoControl, ServerUnavailable
from rdzv.conformance.servers.containers import ENGINE_SECONDS_MAX
from rdzv.conformance.servers.local import LocalServer
from rdzv.conformance.servers.options import (
    IMAGES,
    TECHNOLOGIES,
    Options,
    options_of,
    read_servers,
)
from rdzv.conformance.servers.pool import ServerPool
from rdzv.conformance.servers.programs import on_path
from rdzv.conformance.servers.technologies import ALL

from .operations import until
from .server_kit import ServerCase


def test_a_server_of_the_users_is_used_and_left_alone() -> None:
    case = ServerCase("local", "redis", Options())
    with case.server() as own:
        pool = ServerPool(Options(urls={"redis": own.endpoint()}))
        with contextlib.closing(pool):
            server = pool.get("redis")
            assert server.version == own.version
            assert server.address == own.address
            assert server.endpoint(("h", 1)) == "redis://h:1"
            for act in (server.pause, server.resume, server.kill):
                with pytest.raises(NoControl, match="not started by this run"):
                    act()
            with pytest.raises(NoControl, match="not started by this run"):
                server.restart(keep_data=True)
            assert "not started by this run" in server.cannot("pause")
            assert own.cannot("pause") == ""
            assert f"server redis: url, {own.technology} {own.version}" in "\n".join(pool.header())
        with case.client(own) as client:
            assert client.version() == own.version


@pytest.mark.parametrize("technology", ["redis", "postgresql"])
def test_a_server_that_a_test_has_left_dead_starts_anew(technology: str) -> None:
    with contextlib.closing(ServerPool(Options("local"))) as pool:
        try:
            server = pool.get(technology)
        except ServerUnavailable as error:
            pytest.skip(str(error))
        assert isinstance(server, LocalServer)
        assert server.runs()
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.runs())
        assert server._process is not None
        assert server._process.returncode is None, "its number is still its own"
        server.kill()
        # As a restart leaves it that fails half-way.
        shutil.rmtree(server.directory / "data")
        assert not server.runs()
        again = pool.get(technology)
        assert again.runs()
        assert ALL[technology].ask(again.endpoint())[1] == again.version


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs a server as somebody else")
def test_to_become_another_user_this_process_is_not_forked() -> None:
    """What is in it may crash in the child."""
    program = """
import ctypes, signal, subprocess
from rdzv.conformance.servers.programs import Workplace, unprivileged
told = ctypes.CFUNCTYPE(None)(lambda: print("forked"))
ctypes.CDLL(None).__register_atfork(told, None, None, None)
user = unprivileged(["nobody"])
place = Workplace.make("test", user)
place.run("sh", "-c", "id -un > seen; grep SigIgn /proc/self/status > ignored")
ignored = int((place.directory / "ignored").read_text().split()[1], 16)
assert not ignored & sum(1 << one - 1 for one in (signal.SIGPIPE, signal.SIGXFSZ)), hex(ignored)
print((place.directory / "seen").read_text().strip() == user.pw_name)
subprocess.run(["rm", "-r", str(place.directory)], check=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize(
    ("technology", "url"),
    [
        ("redis", "redis://:hunter22@127.0.0.1:{port}"),
        ("postgresql", "postgresql+psycopg://me:hunter22@127.0.0.1:{port}/x"),
        ("mysql", "mysql+pymysql://me:hunter22@127.0.0.1:{port}/x"),
        ("etcd", "http://127.0.0.1:{port}"),
        ("redis", "unix:///nowhere"),
    ],
)
def test_a_server_of_the_users_that_does_not_answer_is_named(technology: str, url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = url.format(port=taken.getsockname()[1])
    pool = ServerPool(Options(urls={technology: url}, required=(technology,)))
    for _ in range(2):
        with pytest.raises(ServerUnavailable) as caught:
            pool.get(technology)
        assert "hunter22" not in str(caught.value)
    assert list(pool.unavailable()) == [technology]
    assert f"since {technology} is required (--rdzv-require)" in pool.missing()[0]
    pool.close()


def test_without_an_engine_auto_takes_programs_and_docker_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    strict = ServerPool(Options(mode="docker", required=("etcd",)))
    with pytest.raises(ServerUnavailable, match="no Docker engine answers"):
        strict.get("redis")
    assert set(strict.unavailable()) == {"redis", "etcd"}
    assert len(strict.missing()) == 1
    assert all("NONE: no Docker engine answers" in line for line in strict.header())
    easy = ServerPool(Options(mode="auto"))
    lines = easy.header()
    assert len([line for line in lines if line.startswith("server ")]) == len(TECHNOLOGIES)
    assert all("no Docker engine answers" in line for line in lines if "NONE" in line)
    assert easy.unavailable() == {}
    strict.close()
    easy.close()


@pytest.mark.parametrize(
    ("first_line", "is_taken"), [("#!/bin/sh", True), (f"#!{sys.executable}", False)]
)
def test_the_command_of_a_wheel_is_not_taken_for_the_server(
    first_line: str, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "rdzv-test-server"
    command.write_text(f"{first_line}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = on_path("rdzv-test-server")
    assert (found is not None and found.path == command) == is_taken


def test_an_engine_that_is_silent_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/docker.sock")
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
        start = time.monotonic()
        pool = ServerPool(Options(mode="docker"))
        pool.header()
        assert time.monotonic() - start < 2 * ENGINE_SECONDS_MAX
        with pytest.raises(ServerUnavailable, match="no Docker engine answers"):
            pool.get("etcd")


def test_an_image_that_cannot_be_had_is_named_soon(pytestconfig: pytest.Config) -> None:
    if options_of(pytestconfig).mode != "docker":
        pytest.skip("asks a Docker engine: with --rdzv-servers=docker")
    start = time.monotonic()
    with (
        contextlib.closing(
            ServerPool(Options(mode="docker", images={"redis": "rdzv.invalid/none:1"}))
        ) as pool,
        pytest.raises(ServerUnavailable, match=r"rdzv.invalid/none:1"),
    ):
        pool.get("redis")
    assert time.monotonic() - start < 5 * ENGINE_SECONDS_MAX


# ------------------------------------------------------------------------------- a run of pytest

TEST = """
from rdzv.conformance.servers.hooks import ServerHooks
from rdzv.conformance.servers.options import add_options

def pytest_addoption(parser):
    add_options(parser.getgroup("rdzv"))

def pytest_configure(config):
    config.pluginmanager.register(ServerHooks(config), "rdzv-servers")
"""
TEST = """
import pytest
from rdzv.conformance.servers.pool import ServerUnavailable

def test_it(rdzv_servers):
    try:
        server = rdzv_servers.get("redis")
    except ServerUnavailable as reason:
        pytest.skip(str(reason))
    print("it is in", server.directory)

def test_without():
    pass
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Of its own, with the kit's plug-in; there is no Docker engine."""
    (folder / "test_it.py").write_text(TEST)
    (folder / "pytest.ini").write_text("[pytest]")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rP", *options],
        cwd=folder,
        env={**os.environ, "DOCKER_HOST": f"unix://{folder}/none", "COLUMNS": "300"},
        capture_output=True,
        text=True,
    )


def test_a_run_names_its_servers_first_and_leaves_nothing(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "--rdzv-servers=local", "--rdzv-require=redis")
    assert run.returncode == 0, run.stdout + run.stderr
    first = run.stdout.partition("collected")[0]
    assert f"server redis: local, {ALL['redis'].find().path.name}" in first
    assert all(f"server {name}: " in first for name in TECHNOLOGIES)
    directory = run.stdout.partition("it is in ")[2].split()[0]
    assert not Path(directory).exists()


def test_a_run_says_first_and_last_what_it_lacks(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "--rdzv-servers=docker")
    assert run.returncode == 0, run.stdout + run.stderr
    first, _, rest = run.stdout.partition("collected")
    assert "server redis: NONE: no Docker engine answers" in first
    assert "NOT RUN for want of redis: no Docker engine answers" in rest
    assert "etcd" not in rest  # nobody asked for it


@pytest.mark.parametrize("options", [[], ["-q", "-k", "without"]], ids=["asked", "not asked"])
def test_a_run_fails_without_what_it_requires(tmp_path: Path, options: list[str]) -> None:
    run = run_pytest(tmp_path, "--rdzv-servers=docker", "--rdzv-require=etcd", *options)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "FAILED the run, since etcd is required (--rdzv-require)" in run.stdout


def test_a_run_that_does_not_speak_of_servers_does_not_look_for_them(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "--collect-only")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "server redis" not in run.stdout
    assert run_pytest(tmp_path, "--rdzv-servers=dokcer").returncode == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize("technology", ["redis", "postgresql", "mysql", "etcd"])
def test_the_servers_for_work_by_hand_are_the_same(technology: str) -> None:
    compose = Path(__file__).resolve().parents[2] / "docker-compose.yml"
    assert f"image: {IMAGES[technology]}\n" in compose.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("dokcer", "'dokcer' is none of auto, docker, local"),
        ("oracle=x", "'oracle' is no technology"),
        ("local,docker", "either local or docker"),
        ("redis=", "'redis=' is none of"),
    ],
)
def test_a_choice_that_cannot_be_understood_ends_the_run(text: str, complaint: str) -> None:
    with pytest.raises(pytest.UsageError, match=complaint):
        read_servers(text)
