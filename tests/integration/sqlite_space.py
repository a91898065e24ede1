"""What the tests of the SQL backend and store share."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rdzv.backends.sql import SqlBackend, SqlOptions
from rdzv.conformance.target import Target
from rdzv.stores.sql import SqlStore

TABLES = ("schema", "runs", "states", "roster", "store", "queues", "writers")


class SqliteTarget(Target):
    """A database file; ``wipe`` loses its rows, or the file itself."""

    name = "sqlite"
    runs_on = f"SQLite {sqlite3.sqlite_version}"
    short_ttl_seconds = 0.3

    def __init__(self, path: Path, lose_file: bool = False) -> None:
        self.path = path
        self.lose_file = lose_file
        self.endpoint = str(path)
        self.made: list[SqlBackend | SqlStore] = []

    def connect(self, run_id: str = "job", options: SqlOptions | None = None) -> SqlBackend:
        backend = SqlBackend(str(self.path), run_id, options, name="sqlite")
        self.made.append(backend)
        return backend

    def store(self, run_id: str = "job") -> SqlStore:
        store = SqlStore(str(self.path), run_id)
        self.made.append(store)
        return store

    def corrupt(self, run_id: str = "job") -> None:
        with raw(self.path) as connection:
            connection.execute("UPDATE rdzv_states SET state = 'a text', version = version + 1")

    def recipe(self) -> tuple[str, dict[str, Any]]:
        return "rdzv.conformance.registered:RegisteredTarget", {
            "backend": "sqlite",
            "endpoint": str(self.path),
            "run_prefix": "",
        }

    def wipe(self) -> None:
        if self.lose_file:
            for path in self.path.parent.glob(f"{self.path.name}*"):
                path.unlink()
            return
        with raw(self.path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            for table in TABLES:
                connection.execute(f"DELETE FROM rdzv_{table}")
            connection.execute("COMMIT")

    def close(self) -> None:
        while self.made:
            self.made.pop().close()


class JournalTarget(SqliteTarget):
    """One with a rollback journal instead of a write-ahead log, as on a network's file system."""

    runs_on = f"{SqliteTarget.runs_on} without WAL"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Other processes leave the journal of a file as it is.
        self.connect().open()
        self.close()
        assert self.journal() == "delete"

    def connect(self, run_id: str = "job", options: SqlOptions | None = None) -> SqlBackend:
        allowed = replace(options or SqlOptions(), allow_network_filesystem=True)
        backend = SqlBackend(
            str(self.path), run_id, allowed, name="sqlite", filesystem_type=lambda _: "nfs4"
        )
        self.made.append(backend)
        return backend

    def store(self, run_id: str = "job") -> SqlStore:
        allowed = SqlOptions(allow_network_filesystem=True)
        store = SqlStore(str(self.path), run_id, options=allowed, filesystem_type=lambda _: "nfs4")
        self.made.append(store)
        return store

    def journal(self) -> str:
        with raw(self.path) as connection:
            return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of somebody else's."""
    connection = sqlite3.connect(
        os.fspath(path), timeout=10, isolation_level=None, check_same_thread=False
    )
    try:
        yield connection
    finally:
        connection.close()


def rows(path: Path, table: str) -> list[tuple[object, ...]]:
    with raw(path) as connection:
        return connection.execute(f"SELECT * FROM rdzv_{table}").fetchall()
