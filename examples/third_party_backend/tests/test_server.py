"""What the server promises beyond what the kit can see from outside."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_rdzv import create_backend, space
from http_rdzv.backend import HttpRendezvousBackend
from http_rdzv.server import Server
from http_rdzv.space import Late, Space
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rdzv.conformance.proxy import Proxy
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError, RendezvousStateError


def counted(data: Space, number: int, slot: str = "slot") -> Any:
    return data.mutate("job", "add", {"key": "k", "amount": 1}, slot, number)


def reopened(path: Path) -> Space:
    """As a server that was killed finds it; the lock belongs to this process by then."""
    path.with_name(f"{path.name}.lock").unlink()
    return Space(path)


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with Server(("127.0.0.1", 0), Space()) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server.server_address  # type: ignore[misc]
        server.shutdown()
        thread.join()


# ------------------------------------------------------------------------------- the journal


def test_all_is_there_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    before = Space(path)
    assert before.put("job", "c3RhdGU=", None, "a" * 32)
    assert counted(before, 1) == {"answer": 1}
    before.mutate("job", "queue_push", {"key": "q", "value": "dg=="}, "other", 1)
    for _ in range(2):  # from the journal as it was written, then from the rewritten one
        after = reopened(path)
        assert after.document("job", "a" * 32) == ("c3RhdGU=", "a" * 32, True)
        assert counted(after, 1) == {"answer": 1}
        assert after.look("job", lambda run: run.queues, bool, 0.0) == {"q": ["dg=="]}


def test_a_last_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    before = Space(path)
    counted(before, 1)
    whole = path.read_bytes()
    counted(before, 2)
    complete = path.read_bytes()
    for length in range(len(whole), len(complete)):
        path.write_bytes(complete[:length])
        assert counted(reopened(path), 1) == {"answer": 1}


def test_damage_before_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    before = Space(path)
    counted(before, 1)
    counted(before, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0].replace(b'"number":1', b'"number":9') + lines[1])
    with pytest.raises(ValueError, match="damaged in line 1"):
        reopened(path)


def test_a_long_journal_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "JOURNAL_BYTES_MIN", 2000)
    path = tmp_path / "journal"
    data = Space(path)
    for number in range(1, 101):
        counted(data, number)
    assert path.stat().st_size < 2500
    assert counted(reopened(path), 101) == {"answer": 101}


def test_old_runs_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    counted(Space(path), 1)
    monkeypatch.setattr(space, "FORGET_AFTER_SECONDS", 0.0)
    assert counted(reopened(path), 1, slot="new") == {"answer": 1}


def test_two_servers_do_not_share_a_journal(tmp_path: Path) -> None:
    first = Space(tmp_path / "journal")
    command = [sys.executable, "-m", "http_rdzv.server", "--port=0", "--data", "journal"]
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert "cannot start" in second.stderr
    assert counted(first, 1) == {"answer": 1}


# ------------------------------------------------------------------------------------- slots


def test_a_mutation_that_comes_again_gets_its_answer_again() -> None:
    data = Space()
    assert [counted(data, number) for number in (1, 1, 2, 2)] == [
        {"answer": 1},
        {"answer": 1},
        {"answer": 2},
        {"answer": 2},
    ]
    assert counted(data, 1, slot="another") == {"answer": 3}


def test_a_mutation_that_comes_late_is_refused() -> None:
    data = Space()
    counted(data, 1)
    counted(data, 2)
    with pytest.raises(Late):
        counted(data, 1)
    assert counted(data, 3) == {"answer": 3}


def test_a_refused_mutation_is_refused_again() -> None:
    data = Space()
    data.mutate("job", "set_many", {"pairs": [["k", "eA=="]]}, "slot", 1)
    refusals = [counted(data, 2) for _ in range(2)]
    assert "no decimal number" in refusals[0]["error"]
    assert refusals[0] == refusals[1]


# ------------------------------------------------------------------------------- lost answers


def test_a_writer_learns_of_a_write_whose_answer_was_lost(address: tuple[str, int]) -> None:
    with Proxy(address) as proxy:
        backend = HttpRendezvousBackend(f"127.0.0.1:{proxy.address[1]}", "job")
        proxy.drop_answers(1)
        state, token, success = backend.set_state(b"1")  # type: ignore[misc]
        assert (state, success) == (b"1", True)
        proxy.drop_answers(1)
        assert backend.set_state(b"2", uuid.uuid4().hex) == (b"1", token, False)
        assert backend.get_state() == (b"1", token)


def test_a_writer_learns_of_its_write_that_another_one_has_replaced() -> None:
    data = Space()
    first, second = "a" * 32, "b" * 32
    data.put("job", "MQ==", None, first)
    data.put("job", "Mg==", first, second)
    assert data.document("job", first) == ("Mg==", second, True)
    assert data.document("job", "c" * 32) == ("Mg==", second, False)


# ----------------------------------------------------------------------- what is not our server


@pytest.mark.parametrize(
    "endpoint", ["", "host", "host:0", "https://host:1", "http://host:1/path", "http://u:p@host:1"]
)
def test_an_endpoint_that_cannot_work_is_refused(endpoint: str) -> None:
    params = RendezvousParameters("http", endpoint, "job", 1, 1)
    with pytest.raises(RendezvousSettingsError, match="rdzv-endpoint"):
        create_backend(params)


def answers(body: bytes) -> str:
    """The endpoint of something else, which gives one answer, whatever it is asked."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            connection.recv(1 << 16)
            connection.sendall(body)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_another_web_server_is_no_backend() -> None:
    body = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(RendezvousConnectionError, match="no server of rdzv-http"):
        HttpRendezvousBackend(answers(body), "job").get_state()


def test_a_document_without_a_token_is_no_document_of_ours() -> None:
    body = b"HTTP/1.1 200 OK\r\nRdzv-Http: 1\r\nContent-Length: 1\r\n\r\nx"
    with pytest.raises(RendezvousStateError, match="did not write"):
        HttpRendezvousBackend(answers(body), "job").get_state()


def test_an_answer_that_is_cut_off_is_none() -> None:
    body = b"HTTP/1.1 200 OK\r\nRdzv-Http: 1\r\nContent-Length: 9\r\n\r\nx"
    with pytest.raises(RendezvousConnectionError, match="cut off"):
        HttpRendezvousBackend(answers(body), "job").get_state()
