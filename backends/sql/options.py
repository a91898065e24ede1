"""What a user can set for the SQL backend and store, checked in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rdzv.backends.options import BackendOptions, common_options
from rdzv.errors import RendezvousSettingsError
from rdzv.settings import Settings

_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True)
class SqlOptions(BackendOptions):
    """Options of :class:`rdzv.backends.sql.SqlBackend`; in ``--rdzv-conf`` without ``_seconds``.

    Raises :class:`rdzv.errors.RendezvousSettingsError` for a value that cannot work.
    """

    table_prefix: str = "rdzv_"
    schema: str | None = None
    """The schema that holds the tables (on MySQL a database); SQLite has none."""
    create_tables: bool = True
    """Whether tables that are missing are made; else an administrator has to."""
    allow_network_filesystem: bool = False
    """SQLite only: use a file on NFS and the like, with rollback journal instead of WAL."""

    def __post_init__(self) -> None:
        # Not super(): a class with slots is another than the one that its methods know.
        BackendOptions.__post_init__(self)
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

    @classmethod
    def from_settings(cls, settings: Settings) -> SqlOptions:
        """What of the user's choices concerns this backend."""
        return cls(
            **common_options(settings),
            table_prefix=settings.table_prefix,
            schema=settings.schema,
            create_tables=settings.create_tables,
            allow_network_filesystem=settings.allow_network_filesystem,
        )
