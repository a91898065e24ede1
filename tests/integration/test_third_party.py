"""A third party's project beside rdzv's wheel: it installs, is found, passes the kit, and runs.

The wheels are built from copies, so that nothing is written into this checkout, and go into an
environment of their own, so that what is tested is what a user gets. What they need besides,
torch first of all, is seen from there but not installed anew. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from rdzv.conformance.process_server import ProcessServer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "third_party_backend"
PARTS = ("backends", "handler", "stores", "tests/conformance")
FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg")
LITTER = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".*")
BUILD_SECONDS_MAX = 60.0
KIT_SECONDS_MAX = 240.0
JOB_SECONDS_MAX = 60.0
READ_TIMEOUT_SECONDS = 3
CONFIGURATION = "join_timeout=45,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4"
ADAPTED = {"roster", "server_clock", "watch"}
BOOKS = {"backend", "roster", "watch", "store"}


@dataclass(frozen=True)
class Installation:
    """An environment with both wheels."""

    folder: Path
    python: str

    def run(self, *arguments: str) -> str:
        """What the program prints, which must end well."""
        return _output([self.python, *arguments], self.folder, 60.0)

    @contextlib.contextmanager
    def running(self, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """A program that is ended, with its children, when the block ends."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                [self.python, *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**_plain_environment(), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        try:
            yield process
        finally:
            _end(process)


def _plain_environment() -> dict[str, str]:
    """Without what would lead Python or pytest to this checkout."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("PYTEST_")
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that has not ended. It is asked first, as torchrun's workers and the kit's
    servers are in process groups of their own, and only it can end those."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _output(command: Sequence[str], folder: Path, seconds_max: float) -> str:
    outcome = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds_max,
        env=_plain_environment(),
    )
    assert outcome.returncode == 0, f"{command} ended with {outcome.returncode}\n{outcome.stdout}"
    return outcome.stdout


def _environment(folder: Path) -> tuple[str, Path]:
    """A new environment that sees the packages of this one, but none that is linked into it: not
    the editable rdzv. Its Python, and the folder of its own packages."""
    made = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)]
    subprocess.run(made, check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "seen.pth").write_text("".join(f"{path}\n" for path in seen), encoding="utf-8")
    return str(folder / "bin" / "python"), packages


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("third-party")
    sources = folder / "sources"
    for part in PARTS:
        shutil.copytree(ROOT / part, sources / "rdzv" / part, ignore=LITTER)
    for file in FILES:
        shutil.copy(ROOT / file, sources / "rdzv")
    shutil.copytree(EXAMPLE, sources / "rdzv-http", ignore=LITTER)
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--no-index", "--no-deps", "--no-build-isolation", f"--wheel-dir={wheels}"]
    _output([*pip, *build, "sources/rdzv", "sources/rdzv-http"], folder, BUILD_SECONDS_MAX)
    found = sorted(str(path) for path in wheels.iterdir())
    assert [Path(path).name.split("-")[0] for path in found] == ["rdzv", "rdzv_http"]
    python, packages = _environment(folder / "venv")
    install = ["install", "--no-index", "--no-deps", "--no-compile", f"--target={packages}", *found]
    _output([*pip, *install], folder, BUILD_SECONDS_MAX)
    # The tests alone: beside the sources, those would be imported.
    for part in ("pyproject.toml", "tests"):
        shutil.move(sources / "rdzv-http" / part, folder)
    shutil.rmtree(sources)
    return Installation(folder, python)


@pytest.fixture(scope="module")
def server(installed: Installation) -> Iterator[ProcessServer]:
    command = [installed.python, "-m", "http_rdzv.server", "--port={port}", "--data={data}/journal"]
    server = ProcessServer(command, installed.folder / "server", technology="rdzv-http")
    yield server
    server.close()


def _endpoint(server: ProcessServer) -> str:
    host, port = server.address
    return f"http://{host}:{port}"


def test_it_is_found_by_its_entry_points(installed: Installation) -> None:
    program = """
