"""rdzv: rendezvous for torchrun on Redis, SQL databases, etcd v3 and C10d stores.

Importing this package costs nothing: it imports neither torch nor any driver. Names below are
resolved when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rdzv.handler import DynamicRendezvousHandler, create_handler

_LAZY = {
    "DynamicRendezvousHandler": "rdzv.handler",
    "create_handler": "rdzv.handler",
}

__all__ = ["DynamicRendezvousHandler", "__version__", "create_handler"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rdzv' has no attribute {name!r}")
