"""Whether connections to PostgreSQL are short: the limits, and how many are in use.

The limits are read once, the connections counted each time that somebody wants to keep one. Of
the connections of others a common role sees whose they are and to what database, but not of which
type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LIMITS = """
SELECT current_setting('max_connections')::int, role.rolconnlimit, role.oid, base.datconnlimit,
       base.oid
  FROM pg_roles AS role, pg_database AS base
 WHERE role.rolname = session_user AND base.datname = current_database()
"""
# pg_stat_activity looks up the names of all roles and databases besides, and costs five times as
# much.
_USED = """
SELECT pg_backend_pid(), count(*), count(*) FILTER (WHERE usesysid = %s),
       count(*) FILTER (WHERE datid = %s)
  FROM pg_stat_get_activity(NULL) WHERE datid <> 0 AND usesysid <> 0
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many connections there may be; less than 0 is any number."""

    of_server: int
    of_role: int
    role: int
    """Its number in the server's catalogue."""
    of_database: int
    database: int

    @classmethod
    def read(cls, driver: Any) -> Limits:
        """By a connection of the role to the database."""
        return cls(*driver.execute(_LIMITS).fetchone())

    def look(self, driver: Any) -> tuple[int, bool]:
        """The server's number of the process that answers, and whether connections are short."""
        process, *used = driver.execute(_USED, (self.role, self.database)).fetchone()
        return process, self._are_short(*used)

    def _are_short(self, of_server: int, of_role: int, of_database: int) -> bool:
        """Whether more than half of what may be is."""
        allowed = (self.of_server, self.of_role, self.of_database)
        used = (of_server, of_role, of_database)
        return any(most >= 0 and 2 * n > most for most, n in zip(allowed, used, strict=True))