import json, sys
import rdzv, rdzv.conformance, rdzv.registry, rdzv.stores, http_rdzv
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
print(json.dumps({
    "files": [m.__file__ for m in (rdzv, rdzv.conformance, rdzv.stores, http_rdzv)],
    "ours": {one.name: one.factory for one in rdzv.registry.known_backends()}["http"],
    "torch": "http" in rendezvous_handler_registry._registry,
}))
"""
    found = json.loads(installed.run("-c", program).splitlines()[-1])
    outside = [file for file in found["files"] if not file.startswith(f"{installed.folder}/venv/")]
    assert not outside, "what was imported is not what was installed"
    assert found["ours"] == "http_rdzv:create_backend"
    assert found["torch"]


@pytest.fixture(scope="module")
def reports(installed: Installation, server: ProcessServer) -> dict[str, dict[str, Any]]:
    """What the kit found by subclass and by URL. Both at once: most of the time they wait."""
    ways = {
        "subclass": ["tests"],
        "url": [
            *("--pyargs", "rdzv.conformance", "--rdzv-backend=http"),
            f"--rdzv-suites={','.join(sorted(BOOKS))}",
            f"--rdzv-endpoint={_endpoint(server)}",
            f"--rdzv-conf=read_timeout={READ_TIMEOUT_SECONDS}",
        ],
    }
    logs = {way: installed.folder / f"{way}.log" for way in ways}
    files = {way: installed.folder / f"{way}.json" for way in ways}
    deadline = time.monotonic() + KIT_SECONDS_MAX
    with contextlib.ExitStack() as stack:
        runs = {}
        for way, arguments in ways.items():
            options = ["-q", "-p", "no:cacheprovider", f"--rdzv-report={files[way]}"]
            program = installed.running(logs[way], "-m", "pytest", *options, *arguments)
            runs[way] = stack.enter_context(program)
        codes = {way: _status(run, deadline) for way, run in runs.items()}
    for way, code in codes.items():
        assert code == 0, f"the kit by {way}: {code}\n{_text(logs[way])}"
    found = {way: json.loads(file.read_text(encoding="utf-8")) for way, file in files.items()}
    assert [len(found[way]) for way in ways] == [1, 1], "each run has one target"
    return {way: targets[0] for way, targets in found.items()}


def _status(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Its exit status; None where it has not ended by then."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(max(0.0, deadline - time.monotonic()))
    return None


def _text(*logs: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)


@pytest.mark.timeout(KIT_SECONDS_MAX + BUILD_SECONDS_MAX)
def test_it_passes_the_kit_by_subclass(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["subclass"]
    _check(report)
    assert report["runs_on"].startswith("rdzv-http ")
    not_run = {one["id"] for one in report["outcomes"] if one["outcome"] == "not run"}
    assert not not_run, "the target of the example lets the kit do everything"


@pytest.mark.timeout(KIT_SECONDS_MAX + BUILD_SECONDS_MAX)
def test_it_passes_the_kit_by_url(
    reports: dict[str, dict[str, Any]], server: ProcessServer
) -> None:
    report = reports["url"]
    _check(report)
    assert report["endpoint"] == _endpoint(server)


def _check(report: dict[str, Any]) -> None:
    assert report["good"]
    assert report["complete"], report["left_out"]
    assert report["target"] == "http"
    assert set(report["without"]) == ADAPTED
    by_outcome: dict[str, set[str]] = {}
    for one in report["outcomes"]:
        by_outcome.setdefault(one["outcome"], set()).add(one["id"])
    held = {clause.split("/")[0] for clause in by_outcome["holds"]}
    assert {"backend", "store"} <= held
    assert {one["id"].split("/")[0] for one in report["outcomes"]} >= BOOKS
    assert "deviates" not in by_outcome, "the example declares no deviation"


@pytest.mark.timeout(JOB_SECONDS_MAX + BUILD_SECONDS_MAX)
def test_a_job_meets_on_it(installed: Installation, server: ProcessServer, tmp_path: Path) -> None:
    options = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=http",
        f"--rdzv-endpoint={_endpoint(server)}",
        "--rdzv-id=third-party",
        f"--rdzv-conf={CONFIGURATION}",
        f"--log-dir={tmp_path / 'torchrun'}",
    ]
    command = ["-m", "torch.distributed.run", *options, str(EXAMPLE / "train.py"), str(tmp_path)]
    logs = [tmp_path / f"agent{index}.log" for index in range(2)]
    deadline = time.monotonic() + JOB_SECONDS_MAX
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(installed.running(log, *command)) for log in logs]
        codes = [_status(agent, deadline) for agent in agents]
    assert codes == [0, 0], _text(*logs)
    sums = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert sums == [{"rank": rank, "sum": 3.0, "world": 2} for rank in range(2)], _text(*logs)
    with urlopen(f"{_endpoint(server)}/runs/third-party/document", timeout=10) as answer:
        assert answer.read(), "the job has left its document on the server"
