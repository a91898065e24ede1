"""The hooks of ``fork``, for all databases of the process."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Attending(Protocol):
    """Whoever has to do something about a fork."""

    def before_fork(self) -> None:
        """The process is about to be forked."""

    def after_fork(self, in_child: bool) -> None:
        """It was, or could not be; this is the parent or the child."""


def attend(one: Attending) -> None:
    """Call it before and after each fork, for as long as it exists."""
    with _lock:
        _all.add(one)


# Held from before the fork until after it, by the thread that forks.
_lock = threading.RLock()
_all: weakref.WeakSet[Attending] = weakref.WeakSet()


def _before() -> None:
    _lock.acquire()
    for one in list(_all):
        one.before_fork()


def _after(in_child: bool) -> None:
    try:
        for one in list(_all):
            one.after_fork(in_child)
    finally:
        _lock.release()


os.register_at_fork(
    before=_before,
    after_in_parent=lambda: _after(False),
    after_in_child=lambda: _after(True),
)
