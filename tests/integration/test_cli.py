"""The command ``rdzv`` on a real database and on a third party's bare backend."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

import rdzv
from rdzv.adapters import FramedBackend
from rdzv.cli import main
from rdzv.codec import encode_entry, encode_state
from rdzv.ports import Entry, Question, Roster
from rdzv.registry import open_backend
from rdzv.state import Closing, Node, Proposal, RosterEntry, RoundId, State

NODES = tuple(Node(f"node{number}_1_abc", f"10.0.0.{number}") for number in range(6))
ROUND = RoundId("inc", 3, "nonce3")
STATE = State(
    incarnation="inc",
    round=3,
    nonce="nonce3",
    participants=NODES[:2],
    proposal=Proposal("nonce4", (NODES[0], NODES[2])),
    coordinator=NODES[2].id,
    waiting=1,
    lost=(NODES[1].id,),
)

BARE = """
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Closable, GetsReady

class Bare(RendezvousBackend):
    held, version = None, 0

    @property
    def name(self):
        return "bare"

    def get_state(self):
        return None if self.held is None else (self.held, self.version)

    def set_state(self, state, token=None):
        if token != (None if self.held is None else self.version):
            return None if self.held is None else (self.held, self.version, False)
        self.held, self.version = state, self.version + 1
        return state, self.version, True

BACKEND = Bare()

class Forgetful(Bare):
    def set_state(self, state, token=None):
        self.held, self.version = state, self.version + 1
        return state, self.version, True

def create_backend(params):
    return BACKEND, dist.HashStore()

def create_forgetful(params):
    return Forgetful(), dist.HashStore()

class Away(Bare, GetsReady, Closable):
    is_closed = False

    def get_ready(self):
        raise RendezvousConnectionError("server: it is away")

    def close(self):
        self.is_closed = True

AWAY = Away()

def create_away(params):
    return AWAY, dist.HashStore()
"""


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "job.db")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with the backends ``bare``, ``forgetful`` and ``away``; returns the first."""
    information = tmp_path / "bare_rdzv-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: bare-rdzv\n")
    (information / "entry_points.txt").write_text(
        "[rdzv.backends]\nbare = bare_rdzv:create_backend\nforgetful = bare_rdzv:create_forgetful\n"
        "away = bare_rdzv:create_away\n"
    )
    (tmp_path / "bare_rdzv.py").write_text(BARE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "bare_rdzv", raising=False)
    return open_backend(RendezvousParameters("bare", "", "job", 1, 1))[0]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def announce(roster: Roster, node: Node, **fields: Any) -> None:
    entry = RosterEntry(node, **fields)
    roster.announce(Entry(node.id, encode_entry(entry)), 60.0, Question())


def fill(database: str) -> Any:
    backend = open_backend(RendezvousParameters("sqlite", database, "job", 1, 1))[0]
    assert isinstance(backend, Roster)
    backend.set_state(encode_state(STATE), None)
    announce(backend, NODES[0], running=ROUND)
    announce(backend, NODES[2], running=STATE.proposal_id, topology="rack-1", rank_hint=5)
    announce(backend, NODES[3])
    announce(backend, NODES[4], running=RoundId("old", 9, "n"))
    announce(backend, NODES[5], running=ROUND, finished=True)
    backend.announce(Entry("garbage", b"\x80garbage"), 60.0, Question())
    backend.withdraw("gone", 60.0)
    return backend


def test_backends(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "backends")
    assert status == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "the path of a file" in lines["sqlite"]
    assert "NOT REGISTERED" not in out
    assert "rdzv[redis]" in lines["redis"]
    status, out, _ = run(capsys, "backends", "--json")
    assert {row["name"] for row in json.loads(out)} >= {"sqlite", "redis", "etcd-v3"}


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "rdzv.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == f"rdzv {rdzv.__version__}"


