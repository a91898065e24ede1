"""Rendezvous in an SQL database, through SQLAlchemy Core."""

from rdzv.backends.sql.backend import SqlBackend
from rdzv.backends.sql.options import SqlOptions

__all__ = ["SqlBackend", "SqlOptions"]
