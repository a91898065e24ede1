"""Database servers as targets, with all that may be done to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from rdzv.conformance.registered import RegisteredTarget

TIMES = {"read_timeout": "2"}
"""Clauses in which nothing answers wait for it."""
TABLES = ("runs", "states", "roster", "store", "queues", "writers")


class SqlTarget(RegisteredTarget):
    """PostgreSQL, or MySQL or MariaDB. A wipe loses the rows of all runs."""

    short_ttl_seconds = 0.5
    call_seconds_max = 8.0

    def __init__(self, backend: str, server: Any, **options: Any) -> None:
        super().__init__(backend, server.endpoint(), {**TIMES, **options}, server=server)
        self.runs_on = f"{server.technology} {server.version}"

    def corrupt(self, run_id: str = "job") -> None:
        with administrator(self.server) as connection:
            connection.execute(
                sa.text("UPDATE rdzv_states SET state = :text, version = version + 1"),
                {"text": b"a text"},
            )

    def wipe(self) -> None:
        with administrator(self.server) as connection:
            for table in TABLES:
                connection.execute(sa.text(f"DELETE FROM rdzv_{table}"))


@contextmanager
def administrator(server: Any) -> Iterator[sa.Connection]:
    """A transaction of somebody else's."""
    engine = sa.create_engine(server.endpoint(), poolclass=sa.NullPool)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def drop_all(connection: sa.Connection) -> None:
    """Remove all tables of rdzv."""
    for table in sa.inspect(connection).get_table_names():
        if table.startswith("rdzv_"):
            connection.execute(sa.text(f"DROP TABLE {table}"))
