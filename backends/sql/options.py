"""What a user can set for the SQL backend and store, checked in one place."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from rdzv.errors import RendezvousSettingsError
from rdzv.settings import Settings

REQUEST_SECONDS_MAX = 5.0
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True)
class SqlOptions:
    """Options of :class:`rdzv.backends.sql.SqlBackend`; in ``--rdzv-conf`` without ``_seconds``.

    Raises :class:`rdzv.errors.RendezvousSettingsError` for a value that cannot work.
    """

    read_timeout_seconds: float = 60.0
    """No call lasts longer, for instance on a locked database."""
    keep_alive_interval_seconds: float = 5.0
    """A server's answer to one request is not waited for longer."""
    outage_timeout_seconds: float = 600.0
    closed_grace_seconds: float = 60.0
    """A run's records live for the sum of these two after its last sign of life."""
    table_prefix: str = "rdzv_"
    schema: str | None = None
    """The schema that holds the tables (on MySQL a database); SQLite has none."""
    create_tables: bool = True
    """Whether tables that are missing are made; else an administrator has to."""
    allow_network_filesystem: bool = False
    """SQLite only: use a file on NFS and the like, with rollback journal instead of WAL."""
    password: str | None = field(default=None, repr=False)
    """In place of the one in the URL."""

    def __post_init__(self) -> None:
        for name in ("read_timeout", "keep_alive_interval", "outage_timeout", "closed_grace"):
            seconds = getattr(self, f"{name}_seconds")
            if not (math.isfinite(seconds) and seconds > 0):
                raise RendezvousSettingsError(
                    f"{name}={seconds:g} cannot work: give a positive number of seconds"
                )
        if not _PREFIX.fullmatch(self.table_prefix):
            raise RendezvousSettingsError(
                f"table_prefix={self.table_prefix!r} cannot work: give up to 32 letters, digits "
                "and underscores, not beginning with a digit"
            )
        if self.schema is not None and not _SCHEMA.fullmatch(self.schema):
            raise RendezvousSettingsError(
                f"schema={self.schema!r} cannot work: give up to 63 letters, digits and "
                "underscores, not beginning with a digit"
            )

    @property
    def request_seconds(self) -> float:
        """Within so long a server has answered a request, or it has failed."""
        patience = max(1.0, self.keep_alive_interval_seconds)
        return min(self.read_timeout_seconds, patience, REQUEST_SECONDS_MAX)

    @property
    def lifetime_seconds(self) -> float:
        """How long a run's records live after its last sign of life."""
        return self.outage_timeout_seconds + self.closed_grace_seconds

    @classmethod
    def from_settings(cls, settings: Settings) -> SqlOptions:
        """What of the user's choices concerns this backend."""
        return cls(
            read_timeout_seconds=settings.read_timeout_seconds,
            keep_alive_interval_seconds=settings.keep_alive_interval_seconds,
            outage_timeout_seconds=settings.outage_timeout_seconds,
            closed_grace_seconds=settings.closed_grace_seconds,
            table_prefix=settings.table_prefix,
            schema=settings.schema,
            create_tables=settings.create_tables,
            allow_network_filesystem=settings.allow_network_filesystem,
            password=settings.password,
        )
