"""Fixtures: SQLite, as torchrun's users choose it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rdzv.conformance.registered import RegisteredTarget
from rdzv.conformance.target import Target


class SqliteTarget(RegisteredTarget):
    """By its registered name; a wipe loses all rows."""

    def __init__(self, path: Path) -> None:
        super().__init__("sqlite", str(path))
        self._path = path

    def wipe(self) -> None:
        with closing(sqlite3.connect(self._path, timeout=30.0)) as connection, connection:
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for (name,) in rows.fetchall():
                connection.execute(f'DELETE FROM "{name}"')


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    target = SqliteTarget(tmp_path / "rdzv.db")
    yield target
    target.close()
