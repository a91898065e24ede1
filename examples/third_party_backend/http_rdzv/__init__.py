"""A rendezvous backend for rdzv over plain HTTP, with the small server that it talks to.

``backend`` is what rdzv asks of a backend, ``store`` the torch Store beside it, ``client`` the
HTTP of both; ``server`` and ``space`` are the server. This module is imported by the server and by
every process that imports torch's rendezvous, so it imports neither torch nor rdzv at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from http_rdzv.backend import HttpRendezvousBackend
    from http_rdzv.store import HttpStore

__all__ = ["create_backend"]


def create_backend(params: RendezvousParameters) -> tuple[HttpRendezvousBackend, HttpStore]:
    """The backend and the store that torchrun's parameters ask for. Nothing is connected yet.

    The endpoint is ``http://host:port`` or ``host:port``. A call of the backend takes no longer
    than the option ``read_timeout``, nor than 10 seconds; it is the store's timeout too, as with
    torch's ``c10d``. Raises ``RendezvousSettingsError`` for what cannot work.
    """
    from datetime import timedelta

    from http_rdzv.backend import REQUEST_SECONDS_MAX, HttpRendezvousBackend
    from http_rdzv.store import HttpStore
    from rdzv.settings import Settings

    settings = Settings.from_parameters(params)
    endpoint, run_id = settings.endpoint, settings.run_id
    # The longest call of the backend is two requests: a write, and a look at what became of it.
    request_seconds_max = min(settings.read_timeout_seconds / 2, REQUEST_SECONDS_MAX)
    backend = HttpRendezvousBackend(endpoint, run_id, request_seconds_max)
    timeout = timedelta(seconds=settings.read_timeout_seconds)
    return backend, HttpStore(endpoint, run_id, timeout, request_seconds_max)
