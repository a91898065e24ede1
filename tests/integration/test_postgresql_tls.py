"""PostgreSQL that is reached by TLS alone, with an authority of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rdzv.backends.sql import SqlBackend
from rdzv.conformance.servers.local import LocalServer
from rdzv.conformance.servers.programs import Program, Workplace
from rdzv.conformance.servers.technologies import PostgreSQL
from rdzv.conformance.suites import BackendSuite
from rdzv.conformance.target import Target
from rdzv.errors import RendezvousConnectionError

from .certificates import certify
from .sql_targets import SqlTarget, asked

pytestmark = pytest.mark.full


class TlsPostgreSQL(PostgreSQL):
    """Clients compare the server's certificate with its address."""

    def __init__(self) -> None:
        self._folder = Path()

    def prepare(self, program: Program, place: Workplace) -> None:
        self._folder = place.directory
        if not (place.directory / "ca.pem").exists():
            certify(place.run)
        super().prepare(program, place)
        (place.data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")

    def command(self, program: Program, place: Workplace, port: int, port_2: int) -> list[str]:
        folder = place.directory
        settings = [f"ssl_cert_file={folder}/server.pem", f"ssl_key_file={folder}/server.key"]
        words = [word for setting in ("ssl=on", *settings) for word in ("-c", setting)]
        return [*super().command(program, place, port, port_2), *words]

    def endpoint(self, host: str, port: int) -> str:
        url = super().endpoint(host, port)
        return f"{url}?sslmode=verify-full&sslrootcert={self._folder}/ca.pem"


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    technology = TlsPostgreSQL()
    program = technology.find()
    if program is None:
        pytest.skip(f"there is no PostgreSQL on this machine: {technology.how}")
    if shutil.which("openssl") is None:
        pytest.skip("it takes openssl to make certificates")
    with closing(LocalServer(technology, program)) as server:
        yield server


class TestTlsBackend(BackendSuite):
    @pytest.fixture
    def target(self, server: Any) -> Iterator[Target]:
        with closing(SqlTarget("postgresql", server)) as target:
            yield target


def test_all_connections_are_encrypted(server: LocalServer) -> None:
    with closing(SqlBackend(server.endpoint(), "run")) as backend:
        backend.open()
        question = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE "
        ours = "backend_type = 'client backend' AND pid <> pg_backend_pid()"
        assert asked(server, f"{question} {ours} AND ssl") >= 1
        assert asked(server, f"{question} {ours} AND NOT ssl") == 0


def test_a_server_that_another_authority_vouches_for_is_refused(server: LocalServer) -> None:
    other = str(server.directory / "client.pem")
    endpoint = server.endpoint().replace(str(server.directory / "ca.pem"), other)
    with (
        closing(SqlBackend(endpoint, "run")) as backend,
        pytest.raises(RendezvousConnectionError, match="certificate verify failed"),
    ):
        backend.open()
