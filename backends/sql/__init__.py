"""Rendezvous in an SQL database, through SQLAlchemy Core; in this release SQLite."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rdzv.backends.sql.backend import SqlBackend
from rdzv.backends.sql.options import SqlOptions

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import RendezvousParameters

__all__ = ["SqlBackend", "SqlOptions", "create_backend"]


def create_backend(params: RendezvousParameters) -> tuple[SqlBackend, dist.Store]:
    """The backend and store that torchrun's parameters ask for, connected, the tables made.

    The endpoint is a path or an SQLAlchemy URL. Options: ``read_timeout`` (seconds, default 60;
    also the store's timeout, as in torch's ``c10d``), ``outage_timeout`` (600), ``closed_grace``
    (60), ``table_prefix`` (``rdzv_``), ``allow_network_filesystem`` (false).

    Raises ``RendezvousSettingsError`` for what cannot work, ``RendezvousConnectionError`` for
    what does not work now, ``RendezvousStateError`` where the tables are of another release.
    """
    options = SqlOptions.from_parameters(params)
    backend = SqlBackend(params.endpoint, params.run_id, options, name=params.backend)
    backend.open()
    # Stores stand on backends and are imported by them nowhere else: like an entry point, this
    # names the other half of the pair that torch's signature asks for.
    store = importlib.import_module("rdzv.stores.sql").store_beside(
        params.endpoint, params.run_id, options
    )
    return backend, store
