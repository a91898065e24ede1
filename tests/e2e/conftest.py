"""Fixtures: a backend to run on, and jobs on it whose processes end with the test."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from .harness import Job, Target


def sqlite_target(folder: Path) -> Target:
    path = folder / "rdzv.db"

    def wipe() -> None:
        with closing(sqlite3.connect(path, timeout=30.0)) as connection, connection:
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for (name,) in rows.fetchall():
                connection.execute(f'DELETE FROM "{name}"')

    return Target("sqlite", str(path), wipe)


TARGETS: dict[str, Callable[[Path], Target]] = {"sqlite": sqlite_target}


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return TARGETS[request.param](tmp_path)


@pytest.fixture
def new_job(target: Target, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs on the backend under test; takes what Job takes after its folder."""
    jobs: list[Job] = []

    def make(nnodes: str, **options: object) -> Job:
        job = Job(target, tmp_path / f"job-{len(jobs)}", nnodes, **options)  # type: ignore[arg-type]
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.close()
