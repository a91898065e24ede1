"""A server of one's own, and servers that are away or full."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rdzv.backends.etcd import EtcdRendezvousBackend
from rdzv.backends.etcd_options import EtcdOptions
from rdzv.backends.etcd_server import EtcdServer
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError
from rdzv.ports import Entry, Question
from rdzv.stores.etcd import EtcdStore

from .etcd_servers import EtcdProcess, guard
from .operations import TTL_SECONDS, run_apart, until

SHORT_SECONDS = 1.0
STUCK_SECONDS_MAX = 4.0
"""A request of its own patience would take five."""


def test_a_server_of_ones_own(tmp_path: Path) -> None:
    server = EtcdServer(str(tmp_path))
    server.start(timeout=60)
    try:
        assert server.get_endpoint() == f"{server.get_host()}:{server.get_port()}"
        with contextlib.closing(server.get_client()) as client:
            client.put("kept", "1")
        with pytest.raises(RendezvousSettingsError, match="already"):
            server.start()
    finally:
        server.stop()
    server.stop()
    assert (tmp_path / "member").is_dir()
    again = EtcdServer(str(tmp_path))
    again.start()
    try:
        with contextlib.closing(again.get_client()) as client:
            assert client.get("kept")[0] == b"1"
    finally:
        again.stop()


@pytest.mark.full
def test_a_server_of_ones_own_ends_with_the_program() -> None:
    program = (
        "from rdzv.backends.etcd_server import EtcdServer\n"
        "server = EtcdServer()\nserver.start()\n"
        "print(server._process.pid, server._temporary)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert not Path(f"/proc/{said[0]}").exists()
    assert not Path(said[1]).exists()


@pytest.mark.full
def test_a_forked_process_does_not_end_its_parents_server() -> None:
    program = (
        "import os, sys\n"
        "from rdzv.backends.etcd_server import EtcdServer\n"
        "server = EtcdServer()\nserver.start()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    server.stop()\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert os.path.isdir(server._temporary)\n"
        "client = server.get_client()\n"
        "client.put('kept', '1')\n"
        "client.close()\n"
    )
    run_apart(program)


def test_a_server_that_cannot_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(tmp_path / "none"))
    with pytest.raises(RendezvousSettingsError, match="TORCHELASTIC_ETCD_BINARY_PATH"):
        EtcdServer().start()
    script = tmp_path / "etcd"
    script.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(script))
    with pytest.raises(RendezvousConnectionError, match=r"ended with 3[\s\S]*out of luck"):
        EtcdServer().start(num_retries=2)


@pytest.mark.parametrize("secured", [False, True], ids=["open", "guarded"])
def test_a_call_on_a_server_that_hangs_ends_in_time(
    tmp_path: Path, opened: Any, secured: bool
) -> None:
    with contextlib.closing(EtcdProcess(tmp_path, "--bcrypt-cost=4")) as process:
        if secured:
            guard(process.endpoint())
        endpoint = f"etcd://rdzv:secret@{process.endpoint()}" if secured else process.endpoint()
        options = EtcdOptions(read_timeout_seconds=SHORT_SECONDS)
        # Those that are new have to log in first; the others have a connection.
        stores = [opened(EtcdStore(endpoint, "run")) for _ in range(2)]
        backends = [opened(EtcdRendezvousBackend(endpoint, "run", options)) for _ in range(2)]
        stores[0].add("n", 1)
        backends[0].set_state(b"1")
        for store in stores:
            store.set_timeout(timedelta(seconds=SHORT_SECONDS))
        process.pause()
        calls: list[Callable[[], object]] = []
        for store, backend in zip(stores, backends, strict=True):
            calls += [partial(store.add, "n", 1), partial(store.get, "n")]
            calls += [partial(store.check, ["n"]), partial(store.wait, ["none"])]
            calls += [partial(store.queue_pop, "q"), backend.get_state]
            calls += [partial(backend.beat, "node", TTL_SECONDS, Question())]
            calls += [partial(backend.set_state, b"2")]
        with ThreadPoolExecutor(len(calls)) as pool:
            for error, took_seconds in pool.map(failure_of, calls):
                assert isinstance(error, (dist.DistNetworkError, RendezvousConnectionError))
                assert "server runs" in str(error)
                assert took_seconds < STUCK_SECONDS_MAX


def failure_of(call: Callable[[], object]) -> tuple[Exception | None, float]:
    """What a call raised, and after how many seconds."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return error, time.monotonic() - started
    return None, time.monotonic() - started


@pytest.mark.full
def test_an_outage_costs_little(tmp_path: Path, opened: Any) -> None:
    process = EtcdProcess(tmp_path)
    with contextlib.closing(process):
        backend = opened(EtcdRendezvousBackend(process.endpoint(), "run"))
        _, token, _ = backend.set_state(b"1")
        backend.announce(Entry("node", b""), TTL_SECONDS, Question())
        process.kill()
        with contextlib.suppress(RendezvousConnectionError):
            backend.beat("node", TTL_SECONDS, Question())
        threads, processor, started = (
            threading.active_count(),
            time.process_time(),
            time.monotonic(),
        )
        while time.monotonic() < started + 15.0:
            with contextlib.suppress(RendezvousConnectionError):
                backend.beat("node", TTL_SECONDS, Question())
            threading.Event().wait(1.0)
            assert threading.active_count() <= threads + 1, "gRPC's, while it looks"
        share = (time.process_time() - processor) / (time.monotonic() - started)
        assert share < 0.05, share
        process.restart(keep_data=True)

        def is_back() -> bool:
            with contextlib.suppress(RendezvousConnectionError):
                return bool(backend.beat("node", TTL_SECONDS, Question()).token == token)
            return False

        until(is_back)


def test_a_server_without_space_says_so_and_beats_go_on(tmp_path: Path, opened: Any) -> None:
    with contextlib.closing(EtcdProcess(tmp_path, "--quota-backend-bytes=8388608")) as process:
        backend = opened(EtcdRendezvousBackend(process.endpoint(), "run"))
        backend.announce(Entry("node", b""), TTL_SECONDS, Question())
        token = None

        def fill() -> None:
            nonlocal token
            for _ in range(30):
                token = backend.set_state(random.Random(1).randbytes(900_000), token)[1]

        with pytest.raises(RendezvousConnectionError, match="alarm disarm"):
            fill()
        assert backend.beat("node", TTL_SECONDS, Question()).token == token
        store = opened(EtcdStore(process.endpoint(), "run", timedelta(seconds=1)))
        with pytest.raises(dist.DistNetworkError, match="alarm disarm"):
            store.set("k", "v")
