"""From a backend's name to a handler.

Rules:

* A backend is an entry point of group ``rdzv.backends``: its name, and a factory
  ``create_backend(params) -> (backend, store)``. It is imported when it is chosen, not before.
* A name that this project promises but has no entry point for is not built yet, and says so.
* A missing driver becomes the name of the extra to install. No other ImportError is touched: it
  is somebody's bug, and hiding it would hide the bug.
* Factories see the endpoint as ``env:NAME`` resolves it; the caller's parameters stay as they are.
"""

from __future__ import annotations

import copy
import difflib
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

import rdzv
from rdzv.errors import RendezvousError, RendezvousSettingsError
from rdzv.ports import Closable
from rdzv.settings import resolve_endpoint

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
    extra: str = ""
    """The extra that brings the driver; "" where none is needed."""
    drivers: tuple[str, ...] = ()
    """Modules that the extra brings."""
    factory: str = ""
    """``module:function``; "" as long as the backend is not built."""


_PROMISED = (
    KnownBackend(
        "redis", "host:port, redis://, rediss:// or unix://", "redis", ("redis", "hiredis")
    ),
    KnownBackend("sql", "an SQLAlchemy URL"),
    KnownBackend("postgresql", "host:port/database or a URL", "postgresql", ("psycopg",)),
    KnownBackend("mysql", "host:port/database or a URL", "mysql", ("pymysql",)),
    KnownBackend("sqlite", "the path of a file on this machine"),
    KnownBackend(
        "etcd-v3",
        "host:port[;host:port...], etcd:// or etcds://",
        "etcd",
        ("pyetcd", "grpc", "google"),
    ),
    KnownBackend("tcpstore", "host:port"),
    KnownBackend("filestore", "the path of a file that all nodes share"),
)
_TORCHS_OWN = ("c10d", "etcd", "etcd-v2", "static")


def known_backends() -> tuple[KnownBackend, ...]:
    """All names: those of this project, built or not, then those of third parties."""
    installed = _entry_points()
    known = [
        KnownBackend(
            one.name,
            one.endpoint,
            one.extra,
            one.drivers,
            installed[one.name].value if one.name in installed else "",
        )
        for one in _PROMISED
    ]
    ours = {one.name for one in known}
    others = sorted(set(installed) - ours)
    return (*known, *(KnownBackend(name, factory=installed[name].value) for name in others))


def create(params: RendezvousParameters, name: str | None = None) -> RendezvousHandler:
    """The handler for ``params``, on the backend called ``name`` (default: ``params.backend``).

    Raises ``RendezvousSettingsError`` for what cannot work as given, and what the backend's
    factory raises.
    """
    from rdzv.handler import create_handler

    params = _resolved(params)
    backend, store = _open(params, name or params.backend)
    try:
        return create_handler(store, backend, params)
    except BaseException:
        for opened in (backend, store):
            if isinstance(opened, Closable):
                opened.close()
        raise


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
    try:
        factory: Factory = _entry_points()[name].load()
        made: Any = factory(params)
    except ModuleNotFoundError as error:
        raise _missing_driver(known, error) from error
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
        near = difflib.get_close_matches(name, [*known, *_TORCHS_OWN], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RendezvousSettingsError(
            f"--rdzv-backend={name!r} is no backend that rdzv {rdzv.__version__} knows.{hint} "
            f"Installed are: {built or 'none'}."
        )
    if not known[name].factory:
        if not built:
            raise RendezvousSettingsError(
                f"No backend is registered: the installation of rdzv {rdzv.__version__} has no "
                "entry points. Install it again with pip."
            )
        raise RendezvousSettingsError(
            f"--rdzv-backend={name} is not part of rdzv {rdzv.__version__}. This release has: "
            f"{built}. Choose one of them, or a release that has {name}."
        )
    return known[name]


def _missing_driver(known: KnownBackend, error: ModuleNotFoundError) -> Exception:
    """What to raise for it: the same error, unless a driver's own module is what is missing."""
    missing = (error.name or "").partition(".")[0]
    for candidate in (known, *_PROMISED):
        if missing in candidate.drivers:
            return RendezvousSettingsError(
                f"--rdzv-backend={known.name} needs the Python package that provides {missing!r}, "
                f"which is not installed here. Install it on every node: "
                f"pip install 'rdzv[{candidate.extra}]'"
            )
    return error


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
