"""Rendezvous in an SQL database, through SQLAlchemy Core; in this release SQLite."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rdzv.backends.sql.backend import SqlBackend
from rdzv.backends.sql.options import SqlOptions
from rdzv.settings import Settings

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import RendezvousParameters

__all__ = ["SqlBackend", "SqlOptions", "create_backend"]


def create_backend(params: RendezvousParameters) -> tuple[SqlBackend, dist.Store]:
    """The backend and store that torchrun's parameters ask for, connected, the tables made.

    The endpoint is a path or an SQLAlchemy URL. Options: see :class:`SqlOptions`; ``read_timeout``
    is also the store's timeout, as in torch's ``c10d``.

    Raises ``RendezvousSettingsError`` for what cannot work, ``RendezvousConnectionError`` for
    what does not work now, ``RendezvousStateError`` where the tables are of another release.
    """
    settings = Settings.from_parameters(params)
    options = SqlOptions.from_settings(settings)
    backend = SqlBackend(settings.endpoint, settings.run_id, options, name=settings.backend)
    backend.open()
    # Stores stand on backends and are imported by them nowhere else: like an entry point, this
    # names the other half of the pair that torch's signature asks for.
    store = importlib.import_module("rdzv.stores.sql").store_beside(
        settings.endpoint, settings.run_id, options
    )
    return backend, store