def test_check(capsys: pytest.CaptureFixture[str], database: str) -> None:
    status, out, err = run(capsys, "check", "--backend=sqlite", f"--endpoint={database}")
    assert (status, err) == (0, "")
    assert "FAIL" not in out
    for said in ("set_state", "roster: beat", "watch", "store: get", database, "It works."):
        assert said in out


def test_check_for_programs(capsys: pytest.CaptureFixture[str], database: str) -> None:
    arguments = ("check", "--rdzv-backend=sqlite", f"--rdzv-endpoint={database}", "--json")
    status, out, _ = run(capsys, *arguments, "--rdzv-conf=read_timeout=10,table_prefix=x_")
    report = json.loads(out)
    assert (status, report["ok"], report["endpoint"]) == (0, True, database)
    steps = {step["step"]: step for step in report["steps"]}
    assert steps["roster: beat"]["calls"] == 20
    assert 0 < steps["roster: beat"]["median_milliseconds"] < 10_000
    assert "old" in steps["clock"]["note"]


def test_check_of_a_bare_backend(capsys: pytest.CaptureFixture[str], bare: Any) -> None:
    status, out, _ = run(capsys, "check", "--backend=bare")
    assert status == 0
    for ability in ("roster", "watch", "clock"):
        assert any(line.split()[1] == ability and "not there" in line for line in out.splitlines())


