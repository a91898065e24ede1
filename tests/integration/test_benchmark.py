"""``make bench-join`` in small: what it measures, counts and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rdzv.conformance.plugin import server_or_not_run

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "join.py"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.full
def test_backends_are_measured_side_by_side(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server: Any = server_or_not_run(request, "redis")
    figures = tmp_path / "figures.json"
    done = bench(
        *("--nodes", "5", "--backends", "redis", "sqlite", "c10d", "--rounds", "1"),
        *("--endpoint", f"redis={server.endpoint()}", "--json", str(figures)),
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(figures.read_text())["measurements"]
    assert [one["backend"] for one in written] == ["redis", "sqlite", "c10d"]
    assert all(one["joined"] == 5 for one in written)
    assert all(0 < one["seconds"] <= one["seconds_from_first_start"] for one in written)
    redis, sqlite, _ = written
    # Each of five nodes reads, announces itself, confirms and reads the address of rank 0.
    assert 20 <= redis["join"]["requests"] < 200
    assert redis["join"]["commands"]["zadd"] >= 10
    assert redis["join"]["bytes_out"] > 1000
    assert sqlite["join"] is None, "no server counts for it"
    assert "c10d/this" in done.stdout


@pytest.mark.full
def test_what_is_not_done_in_time_is_said(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = bench(
        *("--nodes", "2", "--backends", "sqlite", "--rounds", "1", "--limit", "0.001"),
        *("--json", str(figures)),
    )
    assert done.returncode == 0, done.stderr
    assert "not done in 0.001 s, 0 of 2 have a rank" in done.stdout
    (measured,) = json.loads(figures.read_text())["measurements"]
    assert measured["seconds"] is None
    assert measured["error"] == ""


@pytest.mark.full
def test_what_fails_says_why(tmp_path: Path) -> None:
    endpoint = f"sqlite={tmp_path}/missing/folder/file.db"
    done = bench("--nodes", "2", "--backends", "sqlite", "--rounds", "1", "--endpoint", endpoint)
    assert done.returncode == 0, done.stderr
    assert "failed, 0 of 2 have a rank: RendezvousSettingsError: " in done.stdout


def test_a_backend_without_a_server_says_what_to_give() -> None:
    done = bench("--nodes", "2", "--backends", "unheard-of", "--rounds", "1")
    assert done.returncode != 0
    assert "--endpoint unheard-of=" in done.stderr
