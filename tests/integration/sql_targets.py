"""Database servers as targets, with all that may be done to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from rdzv.backends.sql import SqlBackend, SqlOptions
from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.registered import RegisteredTarget
from rdzv.conformance.servers.base import DATABASE, PASSWORD, USER
from rdzv.conformance.servers.local import LocalServer
from rdzv.conformance.servers.programs import Program, Workplace, on_path
from rdzv.conformance.servers.technologies import PostgreSQL

TIMES = {"read_timeout": "2"}
"""Clauses in which nothing answers wait for it."""
TABLES = ("runs", "states", "roster", "store", "queues", "writers")


class SqlTarget(RegisteredTarget):
    """PostgreSQL, or MySQL or MariaDB. A wipe loses the rows of all runs."""

    short_ttl_seconds = 0.5
    call_seconds_max = 8.0

    def __init__(self, backend: str, server: Any, **options: Any) -> None:
        super().__init__(backend, server.endpoint(), {**TIMES, **options}, server=server)
        self.administered = server
        self.runs_on = f"{server.technology} {server.version}"

    def corrupt(self, run_id: str = "job") -> None:
        with administrator(self.administered) as connection:
            connection.execute(
                sa.text("UPDATE rdzv_states SET state = :text, version = version + 1"),
                {"text": b"a text"},
            )

    def wipe(self) -> None:
        with administrator(self.administered) as connection:
            for table in TABLES:
                connection.execute(sa.text(f"DELETE FROM rdzv_{table}"))


class PgBouncer(PostgreSQL):
    """The pooler in transaction mode, in front of a PostgreSQL server."""

    name = "pgbouncer"
    how = "apt install pgbouncer"

    def __init__(self, behind: tuple[str, int]) -> None:
        self._behind = behind

    def find(self) -> Program | None:
        return on_path("pgbouncer")

    def prepare(self, program: Program, place: Workplace) -> None:
        place.data.mkdir()
        place.data.chmod(0o755)

    def command(self, program: Program, place: Workplace, port: int, port_2: int) -> list[str]:
        host, behind = self._behind
        (place.data / "users").write_text(f'"{USER}" "{PASSWORD}"\n')
        settings = place.data / "settings"
        settings.write_text(
            f"[databases]\n{DATABASE} = host={host} port={behind}\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = scram-sha-256\nauth_file = {place.data}/users\n"
            "pool_mode = transaction\ndefault_pool_size = 8\nmax_client_conn = 500\n"
        )
        return [str(program.path), str(settings)]


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


def empty_server(request: pytest.FixtureRequest, technology: str) -> Any:
    """The technology's server, with no table of ours."""
    server = server_or_not_run(request, technology)
    server.backend = technology
    with administrator(server) as connection:
        drop_all(connection)
    return server


def asked(server: Any, question: str) -> Any:
    """The first value of the answer."""
    with administrator(server) as connection:
        return connection.execute(sa.text(question)).scalar()


def listens(backend: Any) -> bool:
    """Whether the server is to tell this backend or store of changes. The server itself shows each
    session's last statement only, and not who listens."""
    return backend._database._signal._line is not None


def ours(server: Any, state: str = "") -> int:
    """Connections to a PostgreSQL server, but for the one that asks."""
    return int(
        asked(
            server,
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' "
            f"AND pid <> pg_backend_pid() {state}",
        )
    )


def backend_on(server: Any, run_id: str = "run", **options: Any) -> SqlBackend:
    return SqlBackend(server.endpoint(), run_id, SqlOptions(**options))


def as_administrator(server: Any) -> str:
    if server.backend == "postgresql":
        return str(server.endpoint())
    if not isinstance(server, LocalServer):
        pytest.skip("it takes the root account of a server that these tests have started")
    return f"mysql+pymysql://root@/rdzv?unix_socket={server.directory}/socket"
