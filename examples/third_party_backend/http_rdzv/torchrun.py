"""The entry point of group ``torchrun.handlers``, which torch calls in every process that imports
its rendezvous: so it imports nothing of weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.torchrun import handler_for

if TYPE_CHECKING:
    from rdzv.torchrun import HandlerCreator


def http() -> HandlerCreator:
    """``--rdzv-backend=http``."""
    return handler_for("http")
