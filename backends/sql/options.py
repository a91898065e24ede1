"""What a user can set for the SQL backend and store, checked in one place."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True)
class SqlOptions:
    """Options of :class:`rdzv.backends.sql.SqlBackend`; in ``--rdzv-conf`` without ``_seconds``.

    Raises :class:`rdzv.errors.RendezvousSettingsError` for a value that cannot work.
    """

    read_timeout_seconds: float = 60.0
    """No call lasts longer, for instance on a locked database."""
    outage_timeout_seconds: float = 600.0
    closed_grace_seconds: float = 60.0
    """A run's records live for the sum of these two after its last sign of life."""
    table_prefix: str = "rdzv_"
    allow_network_filesystem: bool = False
    """SQLite only: use a file on NFS and the like, with rollback journal instead of WAL."""

    def __post_init__(self) -> None:
        for name in ("read_timeout", "outage_timeout", "closed_grace"):
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

    @property
    def lifetime_seconds(self) -> float:
        """How long a run's records live after its last sign of life."""
        return self.outage_timeout_seconds + self.closed_grace_seconds

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> SqlOptions:
        """The options a user gave in ``--rdzv-conf``."""
        try:
            allow = params.get_as_bool("allow_network_filesystem", False)
        except ValueError as error:
            raise RendezvousSettingsError(
                "allow_network_filesystem must be true or false, not "
                f"{params.get('allow_network_filesystem')!r}"
            ) from error
        return cls(
            read_timeout_seconds=_seconds(params, "read_timeout", 60.0),
            outage_timeout_seconds=_seconds(params, "outage_timeout", 600.0),
            closed_grace_seconds=_seconds(params, "closed_grace", 60.0),
            table_prefix=str(params.get("table_prefix", "rdzv_")),
            allow_network_filesystem=bool(allow),
        )


def _seconds(params: RendezvousParameters, name: str, default: float) -> float:
    value = params.get(name, default)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RendezvousSettingsError(
            f"{name}={value!r} cannot work: give a positive number of seconds"
        ) from error