def test_check_finds_a_backend_that_ignores_tokens(
    capsys: pytest.CaptureFixture[str], bare: Any
) -> None:
    status, out, _ = run(capsys, "check", "--backend=forgetful")
    assert status == 1
    assert "FAIL refuse an old token" in out
    assert "It does not work." in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--backend=filestore",), "needs --rdzv-endpoint"),
        (("--backend=sqlight",), "Did you mean sqlite"),
        (("--backend=",), "non-empty"),
        (("--backend=sqlite", "--endpoint=env:RDZV_TEST_UNSET"), "RDZV_TEST_UNSET"),
        (("--backend=sqlite", "--conf=join_timeout"), "NAME=VALUE"),
        (("--backend=sqlite", "--conf=run_id=x"), "run_id"),
        (("--backend=sql", "--endpoint=oracle://u:hunter22@h/d"), "sqlite"),
        (("--backend=sqlite", "--endpoint=/", "--conf=password=hunter22,x"), "NAME=VALUE"),
    ],
)
def test_a_wrong_command(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    for command in (("check",), ("state", "--run-id=job")):
        status, out, err = run(capsys, *command, *arguments)
        assert (status, out) == (2, "")
        assert said in err
        assert "hunter22" not in err
        assert "Traceback" not in err


def test_whoever_looks_at_a_run_makes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "none.store"
    status, out, err = run(
        capsys, "state", "--run-id=job", "--backend=filestore", f"--endpoint={path}"
    )
    assert (status, out) == (2, "")
    assert "no job has used this endpoint yet" in err
    assert list(tmp_path.iterdir()) == []


def test_whoever_looks_at_a_run_is_nobodys_host(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
    command = ("state", "--run-id=job", "--backend=tcpstore", "--conf=read_timeout=1")
    status, out, err = run(capsys, *command, f"--endpoint={endpoint}")
    assert (status, out) == (1, "")
    assert "did not answer" in err


def test_check_of_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        status, out, _ = run(capsys, "check", "--backend=redis", f"--endpoint={endpoint}")
    assert status == 1
    assert endpoint in out
    assert "refused. Look whether the server runs" in out


@pytest.mark.usefixtures("bare")
def test_check_of_a_backend_that_cannot_get_ready(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "check", "--backend=away", "--endpoint=server")
    assert status == 1
    assert "server: it is away" in out
    assert "create state" not in out
    assert sys.modules["bare_rdzv"].AWAY.is_closed


def test_an_unknown_command_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["frob"], ["state", "--backend=sqlite"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_the_state_of_a_run(capsys: pytest.CaptureFixture[str], database: str) -> None:
    backend = fill(database)
    before = (backend.get_state(), backend.entries())
    status, out, err = run(
        capsys, "state", "--backend=sqlite", f"--endpoint={database}", "--rdzv-id=job"
    )
    assert (status, err) == (0, "")
    assert (backend.get_state(), backend.entries()) == before
    found = [" ".join(line.split()) for line in out.splitlines()]
    assert "Round 3, nonce nonce3" in found
    assert f"Lost {NODES[1].id}" in found
    assert "Closed no" in found
    assert f"0 {NODES[0].id} 10.0.0.0 running" in found
    assert f"1 {NODES[1].id} 10.0.0.1 absent" in found
    assert f"1 {NODES[2].id} 10.0.0.2 has confirmed the next round" in found
    assert f"{NODES[3].id} 10.0.0.3 waiting" in found
    assert f"{NODES[4].id} 10.0.0.4 running in old.9.n, another round" in found
    assert f"{NODES[5].id} 10.0.0.5 finished" in found
    assert "gone - withdrawn" in found
    assert any(line.startswith("garbage - unreadable: ") for line in found)
    assert any(line.endswith("topology rack-1 rank hint 5") for line in found)
    assert any("by the backend's clock" in line for line in found)


def test_the_state_for_programs(capsys: pytest.CaptureFixture[str], database: str) -> None:
    backend = fill(database)
    arguments = ("state", "--backend=sqlite", f"--endpoint={database}", "--run-id=job", "--json")
    status, out, _ = run(capsys, *arguments)
    report = json.loads(out)
    assert status == 0
    assert report["state"]["participants"][0] == {"id": NODES[0].id, "address": "10.0.0.0"}
    assert report["state"]["proposal"]["nonce"] == "nonce4"
    assert report["state_age_seconds"] >= 0
    assert {entry["node"]: entry["is"] for entry in report["entries"]}[NODES[3].id] == "waiting"
    _, token = backend.get_state()
    backend.set_state(encode_state(State("inc2", closed=Closing("all done", True))), token)
    assert json.loads(run(capsys, *arguments)[1])["state"]["closed"]["reason"] == "all done"
    assert "Closed        all done, and it had ended well" in run(capsys, *arguments[:-1])[1]


def test_a_run_that_is_not_there(capsys: pytest.CaptureFixture[str], database: str) -> None:
    fill(database)
    status, out, _ = run(
        capsys, "state", "--backend=sqlite", f"--endpoint={database}", "--run-id=other"
    )
    assert status == 1
    assert "No document." in out
    assert "Roster: empty" in out


def test_a_database_that_is_not_there_is_not_made(
    capsys: pytest.CaptureFixture[str], database: str
) -> None:
    status, out, err = run(
        capsys, "state", "--backend=sqlite", f"--endpoint={database}", "--run-id=job"
    )
    assert (status, out) == (2, "")
    assert database in err
    assert not Path(database).exists()


def test_a_document_that_cannot_be_read(capsys: pytest.CaptureFixture[str], database: str) -> None:
    backend = open_backend(RendezvousParameters("sqlite", database, "job", 1, 1))[0]
    backend.set_state(b"cos\nsystem\n(S'true'\ntR.", None)
    assert isinstance(backend, Roster)
    announce(backend, NODES[0])
    status, out, _ = run(
        capsys, "state", "--backend=sqlite", f"--endpoint={database}", "--run-id=job"
    )
    assert status == 1
    assert "The document cannot be read" in out
    assert NODES[0].id in out


def test_the_state_on_a_bare_backend(capsys: pytest.CaptureFixture[str], bare: Any) -> None:
    framed = FramedBackend(bare)
    framed.set_state(encode_state(STATE), None)
    announce(framed, NODES[0], running=ROUND)
    before = bare.get_state()
    status, out, _ = run(capsys, "state", "--backend=bare", "--run-id=job")
    assert status == 0
    assert bare.get_state() == before
    assert f"{NODES[0].id}  10.0.0.0  running" in out
    assert f"{NODES[1].id}  10.0.0.1  absent" in out
