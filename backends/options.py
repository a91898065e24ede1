"""What :class:`rdzv.settings.Settings` says to any backend on a server or a file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    from rdzv.settings import Settings

REQUEST_SECONDS_MAX = 5.0
"""A request that is not answered by then has failed: the caller asks again, or the next one."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options that all such backends have; in ``--rdzv-conf`` without ``_seconds``.

    Raises ``RendezvousSettingsError`` for a time that cannot work.
    """

    read_timeout_seconds: float = 60.0
    """No call lasts longer, whatever happens below."""
    keep_alive_interval_seconds: float = 5.0
    """A server's answer to one request is not waited for longer, but for a second if it is less."""
    outage_timeout_seconds: float = 600.0
    closed_grace_seconds: float = 60.0
    password: str | None = field(default=None, repr=False)
    """In place of the one in the endpoint."""

    def __post_init__(self) -> None:
        for name in ("read_timeout", "keep_alive_interval", "outage_timeout", "closed_grace"):
            seconds = getattr(self, f"{name}_seconds")
            if not (math.isfinite(seconds) and seconds > 0):
                raise RendezvousSettingsError(
                    f"{name}={seconds:g} cannot work: give a positive number of seconds"
                )

    @property
    def request_seconds(self) -> float:
        """Within so long a request is answered or has failed."""
        patience = max(1.0, self.keep_alive_interval_seconds)
        return min(self.read_timeout_seconds, patience, REQUEST_SECONDS_MAX)

    @property
    def lifetime_seconds(self) -> float:
        """How long at least a run's data outlive its last sign of life."""
        return self.outage_timeout_seconds + self.closed_grace_seconds


def common_options(settings: Settings) -> dict[str, Any]:
    """What of the user's choices every :class:`BackendOptions` takes, by name."""
    return {
        "read_timeout_seconds": settings.read_timeout_seconds,
        "keep_alive_interval_seconds": settings.keep_alive_interval_seconds,
        "outage_timeout_seconds": settings.outage_timeout_seconds,
        "closed_grace_seconds": settings.closed_grace_seconds,
        "password": settings.password,
    }
