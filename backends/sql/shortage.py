"""Whether connections to PostgreSQL are short: the limits, and how many are in use.

The limits are read once, the connections counted each time that somebody wants to keep one: first
all of them, which costs least, and whose they are only where that might be too many. Of the
connections of others a common role sees whose they are and to what database, but not of which
type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIMITS = """
SELECT pg_backend_pid(), current_setting('max_connections')::int, role.rolconnlimit, role.oid,
       base.datconnlimit, base.oid
  FROM pg_roles AS role, pg_database AS base
 WHERE role.rolname = session_user AND base.datname = current_database()
"""
COUNT = "SELECT pg_backend_pid(), count(*) FROM pg_stat_get_backend_idset()"
"""The server's number of the process that answers, and of all its processes how many there are:
those that serve a connection and some more."""
# pg_stat_activity looks up the names of all roles and databases besides, and costs five times as
# much.
_USED = """
SELECT count(*), count(*) FILTER (WHERE usesysid = %s), count(*) FILTER (WHERE datid = %s)
  FROM pg_stat_get_activity(NULL) WHERE datid <> 0 AND usesysid <> 0
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many connections there may be; less than 0 is any number."""

    is_direct: bool
    """Whether the server itself was at the other end of the connection, and not a pooler, which
    promises process numbers of its own."""
    of_server: int
    of_role: int
    role: int
    """Its number in the server's catalogue."""
    of_database: int
    database: int

    @classmethod
    def of(cls, driver: Any, row: Sequence[Any]) -> Limits:
        """By the answer to :data:`LIMITS` on a connection of the role to the database."""
        process, *numbers = row
        return cls(process == driver.pgconn.backend_pid, *numbers)

    def are_short(self, driver: Any, processes: int) -> bool:
        """Whether more than half of the connections that may be are; the server has so many
        processes."""
        if not self._is_short(processes, processes, processes):
            return False
        used = driver.execute(_USED, (self.role, self.database)).fetchone()
        return self._is_short(*used)

    def _is_short(self, of_server: int, of_role: int, of_database: int) -> bool:
        allowed = (self.of_server, self.of_role, self.of_database)
        used = (of_server, of_role, of_database)
        return any(most >= 0 and 2 * n > most for most, n in zip(allowed, used, strict=True))
