"""Rendezvous in an SQL database, through SQLAlchemy Core; in this release SQLite."""

from rdzv.backends.sql.backend import SqlBackend
from rdzv.backends.sql.options import SqlOptions

__all__ = ["SqlBackend", "SqlOptions"]
