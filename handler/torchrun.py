"""The entry points of group ``torchrun.handlers``: one function for each ``--rdzv-backend`` name.

torch calls each of them, without arguments, whenever ``torch.distributed.elastic.rendezvous`` is
imported, in every process that does so, whether or not it uses rdzv. So this module imports
neither torch nor a driver; the creators that it returns do, once a user has chosen their name.

A third party whose package has an entry point ``consul = "consul_rdzv:create_backend"`` in group
``rdzv.backends`` makes the name known to torchrun with one function and one more entry point in
group ``torchrun.handlers``::

    def consul() -> HandlerCreator:
        return handler_for("consul")
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    HandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


@functools.cache
def handler_for(name: str) -> HandlerCreator:
    """The creator for the backend that group ``rdzv.backends`` knows as ``name``.

    Always the same object for the same name: torch refuses to register another one. The creator
    raises ``RendezvousSettingsError`` for what cannot work as given.
    """

    def creator(params: RendezvousParameters) -> RendezvousHandler:
        from rdzv.registry import create

        return create(params, name=name)

    creator.__qualname__ = f"handler_for({name!r})"
    return creator


def redis() -> HandlerCreator:
    """``--rdzv-backend=redis``."""
    return handler_for("redis")


def sql() -> HandlerCreator:
    """``--rdzv-backend=sql``."""
    return handler_for("sql")


def postgresql() -> HandlerCreator:
    """``--rdzv-backend=postgresql``."""
    return handler_for("postgresql")


def mysql() -> HandlerCreator:
    """``--rdzv-backend=mysql``."""
    return handler_for("mysql")


def sqlite() -> HandlerCreator:
    """``--rdzv-backend=sqlite``."""
    return handler_for("sqlite")


def etcd_v3() -> HandlerCreator:
    """``--rdzv-backend=etcd-v3``."""
    return handler_for("etcd-v3")


def tcpstore() -> HandlerCreator:
    """``--rdzv-backend=tcpstore``."""
    return handler_for("tcpstore")


def filestore() -> HandlerCreator:
    """``--rdzv-backend=filestore``."""
    return handler_for("filestore")
