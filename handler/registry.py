"""From a backend's name to a handler.

Rules:

* A backend is an entry point of group ``rdzv.backends``: its name, and a factory
  ``create_backend(params) -> (backend, store)``. It is imported when it is chosen, not before.
  Its module may name the ``--rdzv-conf`` options that only it knows: ``EXTRA_OPTIONS``, a
  frozenset. What all backends share is checked before the factory is called.
* A name that this project promises but has no entry point for is not built yet, and says so.
* A missing driver becomes the name of the extra to install. No other ImportError is touched: it
  is somebody's bug, and hiding it would hide the bug.
* Factories see the endpoint as ``env:NAME`` resolves it; the caller's parameters stay as they are.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.metadata
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

import rdzv
from rdzv.errors import RendezvousError, RendezvousSettingsError
from rdzv.ports import Closable
from rdzv.settings import Settings, resolve_endpoint

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    Factory = Callable[[RendezvousParameters], tuple[RendezvousBackend, Store]]

logger = logging.getLogger(__name__)

GROUP = "rdzv.backends"


@dataclass(frozen=True, slots=True)
class KnownBackend:
    """A name for ``--rdzv-backend``."""

    name: str
    endpoint: str = ""
    """What ``--rdzv-endpoint`` may be, in words."""
    extras: tuple[str, ...] = ()
    """The extras that bring its drivers; none where none is needed."""
    factory: str = ""
    """``module:function``; "" where the installation does not register it."""


_OURS = (
    KnownBackend(
        "redis",
        "host:port, redis://, rediss://, unix://, redis+sentinel://, redis+cluster://",
        ("redis",),
    ),
    KnownBackend("sql", "an SQLAlchemy URL", ("postgresql", "mysql")),
    KnownBackend("postgresql", "host:port/database or a URL", ("postgresql",)),
    KnownBackend("mysql", "host:port/database or a URL", ("mysql",)),
    KnownBackend("sqlite", "the path of a file on this machine"),
    KnownBackend("etcd-v3", "host:port[;host:port...], etcd:// or etcds://", ("etcd",)),
    KnownBackend("tcpstore", "host:port"),
    KnownBackend("filestore", "the path of a file that all nodes share"),
)
_EXTRA_OF_MODULE = {
    "redis": "redis",
    "hiredis": "redis",
    "psycopg": "postgresql",
    "pymysql": "mysql",
    "pyetcd": "etcd",
    "grpc": "etcd",
    "google": "etcd",
}
_TORCHS_OWN = ("c10d", "etcd", "etcd-v2", "static")


def known_backends() -> tuple[KnownBackend, ...]:
    """All names: those of this project, then those of third parties."""
    installed = _entry_points()
    known = [
        replace(one, factory=installed[one.name].value if one.name in installed else "")
        for one in _OURS
    ]
    ours = {one.name for one in known}
    others = sorted(set(installed) - ours)
    return (*known, *(KnownBackend(name, factory=installed[name].value) for name in others))


def create(params: RendezvousParameters, name: str | None = None) -> RendezvousHandler:
    """The handler for ``params``, on the backend called ``name`` (default: ``params.backend``).

    Raises ``RendezvousSettingsError`` for what cannot work as given, and what the backend's
    factory raises, or the backend where it gets ready (:class:`rdzv.ports.GetsReady`).
    """
    from rdzv.handler import create_handler

    _log_where_torch_logs()
    params = _resolved(params)
    backend, store = _open(params, name or params.backend)
    try:
        handler = create_handler(store, backend, params)
        if isinstance(store, Closable):
            handler.adopt(store)
        return handler
    except BaseException:
        for opened in (backend, store):
            if isinstance(opened, Closable):
                opened.close()
        raise


def _log_where_torch_logs() -> None:
    """Show our records where torch shows its own, from the level in LOGLEVEL on (default WARNING),
    unless the program has set up logging by itself: torch sets up its own namespace only."""
    ours = logging.getLogger("rdzv")
    if ours.handlers or logging.getLogger().handlers:
        return
    for handler in logging.getLogger("torch").handlers:
        ours.addHandler(handler)
    level = os.environ.get("LOGLEVEL", "WARNING").upper()
    ours.setLevel(getattr(logging, level, logging.WARNING))


def open_backend(
    params: RendezvousParameters, name: str | None = None
) -> tuple[RendezvousBackend, Store]:
    """The backend and the store that :func:`create` would use, and nothing on top of them."""
    return _open(_resolved(params), name or params.backend)


def _resolved(params: RendezvousParameters) -> RendezvousParameters:
    resolved = copy.copy(params)
    resolved.endpoint = resolve_endpoint(params.endpoint)
    return resolved


def _open(params: RendezvousParameters, name: str) -> tuple[RendezvousBackend, Store]:
    known = _find(name)
    entry = _entry_points()[name]
    try:
        factory: Factory = entry.load()
        extra_options = getattr(importlib.import_module(entry.module), "EXTRA_OPTIONS", ())
        Settings.from_parameters(params, frozenset(extra_options))
        made: Any = factory(params)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extra = _EXTRA_OF_MODULE.get(module)
        if extra not in known.extras:
            raise
        raise RendezvousSettingsError(
            f"--rdzv-backend={name} needs the Python package that provides {module!r}, which is "
            f"not installed here. On every node: pip install 'rdzv[{extra}]'"
        ) from error
    if (
        not isinstance(made, tuple)
        or len(made) != 2
        or not isinstance(made[0], RendezvousBackend)
        or not isinstance(made[1], Store)
    ):
        kinds = [type(part).__name__ for part in (made if isinstance(made, tuple) else [made])]
        raise RendezvousError(
            f"{known.factory}, the factory of backend {name!r}, returned {', '.join(kinds)} instead"
            " of a RendezvousBackend and a Store of torch. This is an error in that package: "
            "report it to its authors."
        )
    return made[0], made[1]


def _find(name: str) -> KnownBackend:
    known = {one.name: one for one in known_backends()}
    built = ", ".join(sorted(one.name for one in known.values() if one.factory))
    if name not in known:
        if name in _TORCHS_OWN:
            raise RendezvousSettingsError(
                f"--rdzv-backend={name} is torch's own, and rdzv has no part in it. Those of rdzv "
                f"are: {built or 'none'}."
            )
        near = difflib.get_close_matches(name, [*known, *_TORCHS_OWN], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RendezvousSettingsError(
            f"--rdzv-backend={name!r} is no backend that rdzv {rdzv.__version__} knows.{hint} "
            f"Installed are: {built or 'none'}."
        )
    if not known[name].factory:
        raise RendezvousSettingsError(
            f"--rdzv-backend={name} is not registered: the installation of rdzv "
            f"{rdzv.__version__} lacks an entry point. Install it again with pip."
        )
    return known[name]


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """By name. Of two packages that claim one name, this project's own wins."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        first = found.setdefault(entry.name, entry)
        if first.value == entry.value:
            continue
        winner = entry if _is_ours(entry) and not _is_ours(first) else first
        loser = first if winner is entry else entry
        found[entry.name] = winner
        logger.warning(
            "Two packages register the rendezvous backend %s; %s is used, %s is not.",
            entry.name,
            winner.value,
            loser.value,
        )
    return found


def _is_ours(entry: importlib.metadata.EntryPoint) -> bool:
    return entry.module.partition(".")[0] == "rdzv"
