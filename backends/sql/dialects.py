"""Which dialect an endpoint asks for. What differs among databases is in the modules beside it:
``sqlite``, and ``server`` for what ``postgresql`` and ``mysql`` share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from rdzv.backends.sql import files
from rdzv.backends.sql.base import Dialect
from rdzv.backends.sql.options import SqlOptions
from rdzv.backends.sql.sqlite import SqliteDialect
from rdzv.errors import RendezvousSettingsError, mask_secrets, secrets_in

_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+|\[[0-9A-Fa-f:]+\]:\d+")
_KINDS = {
    "sqlite": "sqlite",
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
}
_EXAMPLES = {
    "sqlite": "--rdzv-endpoint=/tmp/job.db",
    "postgresql": "--rdzv-endpoint=db.example:5432/rdzv, or postgresql://user@host/database",
    "mysql": "--rdzv-endpoint=db.example:3306/rdzv, or mysql://user@host/database",
    "sql": "--rdzv-endpoint=postgresql://user@host/database",
}


def dialect_for(
    endpoint: str,
    options: SqlOptions,
    filesystem_type: Callable[[Path], str] = files.filesystem_type,
    *,
    name: str = "sql",
) -> Dialect:
    """The dialect for an endpoint: an SQLAlchemy URL, or the path of an SQLite file; under the
    name ``postgresql`` or ``mysql`` also ``host:port/database``.

    Raises ``RendezvousSettingsError`` where the endpoint cannot work, ``ModuleNotFoundError``
    where its driver is missing; nothing is opened yet.
    """
    if not endpoint:
        raise RendezvousSettingsError(
            f"no database was named: give for instance {_EXAMPLES.get(name, _EXAMPLES['sql'])}"
        )
    if "://" not in endpoint:
        if name not in ("postgresql", "mysql"):
            return _sqlite(endpoint, options, filesystem_type)
        endpoint = f"{name}://{endpoint}"
    url = _url(endpoint)
    kind = _KINDS.get(url.get_backend_name())
    if kind is None:
        raise _refusal(
            endpoint,
            f"{url.drivername} is not part of this release of rdzv; postgresql, mysql, mariadb and "
            "sqlite are",
        )
    if name in _KINDS and _KINDS[name] != kind:
        raise _refusal(
            endpoint, f"--rdzv-backend={name} takes no {kind} URL; use --rdzv-backend={kind}"
        )
    if kind == "sqlite":
        return _sqlite(_sqlite_path(endpoint, url), options, filesystem_type)
    if kind == "postgresql":
        # The drivers are needed by those alone who use them.
        from rdzv.backends.sql.postgresql import PostgresqlDialect

        return PostgresqlDialect(url, options)
    from rdzv.backends.sql.mysql import MysqlDialect

    return MysqlDialect(url, options)


def _refusal(endpoint: str, why: str) -> RendezvousSettingsError:
    return RendezvousSettingsError(f"{mask_secrets(endpoint, *secrets_in(endpoint))}: {why}")


def _url(endpoint: str) -> sa.URL:
    scheme, _, rest = endpoint.partition("://")
    # SQLAlchemy has dropped this name, which other programs print.
    scheme = "postgresql" if scheme == "postgres" else scheme
    try:
        url = sa.make_url(f"{scheme}://{rest}")
        url.get_backend_name()
        return url
    except (sa.exc.ArgumentError, ValueError):
        # Without the parser's words, which may hold a part of a password.
        raise _refusal(
            endpoint,
            "this is no URL that SQLAlchemy can read; percent-encode what is no letter or digit in "
            "user and password. For SQLite give a path, or sqlite:////absolute/path.db",
        ) from None


def _sqlite(
    path: str, options: SqlOptions, filesystem_type: Callable[[Path], str]
) -> SqliteDialect:
    if path in ("", ":memory:") or path.startswith("file:"):
        raise RendezvousSettingsError(
            f"{mask_secrets(path or 'sqlite://')}: a database in memory can be seen by one process "
            "only, and SQLite's file: names are not supported; give the path of a file, such as "
            "--rdzv-endpoint=/tmp/job.db"
        )
    if _HOST_AND_PORT.fullmatch(path):
        raise RendezvousSettingsError(
            f"{path} looks like a host and port, but this backend is a file: give its path, such "
            f"as --rdzv-endpoint=/tmp/job.db (or ./{path} if that is its name)"
        )
    if "\0" in path:
        raise RendezvousSettingsError("the path of the database holds a NUL character")
    return SqliteDialect(Path(path), options, filesystem_type)


def _sqlite_path(endpoint: str, url: sa.URL) -> str:
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise _refusal(
            endpoint,
            f"{url.drivername} is not part of this release of rdzv; give the path of a file, or "
            "sqlite:////absolute/path.db",
        )
    if url.host:
        raise _refusal(
            endpoint,
            f"it names the host {url.host!r}, but SQLite has none: an absolute path takes four "
            "slashes, sqlite:////absolute/path.db",
        )
    if url.query:
        raise _refusal(endpoint, "nothing may follow a '?'; set options in --rdzv-conf")
    return url.database or ""
