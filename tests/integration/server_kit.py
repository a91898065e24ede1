"""What the tests of test servers share: ways to get one, and clients of each technology."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rdzv.conformance.servers.base import RealServer, ServerUnavailable
from rdzv.conformance.servers.local import LocalServer
from rdzv.conformance.servers.options import Options
from rdzv.conformance.servers.pool import ServerPool
from rdzv.conformance.servers.technologies import ALL

CALL_SECONDS_MAX = 1


class RedisClient:
    """A value under a name, by redis-py."""

    def __init__(self, endpoint: str) -> None:
        import redis

        self.unanswered: Any = (redis.RedisError,)
        self._redis: Any = redis.Redis.from_url(
            endpoint,
            socket_timeout=CALL_SECONDS_MAX,
            socket_connect_timeout=CALL_SECONDS_MAX,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        )

    def write(self, value: str) -> None:
        self._redis.set("kept", value)

    def read(self) -> str | None:
        found = self._redis.get("kept")
        return None if found is None else str(found.decode())

    def version(self) -> str:
        said = self._redis.info("server")
        return str(said.get("valkey_version", said["redis_version"]))

    def close(self) -> None:
        self._redis.close()


class SqlClient:
    """A row of a table, by SQLAlchemy and psycopg or PyMySQL; a connection for each call."""

    def __init__(self, endpoint: str) -> None:
        import sqlalchemy

        self._sqlalchemy = sqlalchemy
        self.unanswered: Any = (sqlalchemy.exc.OperationalError,)
        # PyMySQL's connect_timeout ends where the handshake begins.
        names = ["connect_timeout"] + ["read_timeout"] * endpoint.startswith("mysql")
        arguments = dict.fromkeys(names, CALL_SECONDS_MAX)
        self._engine = sqlalchemy.create_engine(
            endpoint, poolclass=sqlalchemy.NullPool, connect_args=arguments
        )

    def _run(self, *statements: str) -> list[Any]:
        with self._engine.begin() as connection:
            results = [connection.exec_driver_sql(statement) for statement in statements]
            return list(results[-1].scalars()) if results[-1].returns_rows else []

    def write(self, value: str) -> None:
        self._run(
            "CREATE TABLE IF NOT EXISTS kept (value VARCHAR(99))",
            "DELETE FROM kept",
            f"INSERT INTO kept VALUES ('{value}')",
        )

    def read(self) -> str | None:
        with self._engine.connect() as connection:
            there = self._sqlalchemy.inspect(connection).has_table("kept")
        found = self._run("SELECT value FROM kept") if there else []
        return str(found[0]) if found else None

    def version(self) -> str:
        postgresql = self._engine.dialect.name == "postgresql"
        return str(self._run("SHOW server_version" if postgresql else "SELECT VERSION()")[0])

    def close(self) -> None:
        self._engine.dispose()


class EtcdClient:
    """A key, by etcd-sdk-python; a client for each call, since one remembers failures."""

    def __init__(self, endpoint: str) -> None:
        import pyetcd  # type: ignore[import-untyped]

        self._pyetcd: Any = pyetcd
        self.unanswered: Any = (pyetcd.exceptions.Etcd3Exception,)
        host, _, port = endpoint.rpartition(":")
        self._place = {"host": host, "port": int(port), "timeout": CALL_SECONDS_MAX}

    def _call(self, call: Callable[[Any], Any]) -> Any:
        client = self._pyetcd.client(**self._place)
        try:
            return call(client)
        finally:
            client.close()

    def write(self, value: str) -> None:
        self._call(lambda client: client.put("kept", value))

    def read(self) -> str | None:
        found = self._call(lambda client: client.get("kept")[0])
        return None if found is None else str(found.decode())

    def version(self) -> str:
        return str(self._call(lambda client: client.status().version))

    def close(self) -> None:
        pass


CLIENTS: dict[str, Any] = {
    "redis": RedisClient,
    "valkey": RedisClient,
    "postgresql": SqlClient,
    "mysql": SqlClient,
    "etcd": EtcdClient,
}


class ServerCase:
    """A way to get a technology, started at most once at a time."""

    def __init__(self, kind: str, technology: str, options: Options) -> None:
        self.kind, self.technology = kind, technology
        self._options = options

    @contextlib.contextmanager
    def server(self) -> Iterator[RealServer]:
        if self.kind == "wheel":
            program = ALL[self.technology].from_wheel()
            if program is None:
                pytest.skip(f"no wheel with {self.technology}: pip install 'rdzv[dev]'")
            server: RealServer = LocalServer(ALL[self.technology], program)
            with contextlib.closing(server):
                yield server
            return
        mode = "docker" if self.kind == "docker" else "local"
        with contextlib.closing(ServerPool(Options(mode, images=self._options.images))) as pool:
            try:
                server = pool.get(self.technology)
            except ServerUnavailable as reason:
                pytest.skip(f"{self.technology} cannot be had: {reason}")
            yield server

    def client(self, server: RealServer) -> Any:
        return contextlib.closing(CLIENTS[self.technology](server.endpoint()))
