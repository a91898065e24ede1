"""The target of the mode without code: a backend by its name, or by ``module:function``.

Every clause gets run ids that nobody has used before, so it begins empty on whatever data the
server holds; what it leaves behind expires there like that of any other run.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv import registry
from rdzv.conformance.servers.base import with_address
from rdzv.conformance.target import Server, Target
from rdzv.errors import RendezvousSettingsError, mask_secrets
from rdzv.ports import Closable, GetsReady, Roster, Watch

NO_INTERFACE = "the backend is no rdzv.ports.{}; rdzv makes up for it"


class RegisteredTarget(Target):
    """What torchrun would use for that name, endpoint and configuration.

    A backend gets ready, as for a node that ``joins``, where it has a way to.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        config: Mapping[str, str] | None = None,
        without: Mapping[str, str] | None = None,
        server: Server | None = None,
        run_prefix: str | None = None,
        joins: bool = True,
    ) -> None:
        self.name = self._backend = backend
        self.server = server
        self.address = address_in(endpoint)
        self.endpoint = mask_secrets(endpoint)
        self._endpoint = endpoint
        self._given_without = dict(without or {})
        self._config = dict(config or {})
        self._joins = joins
        self._made: list[Any] = []
        self._run_prefix = f"{uuid.uuid4().hex[:12]}-" if run_prefix is None else run_prefix
        opened, self._has_store = self._open("probe")
        self.without = {**_lacking(opened, self._has_store), **(without or {})}
        self.close()

    def connect(self, run_id: str = "job") -> Any:
        backend = self._open(run_id)[0]
        if self._joins and isinstance(backend, GetsReady):
            backend.get_ready()
        return backend

    def store(self, run_id: str = "job") -> Store:
        store: Store = self._open(run_id)[1]
        return store

    def recipe(self) -> tuple[str, dict[str, Any]] | None:
        return f"{__name__}:{RegisteredTarget.__name__}", {
            "backend": self._backend,
            "endpoint": self._current_endpoint(),
            "config": self._config,
            "without": self._given_without,
            "run_prefix": self._run_prefix,
            # Each of these processes makes a few calls, and what they would get ready takes time
            # from those. So the two kinds of clients also meet.
            "joins": False,
        }

    def torchrun_arguments(self, run_id: str) -> list[str] | None:
        if ":" in self._backend:
            return None
        config = ",".join(f"{key}={value}" for key, value in self._config.items())
        return [
            f"--rdzv-backend={self._backend}",
            f"--rdzv-endpoint={self._current_endpoint()}",
            f"--rdzv-id={self._run_prefix}{run_id}",
            *([f"--rdzv-conf={config}"] if config else []),
        ]

    def close(self) -> None:
        while self._made:
            made = self._made.pop()
            if isinstance(made, Closable):
                made.close()

    def _open(self, run_id: str) -> tuple[Any, Any]:
        params = RendezvousParameters(
            backend=self._backend,
            endpoint=self._current_endpoint(),
            run_id=self._run_prefix + run_id,
            min_nodes=1,
            max_nodes=1,
            **self._config,
        )
        if ":" in self._backend:
            made = _load(self._backend)(params)
            opened = made if isinstance(made, tuple) else (made, None)
        else:
            opened = registry.open_backend(params)
        if not isinstance(opened[0], RendezvousBackend):
            kind = type(opened[0]).__name__
            raise RendezvousSettingsError(
                f"{self._backend} returned {kind}, which is no RendezvousBackend."
            )
        self._made += [part for part in opened if part is not None]
        return opened

    def _current_endpoint(self) -> str:
        if self.address is None or self.address == address_in(self._endpoint):
            return self._endpoint
        return with_address(self._endpoint, self.address)


def address_in(endpoint: str) -> tuple[str, int] | None:
    """The one host and port of an endpoint; None where it has none, or several.

    >>> address_in("redis://user:secret@db.example:6379/0"), address_in("db.example:2379")
    (('db.example', 6379), ('db.example', 2379))
    >>> address_in("/var/lib/run.db") is address_in("a:1;b:2") is address_in("db.example") is None
    True
    """
    has_scheme = "://" in endpoint
    try:
        parts = urlsplit(endpoint if has_scheme else f"//{endpoint}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return (host, port) if host and port else None


def _load(path: str) -> Any:
    module, _, function = path.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RendezvousSettingsError(
            f"--rdzv-backend={path}: cannot load {function!r} from {module!r} ({error}). It is to "
            "be a function that takes RendezvousParameters and returns a backend, or a backend "
            "and a store."
        ) from error


def _lacking(backend: Any, store: Any) -> dict[str, str]:
    lacking = {}
    if not isinstance(backend, Roster):
        lacking["roster"] = lacking["server_clock"] = NO_INTERFACE.format("Roster")
    if not isinstance(backend, Watch):
        lacking["watch"] = NO_INTERFACE.format("Watch")
    if store is None:
        lacking["store"] = "it comes with no store; rdzv uses a TCPStore of each round's rank 0"
    return lacking
